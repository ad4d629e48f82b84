"""The replicas of a fleet through their lives: started, brought to the current version, evicted, brought back.

    STARTING --answers, takes the current version--> LIVE
        ^                                             |   dies, hangs, lies, refuses an update, or leaves its weights
        |                                             v   in doubt
        +--- restarted, or answers again ----------- LOST --no restart left--> GONE

Nobody is routed to before it holds the version that was published last, and a server whose weights are in doubt is
never asked again: one of ours is killed, an attached one must come back with its first weights. Runs on one event loop.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence

import aiohttp

from rl_jax.config import ConfigError
from rl_jax.rollout.client import ServerClient, ServerFailed, ServerLost, ServerSilent
from rl_jax.rollout.fleet_config import FleetConfig
from rl_jax.rollout.generate_api import BadReply
from rl_jax.rollout.replica import Refused, Replica, StagedUpdate, State, WeightSource
from rl_jax.rollout.server_check import check_server
from rl_jax.sampler import SamplerLost

logger = logging.getLogger(__name__)

FRESH = "default"
"""Version label of a server that has had no update since it started."""
FAILURES = (ServerLost, ServerFailed, Refused, BadReply, ConfigError, OSError)
READY_POLL_S = 0.25
TELL_S = 10.0


class Replicas:
    """See the module."""

    def __init__(
        self, config: FleetConfig, members: Sequence[Replica], source: WeightSource, say: Callable[[str], None]
    ):
        self.members = {replica.name: replica for replica in members}
        self._config = config
        self._source = source
        self._say = say
        self._session: aiohttp.ClientSession | None = None
        self._version: int | None = None
        """What was published last."""
        self._laying_down = asyncio.Lock()
        self._changed = asyncio.Event()
        self._keepers: list[asyncio.Task[None]] = []
        self.num_evictions = 0

    # ---- who is there

    @property
    def live(self) -> list[Replica]:
        """Replicas that are routed to, now or as soon as their update is through."""
        return [replica for replica in self.members.values() if replica.state is State.LIVE]

    async def loads(self) -> dict[str, int]:
        """Return name -> requests in flight of every replica that can take one; wait for the first.

        Raises:
            SamplerLost: there was none for lost_after_s, or there never will be.
        """
        try:
            async with asyncio.timeout(self._config.lost_after_s):
                while True:
                    changed = self._changed
                    found = {name: replica.load for name, replica in self.members.items() if replica.is_routable}
                    if found:
                        return found
                    if all(replica.state is State.GONE for replica in self.members.values()):
                        raise SamplerLost(f"every vLLM server is lost for good: {self._why()}")
                    await changed.wait()
        except TimeoutError as error:
            raise SamplerLost(
                f"no vLLM server was live for sampler.lost_after_s={self._config.lost_after_s:g}: {self._why()}"
            ) from error

    def _why(self) -> str:
        return "; ".join(f"{r.name} {r.state}: {r.why_lost or 'no failure'}" for r in self.members.values())

    def notify(self) -> None:
        """Wake who waits for a routable replica."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    # ---- start and end

    async def start(self) -> None:
        """Start or reach every server and check it.

        Raises:
            ConfigError: one that cannot sample for this run. ServerLost: one that does not answer.
        """
        connector = aiohttp.TCPConnector(limit=0, force_close=True)  # a kept connection may be closed as it is used
        self._session = aiohttp.ClientSession(connector=connector)
        results = await asyncio.gather(*map(self._reach, self.members.values()), return_exceptions=True)
        faults = [fault for result in results if isinstance(result, ConfigError) for fault in result.faults]
        if faults:
            raise ConfigError(faults)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        self._keepers = [asyncio.create_task(self._keep(replica)) for replica in self.members.values()]

    async def close(self) -> None:
        """End the servers that the run started, and every connection."""
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        for replica in self.members.values():
            replica.state = State.GONE
        self.notify()
        await asyncio.gather(*(asyncio.to_thread(r.server.end) for r in self.members.values() if r.server))
        for replica in self.members.values():
            if replica.client:
                replica.client.close()
        if self._session:
            await self._session.close()

    async def _reach(self, replica: Replica) -> None:
        """Start its server if it is ours, wait until it answers, check it; its weights are unknown then."""
        assert self._session is not None, "start() first"
        replica.version = None
        if replica.server:
            replica.server.start()
            replica.url = replica.server.url
        replica.client = ServerClient(replica.url, self._config, self._session)
        if replica.server:
            await self._wait_ready(replica)
        await check_server(replica.client, self._config, is_ours=replica.server is not None)
        replica.is_doubtful = False

    async def _wait_ready(self, replica: Replica) -> None:
        server, client = replica.server, replica.client
        assert server is not None and client is not None, "a server of ours"
        limit_s = self._config.server.start_timeout_s
        started_s = told_s = time.monotonic()
        while not await _answers(client):
            waited_s = time.monotonic() - started_s
            if not server.is_running:
                raise ServerLost(f"{replica.name} ended while it started: {server.how_it_ended}")
            if waited_s > limit_s:
                raise ServerLost(
                    f"{replica.name} did not answer within sampler.server.start_timeout_s={limit_s:g}; the end of "
                    f"{server.log}:\n{server.tail()}"
                )
            if time.monotonic() - told_s > TELL_S:
                told_s = time.monotonic()
                self._say(f"{replica.name} is starting: {waited_s:.0f} s")
            await asyncio.sleep(READY_POLL_S)

    # ---- weights

    async def publish(self, weights: object, version: int) -> StagedUpdate:
        """Bring every replica that is not lost to `version`; return when one at least samples from it.

        Raises:
            OSError, ValueError: the weights could not be laid down; every replica is as it was.
            SamplerLost: no replica took them.
        """
        async with self._laying_down:
            update = await asyncio.to_thread(self._source.write, weights, version)
            self._version = version
        limit = asyncio.Semaphore(self._config.max_updating or len(self.members))
        taking = [r for r in self.members.values() if r.state in (State.STARTING, State.LIVE)]
        await asyncio.gather(*(self._take(replica, limit) for replica in taking))
        await self.loads()
        return update

    async def _take(self, replica: Replica, limit: asyncio.Semaphore) -> None:
        """Bring one replica to the current version, or evict it."""
        async with limit, replica.lock:
            if replica.state not in (State.STARTING, State.LIVE):
                return
            try:
                await self._bring_up(replica)
                replica.state = State.LIVE
            except FAILURES as error:
                self.evict(replica, str(error))
            except asyncio.CancelledError:
                if replica.is_doubtful:
                    self.evict(replica, "its update was cancelled")
                raise
            self.notify()

    async def _bring_up(self, replica: Replica) -> None:
        """Give it updates until it holds the current version."""
        while replica.version != self._version:
            update = await self._update_for(replica.version)
            try:
                await self._update(replica, update)
            except Refused as refusal:
                if update.base_version is None:
                    raise
                logger.warning("%s refused the difference, and gets everything: %s", replica.name, refusal)
                await self._update(replica, await self._update_for(None))

    async def _update_for(self, held_version: int | None) -> StagedUpdate:
        async with self._laying_down:
            return await asyncio.to_thread(self._source.update_for, held_version if self._config.delta else None)

    async def _update(self, replica: Replica, update: StagedUpdate) -> None:
        timeout_s = self._config.update_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await replica.update(update, keep_kv=self._config.kv_on_update == "keep", timeout_s=timeout_s)
        except TimeoutError as error:
            raise ServerSilent(
                f"{replica.name} did not take version {update.version} within sampler.update_timeout_s={timeout_s:g}"
            ) from error
        finally:
            self.notify()

    # ---- losing and finding

    def evict(self, replica: Replica, reason: str) -> None:
        """Take a replica out; its requests go elsewhere."""
        if replica.state in (State.LOST, State.GONE):
            return
        logger.warning("%s is evicted: %s", replica.name, reason)
        self._say(f"{replica.name} is evicted: {reason.splitlines()[0]}")
        self.num_evictions += 1
        replica.evict(reason)
        self.notify()

    async def suspect(self, replica: Replica, error: ServerLost) -> None:
        """Evict a replica that lost a request, unless it is well after all: a connection may break."""
        if replica.state is not State.LIVE or replica.client is None:
            return
        is_running = not replica.server or replica.server.is_running
        if isinstance(error, ServerSilent) or not is_running or not await _answers(replica.client):
            self.evict(replica, str(error))

    async def _keep(self, replica: Replica) -> None:
        """Look after one replica, again and again."""
        while replica.state is not State.GONE:
            await asyncio.sleep(self._config.poll_s)
            if replica.state is State.LOST:
                async with replica.lock:
                    await self._bring_back(replica)
            else:
                await self._look_at(replica)

    async def _look_at(self, replica: Replica) -> None:
        server, client = replica.server, replica.client
        assert client is not None, "it was started"
        if server and not server.is_running:
            self.evict(replica, f"its process ended: {server.how_it_ended}")
        elif not await _answers(client):
            self.evict(replica, f"{client.url}/health did not answer well")

    async def _bring_back(self, replica: Replica) -> None:
        """Start a lost server again, or ask one that is attached, and bring it to the current version."""
        if not await (self._is_to_start_again(replica) if replica.server else self._is_fit(replica)):
            return
        try:
            await self._reach(replica)
            await self._bring_up(replica)
        except FAILURES as error:
            logger.warning("%s did not come back: %s", replica.name, error)
            replica.evict(str(error))
            return
        replica.state = State.STARTING if self._version is None else State.LIVE
        self._say(f"{replica.name} is back, at version {replica.version}")
        self.notify()

    async def _is_to_start_again(self, replica: Replica) -> bool:
        assert replica.server is not None, "one of ours"
        await asyncio.to_thread(replica.server.end)
        if replica.num_restarts >= self._config.server.max_restarts:
            replica.state = State.GONE
            logger.error("%s is lost for good after %d restarts", replica.name, replica.num_restarts)
            self.notify()
            return False
        replica.num_restarts += 1
        return True

    async def _is_fit(self, replica: Replica) -> bool:
        """Whether an attached server answers, and with weights that are not in doubt."""
        client = replica.client
        if client is None or not await _answers(client):
            return False
        with contextlib.suppress(*FAILURES):
            return not replica.is_doubtful or await client.weight_version() == FRESH
        return False


async def _answers(client: ServerClient) -> bool:
    try:
        await client.check_health()
    except (ServerLost, ServerFailed):
        return False
    return True
