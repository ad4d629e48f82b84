"""What is admitted and played, and when (step 2 of docs/walk.md): with ship.py all concurrency policy of a run.

    feed:   room for a group? -> ticket -> flight (one task)            waits: for room (trainer slow) or the cap
    flight: prompt -> sampler -> reward -> landing: buffer, or dropped   waits: for the sampler

Admission: with samplers at version u and the trainer's next batch at v, only the batches v .. u + max_staleness can
still take a group that starts now, so no more groups may be alive than those batches hold. max_staleness = 0 is the
synchronous mode: the same rule lets through exactly one batch after each publish, played in lockstep as a wave once the
trainer waits for it, so that it shares the sampler with nothing else; what was filtered out of it is replaced by the
next wave. Nothing there depends on time, so it is bitwise repeatable.

No locks: all runs on one event loop. Knows no threads, no tokens, no trainer.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rl_jax.orchestrator.background import Background
from rl_jax.orchestrator.buffer import Buffer
from rl_jax.orchestrator.concurrency import Concurrency
from rl_jax.orchestrator.config import OrchestratorConfig
from rl_jax.orchestrator.curriculum import Curriculum
from rl_jax.orchestrator.landing import Landing
from rl_jax.orchestrator.ledger import Dispatch, Ledger
from rl_jax.orchestrator.snapshot import Ticket
from rl_jax.rollout.episode import Draw, Player
from rl_jax.sampler import SamplerGone, SamplerHealth, SamplerLost
from rl_jax.types import DropReason

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Flight:
    """A group that is being played."""

    ticket: Ticket
    rollout_ids: tuple[int, ...]
    version: int
    """Of the samplers when it set off: no token of it is older."""
    started_s: float

    @property
    def draw(self) -> Draw:
        """What the player plays."""
        ticket = self.ticket
        return Draw(group_id=ticket.group_id, env=ticket.env, task_id=ticket.task_id, rollout_ids=self.rollout_ids)


class Dispatcher:
    """See the module."""

    def __init__(
        self,
        config: OrchestratorConfig,
        *,
        player: Player,
        curriculum: Curriculum,
        ledger: Ledger,
        landing: Landing,
        buffer: Buffer,
        last_step: int | None,
    ):
        """`last_step`: no group is admitted that only a later step could train; None = endless."""
        self._config = config
        self._player = player
        self._curriculum = curriculum
        self._ledger = ledger
        self._landing = landing
        self._buffer = buffer
        self._last_step = last_step
        self.background = Background()
        self.version: int | None = None
        """What every sampler acknowledged; None = nothing published yet, nothing is dispatched."""
        self.next_version = 0
        """Policy version that trains on the batch that is cut next."""
        self.next_group_id = 0
        self.flights: dict[int, Flight] = {}
        """By group id."""
        self.requeued: list[Ticket] = []
        """Admitted, and to be played again."""
        self.is_awaited = False
        """The trainer waits for a batch."""
        self.health: SamplerHealth | None = None
        self._concurrency: Concurrency | None = None
        self._is_cap_limiting = False
        self._backoff: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin to feed; nothing is dispatched before the first `open`."""
        self.background.spawn(self._feed())
        self.background.spawn(self._tend())

    async def open(self, version: int) -> None:
        """Route to the samplers as `version`, which all of them acknowledged."""
        if self._concurrency is None:
            self.health = await self._player.sampler.health()
            self._concurrency = Concurrency(self._config.concurrency, self.health)
        self.version = version
        self.background.notify()

    @property
    def num_inflight(self) -> int:
        """Rollouts in flight."""
        return len(self.flights) * self._config.group_size

    @property
    def cap(self) -> int:
        """Rollouts that may be in flight."""
        assert self._concurrency is not None, "no version was published yet"
        return self._concurrency.cap

    @property
    def num_batches_in_reach(self) -> int:
        """Batches, from the next on, that may take a group that sets off now."""
        assert self.version is not None, "no version was published yet"
        last = self.version + self._config.max_staleness
        if self._last_step is not None:
            last = min(last, self._last_step - 1)  # step s trains on the batch of version s - 1
        return last - self.next_version + 1

    @property
    def versions_in_flight(self) -> list[int]:
        """For each group that is or will be played: the version below which it has no token."""
        version = self.next_version if self.version is None else self.version
        return [flight.version for flight in self.flights.values()] + [version] * len(self.requeued)

    async def _feed(self) -> None:
        while True:
            changed = self.background.changed
            flights = [self._take_off(ticket) for ticket in self._admit()]
            if not flights:
                await changed.wait()
            elif self._config.max_staleness == 0:
                await self._fly(flights)
            else:
                for flight in flights:
                    self.background.spawn(self._fly([flight]))

    def _admit(self) -> list[Ticket]:
        """Take the tickets that may set off now: those to be played again first, by age, then fresh ones."""
        is_early = self._config.max_staleness == 0 and not self.is_awaited
        if self.version is None or is_early or self._backoff or self.background.failure:
            return []
        num_alive = len(self.requeued) + len(self.flights) + len(self._buffer)
        num_fresh = max(self.num_batches_in_reach * self._config.groups_per_batch - num_alive, 0)
        num_wanted = len(self.requeued) + num_fresh
        num_free = self._num_free() if self._config.max_staleness else num_wanted
        self._is_cap_limiting |= num_free < num_wanted
        self.requeued.sort(key=lambda ticket: ticket.group_id)
        tickets, self.requeued = self.requeued[:num_free], self.requeued[num_free:]
        num_fresh = min(num_fresh, num_free - len(tickets))
        return tickets + [self._draw_ticket() for _ in range(num_fresh)]

    def _num_free(self) -> int:
        """Groups that the cap lets through; one always."""
        num_free = (self.cap - self.num_inflight) // self._config.group_size
        return max(num_free, 0 if self.flights else 1)

    def _draw_ticket(self) -> Ticket:
        env, task_id = self._curriculum.next()
        self.next_group_id += 1
        return Ticket(group_id=self.next_group_id - 1, env=env, task_id=task_id)

    def _take_off(self, ticket: Ticket) -> Flight:
        assert self.version is not None, "no version was published yet"
        first = self._ledger.next_rollout_id
        flight = Flight(
            ticket=ticket,
            rollout_ids=tuple(range(first, first + self._config.group_size)),
            version=self.version,
            started_s=asyncio.get_running_loop().time(),
        )
        self.flights[ticket.group_id] = flight
        self._ledger.dispatch(
            Dispatch(
                rollout_id=rollout_id,
                group_id=ticket.group_id,
                member=member,
                attempt=ticket.attempt,
                env=ticket.env,
                task_id=ticket.task_id,
            )
            for member, rollout_id in enumerate(flight.rollout_ids)
        )
        return flight

    async def _fly(self, flights: Sequence[Flight]) -> None:
        """Play groups, together or one, and hand over what comes of them."""
        try:
            if self._config.max_staleness == 0:
                results = await self._player.run_wave([flight.draw for flight in flights])
            else:
                results = [await self._player.run_group(flight.draw) for flight in flights]
        except SamplerGone:
            raise
        except SamplerLost as lost:
            self._requeue(flights, lost)
        else:
            assert self.version is not None and self._concurrency is not None, "in flight before a version"
            for flight, outcomes in zip(flights, results, strict=True):
                del self.flights[flight.ticket.group_id]
                self._concurrency.count_landed(len(outcomes))
                self._landing.land(flight.ticket.env, outcomes, self.version)
        self.background.notify()

    def _requeue(self, flights: Sequence[Flight], lost: SamplerLost) -> None:
        """Drop an attempt, and let the groups be played again, whole, after a pause."""
        for flight in flights:
            ticket = self.flights.pop(flight.ticket.group_id).ticket
            self.requeued.append(replace(ticket, attempt=ticket.attempt + 1))
            for rollout_id in flight.rollout_ids:
                self._landing.drop(rollout_id, DropReason.SAMPLER_LOST, str(lost))
        groups = [flight.ticket.group_id for flight in flights]
        attempt = max(flight.ticket.attempt for flight in flights)
        if attempt >= self._config.max_retries:
            raise SamplerLost(
                f"groups {groups}: the sampler was lost {attempt + 1} times while it wrote them; the last time: {lost}"
            ) from lost
        delay_s = self._config.retry_delay_s * 2**attempt
        logger.warning("sampler lost (%s): groups %s are dispatched again in %.1f s", lost, groups, delay_s)
        if self._backoff:
            self._backoff.cancel()
        self._backoff = asyncio.get_running_loop().call_later(delay_s, self._end_backoff)

    def _end_backoff(self) -> None:
        self._backoff = None
        self.background.notify()

    async def _tend(self) -> None:
        """Look after the ledger and the cap, again and again."""
        while True:
            await asyncio.sleep(self._config.concurrency.poll_s)
            self._ledger.flush()
            if self._concurrency is None:
                continue
            try:
                self.health = await self._player.sampler.health()
            except SamplerGone:
                raise
            except SamplerLost as lost:
                logger.warning("sampler health: %s; the cap of rollouts in flight stays as it is", lost)
                continue
            self._concurrency.update(self.health, self.num_inflight, self._is_cap_limiting)
            self._is_cap_limiting = False
            self.background.notify()
