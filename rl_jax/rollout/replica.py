"""One server of the fleet: what it holds, what it is doing, and how it gets new weights (step 14 of docs/walk.md).

    stage(path) ... staged -> pause -> commit(path, version) -> asked: is it that version, that digest? -> resume
    |-- requests go on ---|   |------------------------- requests are frozen -------------------------|

From the pause on the weights are in doubt until the last answer. Whatever fails in between is for the fleet to judge:
nothing here resumes a server whose weights are not known. Knows one server; replicas.py knows them all.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol, TypeVar

from rl_jax.rollout.client import ServerClient, ServerLost
from rl_jax.rollout.generate_api import BadReply
from rl_jax.rollout.server import ServerProcess

T = TypeVar("T")

STAGE_POLL_S, MAX_STAGE_POLL_S = 0.01, 0.5
"""Seconds until the first look at a stage, and between later ones at most; each look waits for a decode step."""


class StagedUpdate(Protocol):
    """What a replica needs to know of an update on disk; bridge/wire has it."""

    @property
    def path(self) -> Path: ...
    @property
    def version(self) -> int: ...
    @property
    def base_version(self) -> int | None: ...
    @property
    def kind(self) -> str: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def changed_frac(self) -> float: ...
    @property
    def seconds(self) -> float: ...
    @property
    def reason(self) -> str: ...
    @property
    def digest(self) -> str: ...


class WeightSource(Protocol):
    """Who lays weights down for the servers; bridge/push.py has it. Both methods block and may be called in a thread."""

    def write(self, weights: object, version: int) -> StagedUpdate:
        """Lay down policy `version`: what changed since the version before, or everything."""
        ...

    def update_for(self, held_version: int | None) -> StagedUpdate:
        """Return what brings a replica from `held_version` (None: unknown) to the version written last."""
        ...


class State(StrEnum):
    """Where a replica is in its life."""

    STARTING = "starting"  # not answering yet, or not at the current version
    LIVE = "live"  # routed to, but while it is paused for an update
    LOST = "lost"  # evicted; brought back if it can be
    GONE = "gone"  # evicted for good


@dataclass(frozen=True, kw_only=True)
class Sync:
    """One update of one replica.

    Example: Sync(version=17, kind="delta", num_bytes=48_211, changed_frac=0.004, stage_s=0.06, pause_s=0.09).
    """

    version: int
    kind: str
    num_bytes: int
    changed_frac: float
    stage_s: float
    """Reading and checking, while requests go on."""
    pause_s: float
    """Frozen: from the pause to the resume."""


class Refused(RuntimeError):
    """A server does not take an update, and samples on from what it held."""


class Evicted(ServerLost):
    """A call was cut short because its replica was evicted."""


class Replica:
    """See the module."""

    def __init__(self, name: str, *, url: str = "", server: ServerProcess | None = None):
        """Either an address, or a process to start."""
        self.name = name
        self.url = url
        self.server = server
        self.client: ServerClient | None = None
        self.state = State.STARTING
        self.version: int | None = None
        """Policy version that it acknowledged; None = none, or not known."""
        self.known_versions: set[int] = set()
        """Every version that it was ever told to take."""
        self.is_updating = False
        """Paused for a commit: requests wait, or go elsewhere."""
        self.is_doubtful = False
        """A commit was begun and not confirmed: its weights are not known."""
        self.last_sync: Sync | None = None
        self.num_syncs = 0
        self.num_restarts = 0
        self.why_lost = ""
        self.lock = asyncio.Lock()
        """Held by whoever starts it, updates it or brings it back."""
        self._calls: set[asyncio.Task[object]] = set()
        self._num_evictions = 0

    @property
    def is_routable(self) -> bool:
        """Whether it takes requests now."""
        return self.state is State.LIVE and not self.is_updating

    @property
    def load(self) -> int:
        """Calls in flight."""
        return len(self._calls)

    async def call(self, make: Callable[[ServerClient], Coroutine[object, object, T]]) -> T:
        """Run one sampling call on the server.

        Raises:
            Evicted: the replica was evicted meanwhile. Whatever the call raises.
        """
        assert self.client is not None, f"{self.name} was never started"
        task = asyncio.get_running_loop().create_task(make(self.client))
        self._calls.add(task)  # type: ignore[arg-type]
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.wait([task])
            raise
        finally:
            self._calls.discard(task)  # type: ignore[arg-type]
        if task.cancelled():
            raise Evicted(f"{self.name} was evicted: {self.why_lost}")
        return task.result()

    def evict(self, reason: str, *, is_for_good: bool = False) -> None:
        """Stop using it now: its calls fail, and a process of ours is killed, for nobody may hear from it again."""
        self.state = State.GONE if is_for_good else State.LOST
        self.version, self.why_lost = None, reason
        self._num_evictions += 1
        for task in list(self._calls):
            task.cancel()
        if self.server:
            self.server.kill()

    async def update(self, update: StagedUpdate, *, keep_kv: bool, timeout_s: float) -> None:
        """Take an update; on return the server samples from it.

        Raises:
            Refused: it samples on from what it held.
            ServerLost, ServerFailed, BadReply: the weights may be in doubt.
        """
        client, path, num_evictions = self.client, str(update.path), self._num_evictions
        assert client is not None, f"{self.name} was never started"
        self.known_versions.add(update.version)
        started_s = time.monotonic()
        await self._stage(client, path)
        staged_s = time.monotonic()
        self.is_updating = self.is_doubtful = True
        try:
            await client.pause(keep_kv=keep_kv)
            await client.commit(path, update.version, timeout_s)
            await self._check(client, update)
            await client.resume()
        finally:
            self.is_updating = False
        if num_evictions != self._num_evictions:
            raise Evicted(f"{self.name} was evicted while it was updated: {self.why_lost}")
        self.version, self.is_doubtful = update.version, False
        self.num_syncs += 1
        self.last_sync = Sync(
            version=update.version,
            kind=update.kind,
            num_bytes=update.num_bytes,
            changed_frac=update.changed_frac,
            stage_s=staged_s - started_s,
            pause_s=time.monotonic() - staged_s,
        )

    async def _stage(self, client: ServerClient, path: str) -> None:
        """Wait until every worker has read and checked the update."""
        await client.begin_stage(path)
        poll_s = STAGE_POLL_S
        while True:
            workers = await client.stage_status()
            for status in workers:
                if status.get("state") not in ("staging", "staged"):
                    raise Refused(f"{self.name} does not take {path}: {status.get('fault') or status}")
            if all(status["state"] == "staged" for status in workers):
                return
            await asyncio.sleep(poll_s)
            poll_s = min(1.5 * poll_s, MAX_STAGE_POLL_S)

    async def _check(self, client: ServerClient, update: StagedUpdate) -> None:
        """Ask what the server samples from after an update."""
        label = await client.weight_version()
        if label != str(update.version):
            raise BadReply(f"{self.name}: weight_info says {label!r} after the update to {update.version}")
        for status in await client.stage_status():
            found = status.get("served_version"), status.get("served_digest")
            if found != (update.version, update.digest):
                raise BadReply(f"{self.name}: holds {found} after the update to {update.version}, {update.digest}")
