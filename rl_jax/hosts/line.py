"""The connection between process 0 and another one: messages, and a beat that says that the other side still lives.

    main thread: send(order) ----------> reader thread of the other side: order -> queue of its main thread
    beat thread: beat every second ----> ... notes the time; silence is for the watch in group.py to judge

A message is a line of JSON and the bytes of some arrays: nothing of it is ever executed. Knows no order and no JAX.
"""

import contextlib
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

HEAD = struct.Struct("!II")
"""Bytes of the JSON, number of arrays; JSON of 0 bytes is a beat."""
MAX_JSON_BYTES = 64 << 20
CHUNK_BYTES = 1 << 20
BEAT = HEAD.pack(0, 0)


@dataclass(frozen=True, kw_only=True)
class Message:
    """What processes say to each other.

    Example: Message(kind="train", facts={"step": 7, "num_batches": 1}, arrays=[tokens_BT, targets_BT, ...]).
    """

    kind: str
    facts: dict[str, object] = field(default_factory=dict)
    """Numbers and text, lists and tables of such."""
    arrays: Sequence[np.ndarray] = ()


class Closed(ConnectionError):
    """The other side closed the connection, or the connection broke."""


def bytes_of(array: np.ndarray) -> memoryview:
    """Return the bytes of a C-contiguous array, without a copy."""
    return array.reshape(-1).view(np.uint8).data


class Line:
    """See the module. `peer` is how messages for people call the other side."""

    def __init__(self, connection: socket.socket, peer: str):
        self.peer = peer
        self.heard_s = time.monotonic()
        """When bytes last came in."""
        self._connection = connection
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._lock = threading.Lock()
        self._is_closed = threading.Event()

    def send(self, message: Message) -> None:
        """Write one message.

        Raises:
            Closed: the other side is gone.
        """
        arrays = [np.asarray(array, order="C") for array in message.arrays]
        shapes = [[array.dtype.str, list(array.shape)] for array in arrays]
        text = json.dumps({"kind": message.kind, "facts": message.facts, "arrays": shapes}).encode()
        try:
            with self._lock:
                self._connection.sendall(HEAD.pack(len(text), len(arrays)) + text)
                for array in arrays:
                    self._connection.sendall(bytes_of(array))
        except OSError as error:
            raise Closed(f"{self.peer}: {error}") from error

    def receive(self) -> Message:
        """Return the next message that is no beat.

        Raises:
            Closed: the other side is gone. ValueError: it does not speak as rl_jax does.
        """
        while True:
            size, num_arrays = HEAD.unpack(self._read(HEAD.size))
            if size:
                break
        if size > MAX_JSON_BYTES:
            raise ValueError(f"{self.peer}: a message of {size} bytes; it is no process of rl_jax")
        told = json.loads(bytes(self._read(size)))
        shapes = [(np.dtype(word), tuple(shape)) for word, shape in told["arrays"]]
        if len(shapes) != num_arrays:
            raise ValueError(f"{self.peer}: {num_arrays} arrays follow, {len(shapes)} are named")
        arrays = [self._read_array(dtype, shape) for dtype, shape in shapes]
        return Message(kind=told["kind"], facts=told["facts"], arrays=arrays)

    def set_timeout(self, seconds: float | None) -> None:
        """Let `receive` wait so long for bytes at most, and raise Closed then; None = for ever."""
        self._connection.settimeout(seconds)

    def start(self, beat_s: float, on_message: Callable[[Message], None], on_end: Callable[[str], None]) -> None:
        """Begin to beat and to read; the callbacks run in the reader's thread, `on_end` with why, once."""
        self.heard_s = time.monotonic()
        threading.Thread(target=self._beat, args=(beat_s,), name=f"beat to {self.peer}", daemon=True).start()
        reader = threading.Thread(
            target=self._listen, args=(on_message, on_end), name=f"reader of {self.peer}", daemon=True
        )
        reader.start()

    def close(self) -> None:
        """Close the connection; idempotent."""
        self._is_closed.set()
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _listen(self, on_message: Callable[[Message], None], on_end: Callable[[str], None]) -> None:
        try:
            while True:
                on_message(self.receive())
        except (Closed, ValueError, KeyError, TypeError) as error:
            on_end("its connection was closed" if isinstance(error, Closed) else str(error))

    def _beat(self, beat_s: float) -> None:
        while not self._is_closed.wait(beat_s):
            try:
                with self._lock:
                    self._connection.sendall(BEAT)
            except OSError:
                return  # the reader finds the same

    def _read_array(self, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
        array = np.empty(shape, dtype)
        self._fill(bytes_of(array))
        return array

    def _read(self, size: int) -> bytearray:
        buffer = bytearray(size)
        self._fill(memoryview(buffer))
        return buffer

    def _fill(self, view: memoryview) -> None:
        done = 0
        while done < len(view):
            try:
                count = self._connection.recv_into(view[done : done + CHUNK_BYTES])
            except OSError as error:
                raise Closed(f"{self.peer}: {error}") from error
            if not count:
                raise Closed(f"{self.peer}: end of file")
            self.heard_s = time.monotonic()
            done += count
