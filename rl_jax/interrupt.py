"""Ctrl-C: once asks the run to stop where nothing is lost and exit 0; twice stops it now, resumable."""

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType, TracebackType

from rl_jax.progress import Dashboard

AGAIN_S = 0.05
"""After this time an interrupt is raised again that was lost."""


@contextlib.contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Let SIGTERM do what Ctrl-C does, for commands that end by an exception: what they have started ends, and so on.

    SIGINT too: a shell lets programs that it starts in the background ignore it.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Interrupt:
    """Handles SIGINT and SIGTERM while it is a context. `is_requested` is polled between steps.

    The second one raises KeyboardInterrupt and sets `is_forced`: where it strikes inside of JAX, what comes out may be
    another exception. Where it strikes a place that may not raise, such as JAX's hook of the garbage collector, Python
    drops it: then it is raised again.
    """

    def __init__(self, dashboard: Dashboard):
        self.is_requested = False
        self.is_forced = False
        self.promise = "this step is finished and a checkpoint written"
        """What the first interrupt leads to; the run says so for each of its phases."""
        self._dashboard = dashboard
        self._before: dict[signal.Signals, object] = {}
        self._again: threading.Timer | None = None

    def __enter__(self) -> "Interrupt":
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._handle)
        self._hook, sys.unraisablehook = sys.unraisablehook, self._catch
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        sys.unraisablehook = self._hook
        if self._again:
            self._again.cancel()
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def request(self, who: str) -> None:
        """Ask the run to stop, as the first interrupt does, for `who` elsewhere; from any thread."""
        if not self.is_requested:
            self.is_requested = True
            self._dashboard.say(f"stopping, as {who} asks: {self.promise}")

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.is_requested:
            self.is_forced = True
            raise KeyboardInterrupt
        self.is_requested = True
        self._dashboard.say(f"stopping: {self.promise}; once more stops now")

    def _catch(self, lost: "sys.UnraisableHookArgs") -> None:
        if not issubclass(lost.exc_type, KeyboardInterrupt):
            self._hook(lost)
            return
        # From a thread, later: raised here it would be lost again.
        main_thread = threading.main_thread().ident
        self._again = threading.Timer(AGAIN_S, signal.pthread_kill, (main_thread, signal.SIGINT))
        self._again.daemon = True
        self._again.start()
