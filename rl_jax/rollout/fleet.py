"""A fleet of vLLM servers behind the Sampler protocol (steps 5 and 14 of docs/walk.md).

    event loops of the run                the fleet's own loop (one thread)                       servers
      | generate_many(requests) ---------> each: choose a replica, ask it, ---------------------> /inference/v1/generate
      |                                    lost, or not to be believed? choose again
      | publish(weights, v) -------------> write what changed, each replica: stage, commit -----> /update_weights ...
      | score_each(sequences) -----------> every live replica ----------------------------------> prompt_logprobs

Every token carries the version that its server says; replicas may differ while an update goes through the fleet, and
serving never stops. Which replica: routing.py. Who lives: replicas.py. What is believed: generate_api.py.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from rl_jax.loop_thread import LoopThread
from rl_jax.rollout.client import Gauges, ServerClient, ServerFailed, ServerLost
from rl_jax.rollout.fleet_config import FleetConfig
from rl_jax.rollout.fleet_tally import FleetTally
from rl_jax.rollout.generate_api import BadReply
from rl_jax.rollout.replica import Replica, StagedUpdate, WeightSource
from rl_jax.rollout.replicas import Replicas
from rl_jax.rollout.routing import Router
from rl_jax.rollout.server import Launch, ServerProcess
from rl_jax.sampler import Completion, Request, SamplerHealth, SamplerLost
from rl_jax.types import FinishReason

logger = logging.getLogger(__name__)

T = TypeVar("T")


class VllmFleet:
    """See the module and the protocol in rl_jax/sampler.py.

    Args:
        source: lays weights down for the servers.
        launch: what servers of our own serve; None where `config.urls` names running ones.
        logs: directory of the logs of servers of our own.
        say: where progress goes, for people.
    """

    def __init__(
        self,
        config: FleetConfig,
        source: WeightSource,
        *,
        launch: Launch | None,
        logs: Path,
        say: Callable[[str], None],
    ):
        self._config = config
        self._thread = LoopThread("vllm-fleet")
        self._is_closed = False
        self._replicas = self._thread.call(lambda: Replicas(config, _members(config, launch, logs), source, say))
        self._router = Router()
        self._serial = itertools.count()
        self._tally = FleetTally()
        self._last_update: StagedUpdate | None = None

    @property
    def num_compilations(self) -> int:
        """Always 0: the servers compile out of sight."""
        return 0

    def start(self) -> None:
        """Start or reach every server and check it; blocks.

        Raises:
            ConfigError: one that cannot sample for this run. ServerLost: one that does not answer.
        """
        self._thread.run(self._replicas.start)

    # ---- the protocol

    async def generate(self, request: Request) -> Completion:
        """Write one completion. Cancelling the call aborts the request."""
        return (await self.generate_many([request]))[0]

    async def generate_many(self, requests: Sequence[Request]) -> list[Completion]:
        """Write the completions of requests that are sent at once; cancelling aborts all of them.

        What a server computes together depends on when requests arrive, so results repeat to rounding only.

        Raises:
            ValueError: some request can never be served.
        """
        return await self._there(lambda: self._write_all(requests))

    async def publish(self, weights: object, version: int) -> None:
        """Bring every live replica to policy `version`; return when those that are left sample from it."""
        self._last_update = await self._there(lambda: self._replicas.publish(weights, version))

    async def score(self, tokens_T: np.ndarray) -> np.ndarray:
        """Return float32 [T]: log-probability of each token given those before it (temperature 1); 0 at index 0."""
        return await self._there(lambda: self._on_some("", lambda c, i, v: c.score(tokens_T, i, v.version or 0)))

    async def score_each(self, sequences: Sequence[np.ndarray]) -> dict[str, list[np.ndarray]]:
        """Return the scores of every live replica by its name: a canary must hear each of them."""
        return await self._there(lambda: self._score_each(sequences))

    async def pause(self) -> None:
        """Stop decoding; running requests keep their KV."""
        await self._there(lambda: self._on_all(lambda client: client.pause(keep_kv=True)))

    async def resume(self) -> None:
        """Go on decoding."""
        await self._there(lambda: self._on_all(lambda client: client.resume()))

    async def health(self) -> SamplerHealth:
        """Return the state now, of all live replicas together."""
        return await self._there(self._health)

    async def close(self) -> None:
        """Abort everything, end the servers that the run started."""
        if not self._is_closed:
            self._is_closed = True
            await self._thread.wait(self._replicas.close)
            await asyncio.to_thread(self._thread.close)

    def sync_metrics(self) -> dict[str, float]:
        """Return what the last update cost, in all and for each replica, and how the fleet is."""
        return self._thread.call(self._sync_metrics)

    # ---- on the fleet's loop

    async def _there(self, make: Callable[[], Coroutine[object, object, T]]) -> T:
        if self._is_closed:
            raise SamplerLost("the fleet is lost: it was closed")
        return await self._thread.wait(make)

    async def _write_all(self, requests: Sequence[Request]) -> list[Completion]:
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._write(request)) for request in requests]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _write(self, request: Request) -> Completion:
        def ask(client: ServerClient, request_id: str, replica: Replica) -> Coroutine[object, object, Completion]:
            assert replica.version is not None, "it is routable"
            return client.generate(
                request, f"{request.request_id}.{request_id}", replica.version, replica.known_versions
            )

        completion = await self._on_some(request.prefix_key, ask)
        self._tally.count(request, completion)
        return completion

    async def _on_some(self, key: str, ask: Callable[[ServerClient, str, Replica], Coroutine[object, object, T]]) -> T:
        """Ask the replica of `key`; where it is lost or lies, ask the next one.

        Raises:
            SamplerLost: no replica was live for too long, or max_dispatches of them failed.
        """
        reasons: list[str] = []
        while len(reasons) < self._config.max_dispatches:
            replica = self._replicas.members[self._router.choose(key, await self._replicas.loads())]
            try:
                with self._tally.busy():
                    result = await replica.call(lambda client, r=replica: ask(client, str(next(self._serial)), r))
                if not (isinstance(result, Completion) and result.finish is FinishReason.ABORT):
                    return result
                reasons.append(f"{replica.name} aborted it, which nobody here had asked for")
            except ServerLost as error:
                reasons.append(str(error))
                await self._replicas.suspect(replica, error)
            except BadReply as error:
                reasons.append(str(error))
                self._replicas.evict(replica, str(error))
            self._tally.num_redispatched += 1
            logger.warning("dispatched again (%d): %s", len(reasons), reasons[-1])
        raise SamplerLost(f"failed {len(reasons)} times; the last: {reasons[-1]}")

    async def _score_each(self, sequences: Sequence[np.ndarray]) -> dict[str, list[np.ndarray]]:
        await self._replicas.loads()
        live = self._replicas.live
        found = await asyncio.gather(*(self._scores_of(replica, sequences) for replica in live))
        scores = {replica.name: theirs for replica, theirs in zip(live, found, strict=True) if theirs is not None}
        if not scores:
            raise SamplerLost("no vLLM server was left to be scored")
        return scores

    async def _scores_of(self, replica: Replica, sequences: Sequence[np.ndarray]) -> list[np.ndarray] | None:
        """Return the scores of one replica; None if it was lost over them."""
        version = replica.version or 0
        try:
            calls = (
                replica.call(lambda client, t=tokens_T: client.score(t, f"score.{next(self._serial)}", version))
                for tokens_T in sequences
            )
            return list(await asyncio.gather(*calls))
        except (ServerLost, BadReply) as error:
            self._replicas.evict(replica, str(error))
            return None

    async def _on_all(self, do: Callable[[ServerClient], Coroutine[object, object, None]]) -> None:
        await asyncio.gather(*(do(replica.client) for replica in self._replicas.live if replica.client))

    async def _health(self) -> SamplerHealth:
        await self._replicas.loads()
        live = self._replicas.live
        gauges = [g for g in await asyncio.gather(*map(self._gauges, live)) if g is not None]
        return SamplerHealth(
            version=min((replica.version for replica in live if replica.version is not None), default=0),
            num_running=sum(g.num_running for g in gauges),
            num_waiting=sum(g.num_waiting for g in gauges),
            max_running=len(live) * self._config.max_running,
            kv_used_frac=max((g.kv_used_frac for g in gauges), default=0.0),
            num_sampled_tokens=self._tally.num_sampled_tokens,
            num_prompt_tokens=self._tally.num_prompt_tokens,
            num_cached_tokens=self._tally.num_cached_tokens,
            busy_s=self._tally.busy_s,
            num_preemptions=self._tally.num_preemptions,
        )

    async def _gauges(self, replica: Replica) -> Gauges | None:
        assert replica.client is not None, "it is live"
        try:
            gauges = await replica.client.gauges()
        except (ServerLost, ServerFailed, BadReply) as error:
            logger.info("%s: no metrics: %s", replica.name, error)  # whether it is lost, its keeper finds out
            return None
        self._tally.see_preemptions(replica.name, replica.num_syncs, gauges.num_preemptions)
        return gauges

    def _sync_metrics(self) -> dict[str, float]:
        members, live = self._replicas.members, self._replicas.live
        metrics = {
            "fleet/num_live": float(len(live)),
            "fleet/num_evictions": float(self._replicas.num_evictions),
            "fleet/num_restarts": float(sum(replica.num_restarts for replica in members.values())),
            "fleet/num_redispatched": float(self._tally.num_redispatched),
        }
        if self._last_update:
            update = self._last_update
            metrics |= {"sync/write_s": update.seconds, "sync/changed_frac": update.changed_frac}
        syncs = {replica.name: replica.last_sync for replica in live if replica.last_sync}
        for name, sync in syncs.items():
            metrics |= {
                f"sync/{name}/num_bytes": float(sync.num_bytes),
                f"sync/{name}/stage_s": sync.stage_s,
                f"sync/{name}/pause_s": sync.pause_s,
                f"sync/{name}/is_full": float(sync.kind == "full"),
                f"sync/{name}/version": float(sync.version),
            }
        if syncs:
            metrics["sync/stage_s/max"] = max(sync.stage_s for sync in syncs.values())
            metrics["sync/pause_s/max"] = max(sync.pause_s for sync in syncs.values())
            metrics["sync/num_bytes"] = float(sum(sync.num_bytes for sync in syncs.values()))
        return metrics


def _members(config: FleetConfig, launch: Launch | None, logs: Path) -> list[Replica]:
    if config.urls:
        return [Replica(f"replica{i}", url=url) for i, url in enumerate(config.urls)]
    assert launch is not None, "servers of our own need something to serve"
    names = [f"replica{i}" for i in range(config.server.count)]
    return [Replica(name, server=ServerProcess(config.server, launch, logs / f"{name}.log")) for name in names]
