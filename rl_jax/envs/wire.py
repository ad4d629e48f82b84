"""What the pool and its worker processes say to each other: length-prefixed pickles over a socket.

    pool                                        worker
      | Setup ------------------------------------> import, construct and try each environment, in order
      | <---- for each: Answer("ok", EnvInfo) or Answer("config", faults) or Answer("error", text)
      | Request(number, method, env, index, completions) -> call it
      | <---- Answer("ok", plain value) or Answer("error", text) or Answer("invalid", text), with the request's number

The answers to Setup are numbered by environment, requests go on from there. An answer of another number is not taken.
Only plain values come back (numbers, text, lists, dictionaries, the records below): a user's own classes stay in the
worker, and the run never imports a user's module.
"""

import pickle
import socket
import struct
from dataclasses import dataclass
from typing import Literal

from rl_jax.envs.registry import EnvConfig

LENGTH = struct.Struct("!Q")
Method = Literal["task", "reply", "reward", "solution"]


@dataclass(frozen=True, kw_only=True)
class Setup:
    """First message to a worker."""

    configs: tuple[EnvConfig, ...]
    sys_path: tuple[str, ...]
    """Where the run finds modules: import paths mean the same in the worker."""
    deadline_s: float
    start_timeout_s: float
    max_memory_bytes: int
    """0 = no limit."""


@dataclass(frozen=True, kw_only=True)
class EnvInfo:
    """What an environment told about itself when it was constructed."""

    size: int | None
    """Number of tasks, None = endless."""
    is_multi_turn: bool
    """It has a `reply` method."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """One call."""

    method: Method
    env: str
    index: int
    completions: tuple[str, ...] = ()
    number: int = 0
    """Given by the one who asks a worker."""

    def __str__(self) -> str:
        return f"{self.env}: {self.method} of task {self.index}"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What became of a Setup or a Request."""

    kind: Literal["ok", "error", "invalid", "config"]
    value: object
    number: int = -1
    """Of what it answers: the environment of the Setup, or the Request."""


def send(connection: socket.socket, message: object) -> None:
    """Write one message."""
    payload = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    connection.sendall(LENGTH.pack(len(payload)) + payload)


def receive(connection: socket.socket) -> object:
    """Read one message. Raises EOFError when the other side is gone."""
    (size,) = LENGTH.unpack(_read(connection, LENGTH.size))
    return pickle.loads(_read(connection, size))


def _read(connection: socket.socket, size: int) -> bytes:
    chunks = bytearray()
    while len(chunks) < size:
        chunk = connection.recv(min(size - len(chunks), 1 << 20))
        if not chunk:
            raise EOFError("the other side closed the connection")
        chunks += chunk
    return bytes(chunks)
