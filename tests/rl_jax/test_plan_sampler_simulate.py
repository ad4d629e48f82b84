"""The simulated loop against closed forms, a step-by-step reference, Little's law, and its invariants."""

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_jax.plan.lengths import LengthConfig, Lengths
from rl_jax.plan.loop_result import Fleet, LoopResult
from rl_jax.plan.replica import Replica, Request
from rl_jax.plan.sampler_config import LoopConfig
from rl_jax.plan.simulate import simulate


@dataclass
class Steady:
    """A speed without a model: steps of `step_s` and more by context, prefill by `prefill_token_s`; it keeps a list."""

    step_s: float = 0.1
    per_sequence_s: float = 0.0
    token_s: float = 0.0
    prefill_token_s: float = 0.0
    prefilled: list[int] = field(default_factory=list)

    def base_s(self, num_running: int) -> float:
        return self.step_s + self.per_sequence_s * num_running

    def prefill_s(self, new_tokens: int, context_tokens: float) -> float:
        self.prefilled.append(new_tokens)
        return self.prefill_token_s * new_tokens


FIXED = LengthConfig(kind="fixed", sampled_tokens=50, prompt_tokens=3)
LOOP = LoopConfig(batch_size=12, group_size=4, max_staleness=1, max_inflight=10_000)


def fleet(speed: Steady, **changes: float) -> Fleet:
    return replace(Fleet(speed=speed, num_replicas=1, slots=10_000, kv_tokens=10**9, train_s=1.0), **changes)


def run(
    hardware: Fleet, loop: LoopConfig, lengths: LengthConfig = FIXED, warmup: int = 6, steps: int = 9, seed: int = 0
) -> LoopResult:
    return simulate(hardware, loop, Lengths(lengths, 10**6, seed), warmup=warmup, steps=steps, seed=seed)


def finish_times_step_by_step(speed: Steady, requests: list[Request], slots: int) -> dict[int, float]:
    """Decode token by token, all requests there from the start; a step costs the mean of its context before and after."""
    waiting, running, now, ends = list(requests), [], 0.0, {}
    while waiting or running:
        while waiting and len(running) < slots:
            request = waiting.pop(0)
            running.append([request, request.sampled_tokens, request.context + request.new_tokens])
            now += speed.prefill_token_s * request.new_tokens
        num = len(running)
        now += speed.base_s(num) + speed.token_s * (sum(context for _, _, context in running) + num / 2)
        for entry in running:
            entry[1] -= 1
            entry[2] += 1
        ends |= {request.rollout: now for request, left, _ in running if not left}
        running = [entry for entry in running if entry[1]]
    return ends


@given(
    sizes=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 30), st.integers(0, 20)), min_size=1, max_size=12),
    slots=st.integers(1, 5),
    token_s=st.sampled_from([0.0, 1e-3, 0.5]),
    prefill_token_s=st.sampled_from([0.0, 0.07]),
)
def test_a_replica_ends_requests_when_stepping_token_by_token_does(
    sizes: list[tuple[int, int, int]], slots: int, token_s: float, prefill_token_s: float
):
    speed = Steady(per_sequence_s=0.01, token_s=token_s, prefill_token_s=prefill_token_s)
    requests = [Request(rollout=i, sampled_tokens=s, new_tokens=n, context=c) for i, (s, n, c) in enumerate(sizes)]
    replica, ends, now = Replica(speed, slots=slots, kv_tokens=10**9, prefills=True), {}, 0.0
    for request in requests:
        replica.submit(request)
    replica.admit()
    while replica.num_running:
        now = replica.next_end_s()
        middle = now - 0.3 * (now - max(ends.values(), default=0.0))
        replica.advance(middle)  # a look in between changes nothing
        assert replica.next_end_s() == pytest.approx(now)
        replica.advance(now)
        ends |= {request.rollout: now for request in replica.finish()}
        replica.admit()
    assert ends == pytest.approx(finish_times_step_by_step(speed, requests, slots))
    assert replica.num_tokens == sum(size for size, _, _ in sizes)


def test_cache_is_reserved_to_the_end_of_a_request():
    replica = Replica(Steady(), slots=9, kv_tokens=100, prefills=True)
    for i in range(4):
        replica.submit(Request(rollout=i, new_tokens=20, context=5, sampled_tokens=15))
    assert [request.rollout for request in replica.admit()] == [0, 1]  # 40 each
    replica.advance(replica.next_end_s())
    assert len(replica.finish()) == 2
    assert [request.rollout for request in replica.admit()] == [2, 3]


