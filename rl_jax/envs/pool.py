"""The environments of a run behind an async door: worker processes, a deadline for each call (step 6 of docs/walk.md).

    caller                     pool                                   worker process (one thread here drives each)
      | await score(...) -----> queue -> first free worker ----------> task, reward
      | <-- Score ------------- <------------------------------------- numbers
      | <-- EnvFailed --------- raised in the environment, or its process died (a fresh one takes its place)
      | <-- EnvTimeout -------- past deadline_s: the process group is killed (a fresh one takes its place)
      | <-- EnvInvalid -------- the reward was not a finite number

Time in the queue and the start of a worker do not count against the deadline. Knows no tokens, no samplers, no JAX.
"""

import asyncio
import logging
import queue
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import cast

from rl_jax.config import ConfigError, refuse
from rl_jax.envs.base import Task
from rl_jax.envs.errors import EnvError, EnvFailed
from rl_jax.envs.process import WorkerProcess
from rl_jax.envs.registry import EnvConfig
from rl_jax.envs.wire import EnvInfo, Method, Request, Setup

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class PoolConfig:
    """Worker processes for environments and rewards."""

    num_workers: int = 1
    """Worker processes; each holds every environment of the run and serves one call at a time."""
    deadline_s: float = 10.0
    """Seconds that one call of an environment may take; past it the worker is killed and the rollout dropped."""
    start_timeout_s: float = 60.0
    """Seconds that one environment may take to be imported and constructed."""
    max_memory_gib: float = 8.0
    """Address space of a worker in GiB; beyond it an allocation raises MemoryError in the environment. 0 = no limit."""

    def __post_init__(self) -> None:
        refuse(
            [
                None if self.num_workers >= 1 else f"num_workers={self.num_workers}: expected at least 1",
                None
                if 0 < self.deadline_s <= 86400
                else f"deadline_s={self.deadline_s}: expected seconds in (0, 86400]",
                None
                if 0 < self.start_timeout_s <= 86400
                else f"start_timeout_s={self.start_timeout_s}: expected seconds in (0, 86400]",
                None
                if self.max_memory_gib == 0 or 0.25 <= self.max_memory_gib <= 2**20
                else f"max_memory_gib={self.max_memory_gib}: expected 0 (no limit) or at least 0.25",
            ]
        )


@dataclass(frozen=True, kw_only=True)
class Score:
    """What an environment made of an episode. Example: Score(reward=0.8, parts={"exact": 0.0})."""

    reward: float
    parts: Mapping[str, float]
    """The other entries of the environment's mapping."""


class EnvPool:
    """See the module. Environments are addressed by their `label`; use as `async with`, or start() and close()."""

    def __init__(self, configs: Sequence[EnvConfig], config: PoolConfig):
        labels = [c.label for c in configs]
        refuse(
            [
                None if labels else "envs=[]: expected at least one environment",
                *(
                    f"envs.{i}.name={label!r}: another environment has it already; give each its own name"
                    for i, label in enumerate(labels)
                    if label in labels[:i]
                ),
            ]
        )
        self._config = config
        self._setup = Setup(
            configs=tuple(configs),
            sys_path=tuple(sys.path),
            deadline_s=config.deadline_s,
            start_timeout_s=config.start_timeout_s,
            max_memory_bytes=int(config.max_memory_gib * 2**30),
        )
        self._executor = ThreadPoolExecutor(config.num_workers, thread_name_prefix="env-worker")
        self._workers: list[WorkerProcess] = []
        self._idle: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._lock = threading.Lock()
        """Held to replace a worker and to close, so that no process is started after close."""
        self._is_closed = False
        self._infos: dict[str, EnvInfo] = {}
        self.num_pending = 0
        """Calls that wait or run now."""
        self.num_replaced = 0
        """Workers that were killed or died, and were replaced."""

    async def start(self) -> None:
        """Start the workers, construct every environment in each, and make task 0 of each as a trial.

        Raises:
            ConfigError: an id or settings that cannot be.
            EnvFailed, EnvTimeout: an environment raised, crashed or hung while it started.
        """
        assert not self._workers, "start() was called twice"
        self._workers = [WorkerProcess(self._setup) for _ in range(self._config.num_workers)]
        loop = asyncio.get_running_loop()
        try:
            ready = [loop.run_in_executor(self._executor, worker.wait_ready) for worker in self._workers]
            self._infos = (await asyncio.gather(*ready))[0]
        except BaseException:
            await self.close()
            raise
        for slot in range(self._config.num_workers):
            self._idle.put(slot)

    async def info(self, env: str) -> int | None:
        """Return the number of tasks of an environment, None = endless."""
        return self._infos[env].size

    async def task(self, env: str, index: int) -> Task:
        """Return task `index` with its prompt only: what the environment needs to judge it stays in the worker."""
        prompt = await self._call("task", env, index)
        return Task(prompt=cast(str | list[dict[str, str]], prompt))

    async def reply(self, env: str, index: int, completions: Sequence[str]) -> str | None:
        """Return the environment's next turn, or None when the episode is over."""
        if not self._infos[env].is_multi_turn:
            return None
        return cast(str | None, await self._call("reply", env, index, completions))

    async def score(self, env: str, index: int, completions: Sequence[str]) -> Score:
        """Judge a finished episode: the policy's text of each turn."""
        parts = dict(cast(Mapping[str, float], await self._call("reward", env, index, completions)))
        return Score(reward=parts.pop("reward"), parts=parts)

    async def solution(self, env: str, index: int) -> str:
        """Return the text that a perfect policy would write, for environments that have `solution`."""
        return cast(str, await self._call("solution", env, index))

    async def close(self) -> None:
        """Kill the workers; calls in progress end in EnvFailed."""
        with self._lock:
            self._is_closed = True
            for worker in self._workers:
                worker.hang_up()
        await asyncio.to_thread(self._executor.shutdown)
        for worker in self._workers:
            worker.kill()

    async def __aenter__(self) -> "EnvPool":
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _call(self, method: Method, env: str, index: int, completions: Sequence[str] = ()) -> object:
        assert self._infos, "start() the pool first"
        assert env in self._infos, f"{env!r} is none of the pool's: {', '.join(self._infos)}"
        # An index out of a NumPy array becomes an int here: workers know no NumPy.
        request = Request(method=method, env=env, index=int(index), completions=tuple(completions))
        if self._is_closed:
            raise EnvFailed(f"{request}: the pool of environments is closed")
        self.num_pending += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, self._call_blocking, request)
        finally:
            self.num_pending -= 1

    def _call_blocking(self, request: Request) -> object:
        """Run one call on a free worker. As many threads as workers: a free one is always there."""
        slot = self._idle.get()
        try:
            if not self._workers[slot].is_usable():
                self._replace(slot, "it died between two calls")
            return self._workers[slot].call(request)
        except ConfigError as error:  # only the start of a replacement: for the run it is a failed environment
            raise EnvFailed(f"{request}: {error}") from error
        except EnvError as error:
            if self._workers[slot].is_dead and not self._is_closed:
                self._replace(slot, str(error))
            raise
        finally:
            self._idle.put(slot)

    def _replace(self, slot: int, reason: str) -> None:
        with self._lock:
            if self._is_closed:
                raise EnvFailed("the pool of environments is closed")
            self._workers[slot].kill()
            self._workers[slot] = WorkerProcess(self._setup)
            self.num_replaced += 1
        logger.warning("environment worker replaced: %s", reason)
