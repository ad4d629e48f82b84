"""Batches to the trainer, weights to the samplers, and the state of both for a checkpoint (step 9 of docs/walk.md).

    cut:  next_batch(v) <- buffer                                    waits: for groups (sampler slow)
    ship: publish(v+1) -> all samplers acknowledge -> v+1 routable    then dispatch.py has room again

Every method runs on the event loop that dispatch.py runs on. Knows no threads (loop.py has them), no tokens.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rl_jax.advantages import Advantages
from rl_jax.orchestrator.buffer import Buffer, Group
from rl_jax.orchestrator.config import OrchestratorConfig
from rl_jax.orchestrator.curriculum import Curriculum
from rl_jax.orchestrator.dispatch import Dispatcher
from rl_jax.orchestrator.landing import Landing
from rl_jax.orchestrator.ledger import Ledger
from rl_jax.orchestrator.snapshot import Snapshot
from rl_jax.orchestrator.tally import Tally
from rl_jax.rollout.episode import Player
from rl_jax.types import DropReason, Rollout

logger = logging.getLogger(__name__)
SLOW_S = 60.0
"""A longer wait for a batch is logged, with what it waits for."""


@dataclass(frozen=True, kw_only=True)
class StepBatch:
    """What one training step is made of: rollouts by group and member, one advantage for each."""

    rollouts: list[Rollout]
    advantages: list[float]
    metrics: dict[str, float]


class Shipper:
    """See the module. Made inside the event loop; lives until `close`."""

    def __init__(
        self,
        config: OrchestratorConfig,
        *,
        player: Player,
        curriculum: Curriculum,
        advantages: Advantages,
        ledger_path: Path,
        last_step: int | None = None,
    ):
        """`last_step`: nothing is sampled for later steps; None = endless."""
        self._config = config
        self._player = player
        self._curriculum = curriculum
        self._advantages = advantages
        self._ledger = Ledger(ledger_path)
        self._tally = Tally(curriculum.envs)
        self._buffer = Buffer(groups_per_batch=config.groups_per_batch, max_staleness=config.max_staleness)
        self._landing = Landing(
            config,
            curriculum=curriculum,
            advantages=advantages,
            ledger=self._ledger,
            tally=self._tally,
            buffer=self._buffer,
        )
        self._dispatcher = Dispatcher(
            config,
            player=player,
            curriculum=curriculum,
            ledger=self._ledger,
            landing=self._landing,
            buffer=self._buffer,
            last_step=last_step,
        )
        self._taken: dict[int, list[Group]] = {}
        """Batches handed out and not recorded as trained, by step."""
        self._is_restored = False
        self._is_publishing = False

    def start(self) -> None:
        """Begin to sample as soon as a version is published."""
        self._dispatcher.start()

    async def publish(self, weights: object, version: int) -> None:
        """Give the samplers the weights of policy `version`; return when all of them sample from it.

        Raises:
            TimeoutError: not acknowledged within publish_timeout_s.
        """
        self._dispatcher.background.check()
        before = self._dispatcher.version
        assert not self._is_publishing and (before is None or version > before), f"publish({version}) after {before}"
        if before is None and not self._is_restored:
            self._discard_earlier_attempt()
        self._is_publishing = True
        deadline = asyncio.timeout(self._config.publish_timeout_s)
        try:
            async with deadline:
                await self._player.sampler.publish(weights, version)
            await self._dispatcher.open(version)
        except TimeoutError as error:
            if not deadline.expired():
                raise
            raise TimeoutError(
                f"publish({version}): the samplers did not acknowledge within "
                f"publish_timeout_s={self._config.publish_timeout_s}"
            ) from error
        finally:
            self._is_publishing = False

    async def next_batch(self, version: int) -> StepBatch:
        """Return the batch that policy `version` trains on, as soon as there is one that keeps the staleness bound.

        Raises:
            AssertionError: it can never come: `version` was taken, or the samplers have no weights new enough.
            Whatever ended the background work.
        """
        dispatcher, background = self._dispatcher, self._dispatcher.background
        earliest = dispatcher.next_version
        assert version >= earliest, f"next_batch({version}): expected at least {earliest}, earlier ones were handed out"
        assert dispatcher.version is not None, f"next_batch({version}): publish first"
        started_s = asyncio.get_running_loop().time()
        dispatcher.next_version, dispatcher.is_awaited = version, True
        background.notify()
        try:
            while True:
                changed = background.changed
                background.check()
                self._drop_stale(version)
                groups = self._buffer.cut(version, dispatcher.versions_in_flight)
                if groups is not None:
                    return self._hand_out(groups, version, asyncio.get_running_loop().time() - started_s)
                self._check_fillable(version)
                await self._wait(changed, started_s)
        finally:
            dispatcher.is_awaited = False

    def record_trained(self, step: int, rollouts: Sequence[Rollout]) -> None:
        """Note that `step` was trained on the batch that next_batch(step - 1) returned."""
        expected = {rollout.rollout_id for group in self._taken.get(step, ()) for rollout in group.rollouts}
        given = {rollout.rollout_id for rollout in rollouts}
        assert given and given == expected, f"step {step}: {sorted(given)} trained, {sorted(expected)} handed out"
        for rollout in rollouts:
            self._ledger.train(rollout.rollout_id, step)
        del self._taken[step]
        self._ledger.flush()

    def snapshot(self) -> Snapshot:
        """Return all that a resumed run needs, as of now; what is in flight will be played again."""
        dispatcher = self._dispatcher
        pending = [*dispatcher.requeued, *(flight.ticket for flight in dispatcher.flights.values())]
        taken = [group for step in sorted(self._taken) for group in self._taken[step]]
        return Snapshot(
            next_version=min(self._taken) - 1 if self._taken else dispatcher.next_version,
            next_group_id=dispatcher.next_group_id,
            position=self._ledger.position(),
            curriculum=self._curriculum.state(),
            baselines=self._advantages.state(),
            pending=tuple(sorted(pending, key=lambda ticket: ticket.group_id)),
            groups=(*taken, *self._buffer.groups),
        )

    def restore(self, snapshot: Snapshot) -> None:
        """Go on from a snapshot; before the first `publish`.

        Raises:
            LedgerError: the ledger is not the one that the snapshot was made with.
        """
        dispatcher = self._dispatcher
        assert dispatcher.version is None and not self._is_restored, "restore() once, before publish()"
        num_dropped = self._ledger.rewind(snapshot.position)
        ready = {rollout.rollout_id for group in snapshot.groups for rollout in group.rollouts}
        listed = self._ledger.ready_ids()
        assert ready == listed, f"rollouts {sorted(ready ^ listed)}: ready in the ledger or in the queue, not in both"
        dispatcher.next_version = snapshot.next_version
        dispatcher.next_group_id = snapshot.next_group_id
        # Attempts count the losses that this process saw: a resumed run has all its retries.
        dispatcher.requeued = [replace(ticket, attempt=0) for ticket in snapshot.pending]
        self._curriculum.restore(snapshot.curriculum)
        self._advantages.restore(snapshot.baselines)
        for group in snapshot.groups:
            self._buffer.add(group)
        self._is_restored = True
        logger.info(
            "resumed: %d groups ready, %d to be played again; %d rollouts made after the checkpoint dropped as rewound",
            len(snapshot.groups),
            len(snapshot.pending),
            num_dropped,
        )

    async def close(self) -> None:
        """Stop all work; what is in flight or ready is recorded as RUN_ENDED."""
        await self._dispatcher.background.close()
        for flight in self._dispatcher.flights.values():
            for rollout_id in flight.rollout_ids:
                self._ledger.drop(rollout_id, DropReason.RUN_ENDED)
        for group in (*self._buffer.groups, *(group for groups in self._taken.values() for group in groups)):
            for rollout in group.rollouts:
                self._ledger.drop(rollout.rollout_id, DropReason.RUN_ENDED)
        self._ledger.close()

    def _discard_earlier_attempt(self) -> None:
        """Begin at nothing: what a run that died before its first checkpoint left in the ledger was made for nothing."""
        num_dropped = self._ledger.rewind(0)
        if num_dropped:
            logger.warning("%d rollouts of an attempt without a checkpoint dropped as rewound", num_dropped)

    def _drop_stale(self, version: int) -> None:
        for group in self._buffer.drop_stale(version):
            for rollout in group.rollouts:
                detail = f"oldest token by policy {group.oldest_version}, step {version + 1} trains policy {version}"
                self._landing.drop(rollout.rollout_id, DropReason.STALE, detail)
            self._dispatcher.background.notify()  # there is room for its replacement

    def _check_fillable(self, version: int) -> None:
        dispatcher = self._dispatcher
        if self._is_publishing or dispatcher.flights or dispatcher.requeued:
            return
        # Nothing is in flight and the ready groups are too few: only fresh ones can fill the batch.
        assert dispatcher.num_batches_in_reach > 0, (
            f"next_batch({version}) can never be filled: the samplers have policy {dispatcher.version}, "
            f"max_staleness={self._config.max_staleness}; publish newer weights first, or stop: the last step is trained"
        )

    async def _wait(self, changed: asyncio.Event, started_s: float) -> None:
        try:
            async with asyncio.timeout(SLOW_S):
                await changed.wait()
        except TimeoutError:
            now_s = asyncio.get_running_loop().time()
            flights = self._dispatcher.flights.items()
            logger.warning(
                "%.0f s without a batch: %d groups ready, samplers at policy %s, seconds in flight by group: %s",
                now_s - started_s,
                len(self._buffer),
                self._dispatcher.version,
                {group_id: round(now_s - flight.started_s) for group_id, flight in flights},
            )

    def _hand_out(self, groups: Sequence[Group], version: int, waited_s: float) -> StepBatch:
        # Advantages are set already if a run resumes with the batch: a moving baseline must see a reward once.
        judged = [replace(g, advantages=g.advantages or self._landing.advantages_of(g.rollouts)) for g in groups]
        self._taken[version + 1] = judged
        self._dispatcher.next_version = version + 1
        metrics = self._tally.report(judged, version) | self._gauges()
        metrics["time/wait_for_batch"] = waited_s
        self._ledger.flush()
        self._dispatcher.background.notify()
        return StepBatch(
            rollouts=[rollout for group in judged for rollout in group.rollouts],
            advantages=[advantage for group in judged for advantage in group.advantages or ()],
            metrics=metrics,
        )

    def _gauges(self) -> dict[str, float]:
        """Return where work stands now."""
        dispatcher = self._dispatcher
        gauges: Mapping[str, float | None] = {
            "dispatcher/inflight": dispatcher.num_inflight,
            "dispatcher/queued": sum(len(group.rollouts) for group in self._buffer.groups),
            "dispatcher/requeued": len(dispatcher.requeued) * self._config.group_size,
            "dispatcher/unbridged": self._player.num_unbridged,
            "dispatcher/context_full": self._player.num_context_full,
            "concurrency/max_inflight": dispatcher.cap,
            "watcher/policy_version": dispatcher.version,
            **{f"curriculum/{env}/epoch": epoch for env, epoch in self._curriculum.progress().items()},
        }
        return {name: float(value) for name, value in gauges.items() if value is not None}