@pytest.mark.parametrize("max_staleness", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("train_s", [0.7, 4.0, 30.0])
def test_step_time_with_equal_rollouts_is_the_closed_form(max_staleness: int, train_s: float):
    # A batch is admitted with the version that the batch max_staleness steps before it gave: so sampling (5 s) and
    # training of one batch share max_staleness + 1 steps, none shorter than training.
    hardware = fleet(Steady(), train_s=train_s, transfer_s=0.2, pause_s=0.3)
    result = run(hardware, replace(LOOP, max_staleness=max_staleness), steps=60)  # whole bursts of 1..6 batches
    update_s = train_s + 0.2 + 0.3
    # What decodes during a pause is held up by it: by max_staleness pauses at most.
    shortest_s = max(update_s, (update_s + 5.0) / (max_staleness + 1))
    longest_s = max(update_s, (update_s + 5.0 + 0.3 * max_staleness) / (max_staleness + 1))
    assert shortest_s - 1e-9 <= result.step_s <= longest_s + 1e-9
    assert set(result.staleness) == {max_staleness}  # admitted as early as the bound allows
    assert result.trainer_idle_frac == pytest.approx(1 - update_s / result.step_s, abs=1e-9)


@pytest.mark.parametrize("max_staleness", [0, 1, 2, 4])
@pytest.mark.parametrize("train_s", [0.5, 2.0, 7.0])
def test_step_time_without_updates_that_cost(max_staleness: int, train_s: float):
    result = run(fleet(Steady(), train_s=train_s), replace(LOOP, max_staleness=max_staleness), steps=60)
    assert result.step_s == pytest.approx(max(train_s, (train_s + 5.0) / (max_staleness + 1)))


def test_a_busy_trainer_sets_the_step():
    result = run(fleet(Steady(step_s=1e-4), train_s=11.0, transfer_s=2.0, pause_s=0.5), LOOP)
    assert result.step_s == pytest.approx(13.5)
    assert result.trainer_idle_frac == 0
    assert result.paused_frac == pytest.approx(0.5 / 13.5)
    assert result.trained_tokens == 12 * 53


def test_full_slots_set_the_step():
    # 5 slots of 50 tokens at 0.1 s: one rollout a second; single rollouts, so no group holds back a batch.
    loop = LoopConfig(batch_size=7, group_size=1, max_staleness=8, max_inflight=5)
    result = run(fleet(Steady(), slots=5, train_s=0.01), loop, steps=50)
    assert result.step_s == pytest.approx(7.0, rel=0.02)  # five land at a time
    assert result.sampled_tokens_per_s == pytest.approx(50.0, rel=0.02)
    assert (result.occupancy, result.sampler_idle_frac) == (pytest.approx(1.0), pytest.approx(0.0, abs=1e-9))


def test_waves_of_the_synchronous_mode():
    # 12 rollouts on 8 slots: two waves of 50 steps; then 3 s of environment, training, transfer, pause.
    loop = replace(LOOP, max_staleness=0)
    hardware = fleet(Steady(per_sequence_s=0.01), slots=8, train_s=4.0, transfer_s=0.5, pause_s=0.25)
    result = run(hardware, loop)
    assert result.step_s == pytest.approx(50 * 0.18 + 50 * 0.14 + 4.75)
    assert result.staleness == {0: 12 * 9}


def test_a_prompt_is_computed_once_for_a_group():
    speed = Steady(prefill_token_s=0.5)
    result = run(fleet(speed), LoopConfig(batch_size=4, group_size=4, max_staleness=0))
    assert result.step_s == pytest.approx(0.5 * (3 + 1 + 1 + 1) + 5.0 + 1.0)
    assert speed.prefilled[:4] == [3, 1, 1, 1]


def test_prefill_servers_work_beside_the_replicas():
    speed = Steady(prefill_token_s=2.0)
    loop = LoopConfig(batch_size=3, group_size=1, max_staleness=0)
    # Three prompts of 3 tokens on two servers: 6, 6 and 12 s; the last one starts to decode then.
    assert run(fleet(speed, num_prefill_servers=2), loop).step_s == pytest.approx(12.0 + 5.0 + 1.0)
    assert run(fleet(speed, num_prefill_servers=3), loop).step_s == pytest.approx(6.0 + 5.0 + 1.0)


@pytest.mark.parametrize("is_kept", [False, True])
def test_contexts_are_computed_again_after_an_update_unless_prefixes_are_kept(is_kept: bool):
    speed = Steady()
    lengths = replace(FIXED, sampled_tokens=60, reply_tokens=4, turns=3, prompt_tokens=5)
    loop = replace(LOOP, group_size=1, max_staleness=3, keep_prefixes=is_kept)
    run(fleet(speed, train_s=1.5), loop, lengths)
    assert is_kept == (max(speed.prefilled) == 5)
    # Whole contexts before the second and third turn: 5 + 20 + 2, and 27 + 20 + 2.
    assert set(speed.prefilled) <= ({5, 2} if is_kept else {5, 2, 27, 49})


def test_littles_law_holds():
    loop = LoopConfig(batch_size=32, group_size=4, max_staleness=4, max_inflight=64)
    lengths = LengthConfig(sampled_tokens=200, sigma=0.7, prompt_tokens=10, turns=2, env_s=5.0)
    hardware = fleet(Steady(per_sequence_s=0.002, token_s=1e-6), num_replicas=3, slots=8, train_s=5.0, pause_s=0.5)
    result = run(hardware, loop, lengths, warmup=10, steps=150)
    assert result.inflight == pytest.approx(result.landed_per_s * result.flight_s, rel=0.02)
    assert result.landed_per_s * result.step_s == pytest.approx(32, rel=0.03)  # of 4,800, up to 160 may be ready
    assert 32 * result.step_s**-1 * 200 == pytest.approx(result.sampled_tokens_per_s, rel=0.05)


def test_filtered_groups_cost_their_share():
    loop = LoopConfig(batch_size=8, group_size=2, max_staleness=8, max_inflight=16, filtered_frac=0.5)
    plain = run(fleet(Steady(), slots=16, train_s=0.01), replace(loop, filtered_frac=0.0), steps=200)
    result = run(fleet(Steady(), slots=16, train_s=0.01), loop, steps=200)
    assert result.step_s == pytest.approx(2 * plain.step_s, rel=0.1)
    assert set(result.drops) == {"zero_variance"}


@settings(max_examples=60)
@given(
    batch=st.integers(1, 5),
    group=st.integers(1, 4),
    max_staleness=st.integers(0, 4),
    inflight=st.integers(1, 60),
    slots=st.integers(1, 12),
    replicas=st.integers(1, 3),
    sigma=st.floats(0, 1.5),
    train_s=st.floats(0, 20),
    pause_s=st.floats(0, 2),
    turns=st.floats(1, 4),
    env_s=st.sampled_from([0.0, 2.0]),
    filtered=st.sampled_from([0.0, 0.3]),
    failed=st.sampled_from([0.0, 0.2]),
    servers=st.integers(0, 2),
    seed=st.integers(0, 5),
)
def test_nothing_is_lost_and_nothing_is_too_old(
    batch: int, group: int, max_staleness: int, inflight: int, slots: int, replicas: int, sigma: float, train_s: float,
    pause_s: float, turns: float, env_s: float, filtered: float, failed: float, servers: int, seed: int,
):  # fmt: skip
    loop = LoopConfig(
        batch_size=batch * group, group_size=group, max_staleness=max_staleness, max_inflight=inflight,
        filtered_frac=filtered, failed_frac=failed,
    )  # fmt: skip
    lengths = LengthConfig(sampled_tokens=30, sigma=sigma, prompt_tokens=4, reply_tokens=6, turns=turns, env_s=env_s)
    speed = Steady(per_sequence_s=0.01, token_s=1e-4, prefill_token_s=0.01)
    hardware = fleet(
        speed, num_replicas=replicas, slots=slots, train_s=train_s, pause_s=pause_s, num_prefill_servers=servers
    )
    result = run(hardware, loop, lengths, warmup=2, steps=5, seed=seed)
    totals = result.totals
    assert totals["dispatched"] == sum(totals[key] for key in ("trained", "dropped", "ready", "in_flight"))
    assert result.staleness_max <= max_staleness
    assert min(result.staleness) >= 0
    assert "stale" not in result.drops  # admission sees to that
    if not failed:
        assert sum(result.staleness.values()) == 5 * batch * group
        assert totals["trained"] == 8 * batch * group
    assert result.step_s >= train_s + pause_s - 1e-9
    for share in (result.trainer_idle_frac, result.sampler_idle_frac, result.occupancy, result.paused_frac):
        assert -1e-9 <= share <= 1 + 1e-9
    if max_staleness:
        assert result.inflight <= max(inflight, group) + 1e-9
    assert run(hardware, loop, lengths, warmup=2, steps=5, seed=seed) == result
