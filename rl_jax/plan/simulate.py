"""The asynchronous loop on a length distribution, event by event: what a fleet and a trainer would do together.

    trainer: waits for a batch -> trains -> update arrives -> replicas pause, swap -> next version       (train.py)
    groups:  admitted while a batch within the bound can take them and the cap allows -> a replica each, turn by turn:
             queue -> prefill -> decode -> environment -> ... -> last member lands -> ready              (dispatch.py)
    batch:   cut by the orchestrator's own Buffer, which holds the staleness bound                       (buffer.py)

The rules are those of rl_jax/orchestrator; with max_staleness = 0 its waves. Deterministic by seed. Not modelled: failures
of replicas, the adaptive cap, preemption (a request waits until its whole length fits), memory of prefixes between turns.
"""

import heapq
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from rl_jax.orchestrator.buffer import Buffer, Group
from rl_jax.plan.lengths import Lengths, Turn
from rl_jax.plan.loop_result import Fleet, LoopResult
from rl_jax.plan.replica import Replica, Request
from rl_jax.plan.sampler_config import LoopConfig
from rl_jax.types import DropReason


@dataclass(frozen=True, kw_only=True)
class _Ready(Group):
    """A landed group without its tokens."""

    id: int
    version: int
    num_rollouts: int
    tokens: int

    @property
    def group_id(self) -> int:
        return self.id

    @property
    def oldest_version(self) -> int:
        return self.version


@dataclass(kw_only=True)
class _Flight:
    """A group in flight."""

    id: int
    version: int
    """Of the samplers when it set off."""
    replica: Replica
    num_left: int
    oldest: int | None = None
    """Version of the oldest token so far."""
    tokens: int = 0
    num_failed: int = 0


@dataclass(kw_only=True)
class _Rollout:
    flight: _Flight
    turns: Sequence[Turn]
    started_s: float
    turn: int = 0
    context: int = 0
    """Tokens so far."""
    cached_version: int | None = None
    """Of the weights that made its cache."""


@dataclass(kw_only=True)
class _Meters:
    """Sums since the end of the warm-up; those of the replicas begin at minus what they had by then."""

    since_s: float = 0.0
    idle_s: float = 0.0
    paused_s: float = 0.0
    inflight_s: float = 0.0
    flight_s: float = 0.0
    num_landed: int = 0
    trained_tokens: int = 0
    num_batches: int = 0
    busy_s: float = 0.0
    running_s: float = 0.0
    num_tokens: int = 0
    staleness: Counter[int] = field(default_factory=Counter)


def simulate(fleet: Fleet, loop: LoopConfig, lengths: Lengths, *, warmup: int, steps: int, seed: int = 0) -> LoopResult:
    """Run the loop over `warmup + steps` batches and return what the last `steps` were like."""
    return _Simulation(fleet, loop, lengths, seed).run(warmup, steps)


