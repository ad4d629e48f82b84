"""An event loop in a thread of its own, and a door to it for the threads that block.

Knows nothing of rollouts.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import TypeVar

T = TypeVar("T")


class LoopThread:
    """See the module."""

    def __init__(self, name: str):
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, make: Callable[[], Coroutine[object, object, T]]) -> T:
        """Run the coroutine that `make` makes, and block until it is done; an interrupt here cancels it there."""
        assert self._thread.is_alive(), f"thread {self._thread.name} was closed"
        assert threading.current_thread() is not self._thread, f"would wait for itself: {self._thread.name}"
        future = asyncio.run_coroutine_threadsafe(make(), self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def wait(self, make: Callable[[], Coroutine[object, object, T]]) -> T:
        """Run the coroutine that `make` makes, and wait for it on another event loop; cancelling here cancels it there."""
        assert self._thread.is_alive(), f"thread {self._thread.name} was closed"
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(make(), self._loop))

    def call(self, function: Callable[[], T]) -> T:
        """Call `function` in the thread and return its value."""

        async def once() -> T:
            return function()

        return self.run(once)

    def close(self) -> None:
        """Stop the thread; idempotent."""
        if not self._thread.is_alive():
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.run_until_complete(_cancel_others())
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
