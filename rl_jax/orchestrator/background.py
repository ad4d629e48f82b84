"""Tasks that run beside each other on one event loop, a bell for changes, and the first error of any of them.

Nobody waits for a task that died: who waits is woken by the bell, and finds the error in `check`. Knows nothing of
rollouts.
"""

import asyncio
import logging
from collections.abc import Coroutine

logger = logging.getLogger(__name__)


class Background:
    """See the module. One event loop; made inside it."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closing = False
        self.failure: BaseException | None = None
        """What ended a task, the first only."""
        self.changed = asyncio.Event()
        """Set at the next `notify`: read it first, look at the state second, wait for it third."""

    def spawn(self, coroutine: Coroutine[object, object, None]) -> None:
        """Run `coroutine` beside; what it raises is kept in `failure`."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)

    def check(self) -> None:
        """Raise what ended a task, if anything did."""
        if self.failure:
            raise self.failure

    def notify(self) -> None:
        """Wake everyone who waits for a change."""
        self.changed.set()
        self.changed = asyncio.Event()

    async def close(self) -> None:
        """Cancel all tasks and wait for their end."""
        self._is_closing = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if self._is_closing:
            return
        # Whoever cancels a task, a sampler that shuts down for one, would otherwise leave its group in flight for ever.
        error = RuntimeError(f"{task.get_coro()}: was cancelled") if task.cancelled() else task.exception()
        if error and not self.failure:  # what follows from the first is not news
            self.failure = error
            logger.error("the orchestrator stops: %s", error)
            self.notify()
