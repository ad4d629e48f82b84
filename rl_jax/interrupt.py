"""Ctrl-C: once asks the run to finish its step, write a checkpoint and exit 0; twice stops it now, resumable."""

import signal
from types import FrameType, TracebackType

from rl_jax.progress import Dashboard


class Interrupt:
    """Handles SIGINT and SIGTERM while it is a context. `is_requested` is polled between steps."""

    def __init__(self, dashboard: Dashboard):
        self.is_requested = False
        self._dashboard = dashboard
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> "Interrupt":
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.is_requested:
            raise KeyboardInterrupt
        self.is_requested = True
        self._dashboard.say("stopping: this step is finished and a checkpoint written; once more stops now")