class _Simulation:
    def __init__(self, fleet: Fleet, loop: LoopConfig, lengths: Lengths, seed: int):
        self._fleet, self._loop, self._lengths = fleet, loop, lengths
        self._rng = np.random.default_rng([seed, 1])
        self._replicas = [
            Replica(fleet.speed, slots=fleet.slots, kv_tokens=fleet.kv_tokens, prefills=not fleet.num_prefill_servers)
            for _ in range(fleet.num_replicas)
        ]
        self._servers_free_s = [0.0] * fleet.num_prefill_servers
        self._buffer = Buffer(groups_per_batch=loop.groups_per_batch, max_staleness=loop.max_staleness)
        self._max_inflight = loop.max_inflight or math.ceil(1.5 * fleet.slots * fleet.num_replicas)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_events = 0
        self._now_s = 0.0
        self._version = 0
        self._next_version = 0
        self._waits_since_s: float | None = 0.0
        self._flights: dict[int, _Flight] = {}
        self._rollouts: dict[int, _Rollout] = {}
        self._wave: list[_Ready] = []
        self._num_groups = 0
        self._num_rollouts = 0
        self._num_trained = 0
        self._num_cut = 0
        self._drops: Counter[str] = Counter()
        self._meters = _Meters()

    def run(self, warmup: int, steps: int) -> LoopResult:
        self._turn_over()
        while self._num_cut < warmup + 1:
            self._next_event()
        self._begin_measuring()
        while self._num_cut < warmup + 1 + steps:
            self._next_event()
        return self._result()

    # Events

    def _at(self, time_s: float, action: Callable[[], None]) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (time_s, self._num_events, action))

    def _next_event(self) -> None:
        assert self._events, f"nothing will ever happen after {self._now_s:.1f} s; {self._num_cut} batches were cut"
        time_s, _, action = heapq.heappop(self._events)
        self._meters.inflight_s += (time_s - self._now_s) * len(self._rollouts)
        self._now_s = time_s
        action()

    def _changed(self, replica: Replica) -> None:
        """Start what waits, and plan the replica's next end anew."""
        for request in replica.admit():
            rollout = self._rollouts[request.rollout]
            flight = rollout.flight
            rollout.cached_version = self._version
            flight.oldest = self._version if flight.oldest is None else min(flight.oldest, self._version)
        replica.stamp += 1
        stamp, end_s = replica.stamp, replica.next_end_s()
        if end_s < math.inf:
            self._at(end_s, lambda: self._on_end(replica, stamp))

    # The way of a rollout

    def _on_end(self, replica: Replica, stamp: int) -> None:
        if stamp != replica.stamp:
            return
        replica.advance(self._now_s)
        for request in replica.finish():
            rollout = self._rollouts[request.rollout]
            rollout.context = request.reserved
            turn = rollout.turns[rollout.turn]
            rollout.turn += 1
            index = request.rollout
            self._at(self._now_s + turn.env_s, lambda index=index: self._after_turn(index))
        self._changed(replica)

    def _after_turn(self, index: int) -> None:
        rollout = self._rollouts[index]
        if rollout.turn < len(rollout.turns):
            self._ask(index)
        else:
            self._land(index)

    def _ask(self, index: int, is_prompt_shared: bool = False) -> None:
        """Send the next turn to prefill, or straight to the replica."""
        rollout = self._rollouts[index]
        turn = rollout.turns[rollout.turn]
        is_kept = self._loop.keep_prefixes or rollout.cached_version in (None, self._version)
        cached = rollout.context if is_kept else 0
        new = turn.new_tokens + rollout.context - cached
        if is_prompt_shared:
            cached, new = turn.new_tokens - 1, 1  # the last token is computed in any case: its logits are wanted
        request = Request(rollout=index, new_tokens=new, context=cached, sampled_tokens=turn.sampled_tokens)
        if not self._servers_free_s:
            self._submit(request)
            return
        # First come first served over the prefill servers.
        start_s = max(heapq.heappop(self._servers_free_s), self._now_s)
        end_s = start_s + self._fleet.speed.prefill_s(new, cached)
        heapq.heappush(self._servers_free_s, end_s)
        self._at(end_s, lambda: self._submit(request))

    def _submit(self, request: Request) -> None:
        replica = self._rollouts[request.rollout].flight.replica
        replica.advance(self._now_s)
        replica.submit(request)
        self._changed(replica)

    def _land(self, index: int) -> None:
        rollout = self._rollouts.pop(index)
        flight = rollout.flight
        flight.num_left -= 1
        flight.replica.load -= 1
        self._meters.flight_s += self._now_s - rollout.started_s
        self._meters.num_landed += 1
        if self._loop.failed_frac and self._rng.random() < self._loop.failed_frac:
            flight.num_failed += 1
        else:
            flight.tokens += rollout.context
        if not flight.num_left:
            self._land_group(flight)

    def _land_group(self, flight: _Flight) -> None:
        del self._flights[flight.id]
        self._drop(DropReason.REWARD_ERROR, flight.num_failed)
        num_left = self._loop.group_size - flight.num_failed
        if num_left < min(2, self._loop.group_size):
            self._drop(DropReason.GROUP_INCOMPLETE, num_left)
        elif self._loop.filtered_frac and self._rng.random() < self._loop.filtered_frac:
            self._drop(DropReason.ZERO_VARIANCE, num_left)
        else:
            assert flight.oldest is not None, "a group landed without a token"
            self._wave.append(
                _Ready(
                    rollouts=(),
                    landed_version=self._version,
                    id=flight.id,
                    version=flight.oldest,
                    num_rollouts=num_left,
                    tokens=flight.tokens,
                )
            )
        if self._loop.max_staleness or not self._flights:  # a wave is handed over as a whole
            for ready in self._wave:
                self._buffer.add(ready)
            self._wave = []
        self._turn_over()

    def _drop(self, reason: DropReason, num_rollouts: int) -> None:
        if num_rollouts:
            self._drops[reason.value] += num_rollouts

    # The rules of the orchestrator

    def _turn_over(self) -> None:
        """Cut a batch if the trainer waits and one is ready; admit what may set off."""
        if self._waits_since_s is not None:
            for group in self._buffer.drop_stale(self._next_version):
                assert isinstance(group, _Ready)
                self._drop(DropReason.STALE, group.num_rollouts)
            versions = [flight.version for flight in self._flights.values()]
            groups = self._buffer.cut(self._next_version, versions)
            if groups is not None:
                self._train(groups)
        self._admit()

    def _admit(self) -> None:
        loop = self._loop
        if loop.max_staleness == 0 and self._waits_since_s is None:
            return
        num_batches = self._version + loop.max_staleness - self._next_version + 1
        num_fresh = num_batches * loop.groups_per_batch - len(self._flights) - len(self._buffer) - len(self._wave)
        if loop.max_staleness:
            num_free = (self._max_inflight - len(self._flights) * loop.group_size) // loop.group_size
            num_fresh = min(num_fresh, max(num_free, 0 if self._flights else 1))
        elif self._flights:
            return  # a wave sets off as a whole, when the one before has landed
        for _ in range(num_fresh):
            self._take_off()

    def _take_off(self) -> None:
        replica = min(self._replicas, key=lambda replica: replica.load)
        size = self._loop.group_size
        flight = _Flight(id=self._num_groups, version=self._version, replica=replica, num_left=size)
        self._num_groups += 1
        self._flights[flight.id] = flight
        replica.load += size
        for member, turns in enumerate(self._lengths.group(size)):
            index = self._num_rollouts
            self._num_rollouts += 1
            self._rollouts[index] = _Rollout(flight=flight, turns=turns, started_s=self._now_s)
            self._ask(index, is_prompt_shared=member > 0)

    # The trainer

    def _train(self, groups: Sequence[Group]) -> None:
        assert self._waits_since_s is not None
        meters = self._meters
        meters.idle_s += self._now_s - max(self._waits_since_s, meters.since_s)
        self._waits_since_s = None
        for group in groups:
            assert isinstance(group, _Ready)
            meters.staleness[self._next_version - group.version] += group.num_rollouts
            meters.trained_tokens += group.tokens
            self._num_trained += group.num_rollouts
        meters.num_batches += 1
        self._num_cut += 1
        self._next_version += 1
        self._at(self._now_s + self._fleet.train_s + self._fleet.transfer_s, self._pause)

    def _pause(self) -> None:
        for replica in self._replicas:
            replica.advance(self._now_s)
            replica.is_paused = True
            replica.stamp += 1
        self._servers_free_s = [max(free_s, self._now_s) + self._fleet.pause_s for free_s in self._servers_free_s]
        self._at(self._now_s + self._fleet.pause_s, self._resume)

    def _resume(self) -> None:
        self._meters.paused_s += min(self._fleet.pause_s, self._now_s - self._meters.since_s)
        self._version += 1
        self._waits_since_s = self._now_s
        for replica in self._replicas:
            replica.advance(self._now_s)
            replica.is_paused = False
            self._changed(replica)
        self._turn_over()

    # Measuring

    def _begin_measuring(self) -> None:
        for replica in self._replicas:
            replica.advance(self._now_s)
        self._meters = _Meters(
            since_s=self._now_s,
            busy_s=-sum(replica.busy_s for replica in self._replicas),
            running_s=-sum(replica.running_s for replica in self._replicas),
            num_tokens=-sum(replica.num_tokens for replica in self._replicas),
        )

    def _result(self) -> LoopResult:
        for replica in self._replicas:
            replica.advance(self._now_s)
        meters, num = self._meters, len(self._replicas)
        seconds = self._now_s - meters.since_s
        running_s = meters.running_s + sum(replica.running_s for replica in self._replicas)
        ready = [group for group in (*self._buffer.groups, *self._wave) if isinstance(group, _Ready)]
        landed = sum(self._loop.group_size - flight.num_left for flight in self._flights.values())
        return LoopResult(
            step_s=seconds / meters.num_batches,
            trainer_idle_frac=meters.idle_s / seconds,
            sampler_idle_frac=1 - (meters.busy_s + sum(r.busy_s for r in self._replicas)) / (seconds * num),
            paused_frac=meters.paused_s / seconds,
            occupancy=running_s / (seconds * num * self._fleet.slots),
            running=running_s / seconds,
            inflight=meters.inflight_s / seconds,
            flight_s=meters.flight_s / max(meters.num_landed, 1),
            landed_per_s=meters.num_landed / seconds,
            sampled_tokens_per_s=(meters.num_tokens + sum(r.num_tokens for r in self._replicas)) / seconds,
            trained_tokens=meters.trained_tokens / meters.num_batches,
            staleness=dict(sorted(meters.staleness.items())),
            drops=dict(sorted(self._drops.items())),
            totals={
                "dispatched": self._num_rollouts,
                "trained": self._num_trained,
                "dropped": sum(self._drops.values()),
                "ready": sum(group.num_rollouts for group in ready),
                "in_flight": len(self._rollouts) + landed,
            },
        )
