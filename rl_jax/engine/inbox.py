"""What crosses between event loops and the engine thread: commands one way, calls on the loops the other."""

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rl_jax.engine.engine import Progress
from rl_jax.sampler import Request, SamplerGone, SamplerLost

logger = logging.getLogger(__name__)

Event = Progress | SamplerLost


@dataclass(frozen=True)
class Submit:
    """Requests that start together; `sink` runs on `loop` for each of their events."""

    tickets: list[int]
    requests: list[Request]
    loop: asyncio.AbstractEventLoop
    sink: Callable[[Event], None]
    is_streamed: bool


@dataclass(frozen=True)
class Call:
    """A function for the engine thread; `sink` runs on `loop` with its result, its ValueError or SamplerLost."""

    function: Callable[[], object]
    loop: asyncio.AbstractEventLoop
    sink: Callable[[object], None]


@dataclass(frozen=True)
class Abort:
    """End these requests without an answer; those that are not there any more do not matter."""

    tickets: list[int]


Command = Submit | Call | Abort


class Inbox:
    """Commands in order; closed for good by the reason why nobody reads it any more."""

    def __init__(self) -> None:
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._reason: BaseException | None = None

    def put(self, command: Command) -> None:
        """Add a command, or raise SamplerLost if nobody will read it."""
        with self._lock:
            self.check()
            self._commands.put(command)

    def check(self) -> None:
        """Raise SamplerLost if the inbox is closed."""
        if self._reason is not None:
            raise lost(self._reason)

    def get(self, *, wait: bool) -> Command | None:
        """Return the next command, or None if there is none and `wait` is false."""
        try:
            return self._commands.get(block=wait)
        except queue.Empty:
            return None

    def close(self, reason: BaseException) -> list[Command]:
        """Refuse further commands; returns those that were not read."""
        with self._lock:
            self._reason = reason
        unread = []
        while (command := self.get(wait=False)) is not None:
            unread.append(command)
        return unread


def lost(reason: BaseException) -> SamplerLost:
    """Return a SamplerLost caused by `reason`: the engine's thread never comes back."""
    error = SamplerGone(f"the embedded sampler is gone: {reason or repr(reason)}")
    error.__cause__ = reason
    return error


def post(loop: asyncio.AbstractEventLoop, calls: Sequence[Callable[[], None]]) -> None:
    """Run `calls` on the loop, in order."""

    def run() -> None:
        for call in calls:
            call()

    try:
        loop.call_soon_threadsafe(run)
    except RuntimeError:
        # The loop was closed: whoever waited there is gone, and with it the reason to tell them.
        logger.debug("a result came after its event loop was closed")
