"""One worker process as the pool sees it: start, ask within a deadline, kill (step 6 of docs/walk.md).

Blocking on purpose: each worker is driven by a thread of its own, so its deadline is kept by the kernel and not by an
event loop that tracing, or a long callback, may hold up. Knows no asyncio and no environment.
"""

import contextlib
import logging
import os
import pickle
import selectors
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from typing import cast

from rl_jax.config import ConfigError
from rl_jax.envs.errors import EnvFailed, EnvInvalid, EnvTimeout
from rl_jax.envs.wire import Answer, EnvInfo, Request, Setup, receive, send
from rl_jax.printable import printable

DUMP_S = 0.5
"""A late worker has this long to write where it hangs, before it is killed."""
TAIL_CHARS = 2000

logger = logging.getLogger(__name__)


class WorkerProcess:
    """A fresh Python process with every environment of a run. One call at a time.

    Not a fork, and not multiprocessing: the run has the threads of JAX, and its entry module must not be imported again.
    """

    def __init__(self, setup: Setup):
        self._setup = setup
        self._infos: dict[str, EnvInfo] = {}
        self._num_calls = 0
        self._last_output = ""
        self._is_dead = False
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-m", "rl_jax.envs.worker"],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,  # one group to kill, and out of reach of the terminal's Ctrl-C
                env={**os.environ, "PYTHONHASHSEED": "0"},  # sets of strings: the same order in every worker
            )
        assert self._process.stderr is not None, "asked for as a pipe"
        self._stderr_pipe = self._process.stderr
        self._stderr = self._stderr_pipe.fileno()
        os.set_blocking(self._stderr, False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)
        self._selector.register(self._stderr, selectors.EVENT_READ)

    @property
    def is_dead(self) -> bool:
        """It was killed, or found dead."""
        return self._is_dead

    def wait_ready(self) -> dict[str, EnvInfo]:
        """Wait until every environment is constructed and return what each told about itself.

        Raises:
            ConfigError: a bad id or bad settings.
            EnvFailed, EnvTimeout: its code raised, crashed or hung while it was imported, constructed or tried.
        """
        for i, config in enumerate(self._setup.configs):
            if config.label in self._infos:
                continue
            message = self._setup if i == 0 else None
            answer = self._ask(f"{config.label}: start of the environment", i, message, self._setup.start_timeout_s)
            if answer.kind != "ok":
                self.kill()
            if answer.kind == "config":
                faults = cast(tuple[str, ...], answer.value)
                raise ConfigError([printable(f"environment {config.label}: {fault}") for fault in faults])
            if answer.kind != "ok":
                raise EnvFailed(f"environment {config.label} cannot start: {answer.value}")
            self._infos[config.label] = cast(EnvInfo, answer.value)
        return self._infos

    def call(self, request: Request) -> object:
        """Return the value of one call, first waiting for the start. After a timeout or a crash the worker is dead."""
        self.wait_ready()
        self._num_calls += 1
        number = len(self._setup.configs) + self._num_calls
        answer = self._ask(str(request), number, replace(request, number=number), self._setup.deadline_s)
        if answer.kind == "ok":
            return answer.value
        raise (EnvInvalid if answer.kind == "invalid" else EnvFailed)(f"{request}: {answer.value}")

    def is_usable(self) -> bool:
        """Say whether it can take a call: an idle worker whose socket has something to read is gone, or out of step."""
        is_starting = len(self._infos) < len(self._setup.configs)
        return not self._is_dead and (is_starting or not self._socket_is_readable(timeout_s=0))

    def hang_up(self) -> None:
        """Make a call in progress, in another thread, fail now."""
        with contextlib.suppress(OSError):  # that thread was first and has closed it
            self._socket.shutdown(socket.SHUT_RDWR)

    def kill(self) -> str:
        """Kill the process and everything that it started; return how it ended and its last output."""
        if self._is_dead:
            return ""
        self._is_dead = True
        with contextlib.suppress(ProcessLookupError, PermissionError):  # the group is empty already
            os.killpg(self._process.pid, signal.SIGKILL)
        try:
            code = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            logger.error("process %d, an environment worker, did not die within 5 s of SIGKILL", self._process.pid)
            code = -signal.SIGKILL
        self._read_output()
        self._selector.close()
        self._socket.close()
        self._stderr_pipe.close()
        how = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
        last = self._last_output.strip()
        return f"({how})" + (f"; its last output:\n{last}" if last else "")

    def _ask(self, what: str, number: int, message: object, limit_s: float) -> Answer:
        """Send `message`, if any, and return the answer of that number; without it in time, kill and raise."""
        end_s = time.monotonic() + limit_s
        try:
            if message is not None:
                self._socket.settimeout(limit_s)
                send(self._socket, message)
            answer = cast(Answer, self._receive(end_s))
            while answer.number != number:  # the user's code has a copy of the socket: what it says late is not this
                logger.warning("%s: an answer that belongs to another call was left aside", what)
                answer = cast(Answer, self._receive(end_s))
            return answer
        except (TimeoutError, EOFError, ConnectionError, pickle.UnpicklingError) as error:
            is_late = time.monotonic() >= end_s
            if is_late:
                self._dump_traceback()
            ended = self.kill()
            if is_late:
                raise EnvTimeout(f"{what} took longer than {limit_s:g} s; its worker was killed {ended}") from error
            raise EnvFailed(f"{what}: its worker process died {ended}") from error

    def _dump_traceback(self) -> None:
        """Have a late worker write its stack to its output, for the message; it is killed next."""
        self._selector.unregister(self._socket)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGUSR1)
        end_s = time.monotonic() + DUMP_S
        while self._selector.select(end_s - time.monotonic()) and time.monotonic() < end_s:
            self._read_output()
            end_s = min(end_s, time.monotonic() + DUMP_S / 10)

    def _receive(self, end_s: float) -> object:
        """Return the next message. One that is there counts as in time, however late this thread gets to look."""
        left_s = end_s - time.monotonic()
        while not self._socket_is_readable(left_s):
            if left_s <= 0:
                raise TimeoutError
            left_s = end_s - time.monotonic()
        self._socket.settimeout(max(left_s, 1.0))
        return receive(self._socket)

    def _socket_is_readable(self, timeout_s: float) -> bool:
        """Wait for the socket or for output; pass output on."""
        ready = [key.fileobj for key, _ in self._selector.select(max(timeout_s, 0))]
        if self._stderr in ready:
            self._read_output()
        return self._socket in ready

    def _read_output(self) -> None:
        """Take what is in the pipe now: a worker that prints without end must not hold this thread."""
        try:
            chunk = os.read(self._stderr, 1 << 16)
        except BlockingIOError:
            return
        if not chunk and self._stderr in self._selector.get_map():
            self._selector.unregister(self._stderr)
        if text := chunk.decode(errors="replace"):
            self._last_output = (self._last_output + text)[-TAIL_CHARS:]
            logger.info("environment output: %s", printable(text.rstrip()))
