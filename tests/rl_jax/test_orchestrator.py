"""orchestrator/: the staleness bound, fair shares, the account and the resume, under delays and failures of all kinds."""

import asyncio
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from fakes import FakePool, FakeSampler, make_player, make_shipper, spread
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from rl_jax.advantages import AdvantageConfig, Advantages
from rl_jax.envs.errors import EnvFailed
from rl_jax.envs.pool import EnvPool, PoolConfig
from rl_jax.envs.registry import EnvConfig
from rl_jax.orchestrator.concurrency import ConcurrencyConfig
from rl_jax.orchestrator.config import OrchestratorConfig
from rl_jax.orchestrator.ledger import FILE, Ledger, LedgerError
from rl_jax.orchestrator.loop import Orchestrator
from rl_jax.orchestrator.snapshot import Snapshot
from rl_jax.rollout.episode import EpisodeConfig, Player
from rl_jax.sampler import SamplerGone, SamplerLost
from rl_jax.tokenizer import Tokenizer

WITHOUT_SHRINKING = (Phase.explicit, Phase.generate)  # timing is no function of the example


def make_config(**fields):
    return OrchestratorConfig(**{"batch_size": 6, "group_size": 2, "retry_delay_s": 0.0, **fields})


async def train(shipper, first, last, *, trainer_s=0.0):
    """Train steps first + 1 .. last; return their batches."""
    batches = []
    await shipper.publish(None, first)
    for version in range(first, last):
        batch = await shipper.next_batch(version)
        await asyncio.sleep(trainer_s)
        shipper.record_trained(version + 1, batch.rollouts)
        batches.append(batch)
        await shipper.publish(None, version + 1)
    return batches


def run(tmp_path, sampler, pool, steps, config=None, trainer_s=0.0, **options):
    """Train `steps` steps in a fresh folder, close; return the batches and the final account, which balances."""

    async def body():
        shipper = make_shipper(config or make_config(), make_player(sampler, pool), tmp_path / FILE, **options)
        try:
            return await train(shipper, 0, steps, trainer_s=trainer_s)
        finally:
            await shipper.close()

    batches = asyncio.run(body())
    return batches, checked(tmp_path)


def checked(tmp_path):
    ledger = Ledger(tmp_path / FILE)
    ledger.check()
    account = ledger.account()
    ledger.close()
    return account


def groups_of(batches):
    return [sorted({rollout.group_id for rollout in batch.rollouts}) for batch in batches]


def staleness(batches):
    return [version - r.oldest_version for version, batch in enumerate(batches) for r in batch.rollouts]


def random_delay(seed, longest_s=0.006):
    rng = random.Random(seed)
    return lambda request: rng.random() ** 3 * longest_s


@settings(max_examples=10, phases=WITHOUT_SHRINKING)
@given(seed=st.integers(0, 1000), max_staleness=st.integers(0, 3), trainer_s=st.sampled_from([0.0, 0.004]))
def test_bound_holds_and_nothing_is_wasted_under_random_delays(tmp_path_factory, seed, max_staleness, trainer_s):
    config = make_config(max_staleness=max_staleness)
    sampler = FakeSampler(random_delay(seed))
    path = tmp_path_factory.mktemp("run")
    batches, account = run(path, sampler, FakePool(spread), 6, config, trainer_s, last_step=6)
    assert max(staleness(batches)) <= max_staleness
    assert min(staleness(batches)) >= 0
    # Every admitted group is trained, once: none is stale, none is left when the run ends.
    assert sorted(chain.from_iterable(groups_of(batches))) == list(range(6 * 3))
    assert (account.dispatched, account.trained, account.dropped) == (36, 36, {})
    for batch in batches:
        assert [(r.group_id, r.member) for r in batch.rollouts] == sorted(
            (r.group_id, r.member) for r in batch.rollouts
        )
        assert batch.metrics["off_policy/max"] <= max_staleness


def test_asynchronous_batches_do_get_stale_and_swap_in_flight(tmp_path):
    is_stale = has_swapped = False
    for seed in range(1, 7):  # a claim that something happens at all; on a busy machine not in every run
        sampler = FakeSampler(random_delay(seed))
        (tmp_path / str(seed)).mkdir()
        batches, _ = run(tmp_path / str(seed), sampler, FakePool(spread), 8, make_config(max_staleness=2))
        is_stale |= max(staleness(batches)) == 2
        rollouts = [r for batch in batches for r in batch.rollouts]
        has_swapped |= any(len(set(r.versions_T[r.sampled_T].tolist())) > 1 for r in rollouts)
        if is_stale and has_swapped:
            return
    assert is_stale and has_swapped


def test_sampler_that_lags_is_caught_at_the_cut(tmp_path):
    async def body():
        sampler = FakeSampler(version_lag=2)
        shipper = make_shipper(make_config(max_staleness=1), make_player(sampler, FakePool(spread)), tmp_path / FILE)
        await shipper.publish(None, 5)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await shipper.next_batch(5)
        await shipper.close()

    asyncio.run(body())
    account = checked(tmp_path)
    assert account.trained == 0
    assert account.dropped["stale"] > 20
    assert account.by_reason["stale"] == "oldest token by policy 3, step 6 trains policy 5"


def test_slow_tasks_are_trained_as_often_as_fast_ones(tmp_path):
    def delay(request):
        return 0.012 if request.tokens_T[1] == ord("s") else 0.0006

    batches, account = run(
        tmp_path,
        FakeSampler(delay),
        FakePool(spread),
        25,
        make_config(batch_size=8, max_staleness=1),
        weights={"fast": 1.0, "slow": 1.0},
    )
    envs = Counter(rollout.env for batch in batches for rollout in batch.rollouts)
    assert abs(envs["slow"] / envs.total() - 0.5) <= 0.02
    assert set(account.dropped) <= {"run_ended"}


@pytest.mark.parametrize("is_killed", [False, True])
def test_synchronous_mode_is_repeatable_and_resumes_exactly(tmp_path, is_killed):
    def reward(env, index, texts):  # two of three groups get one reward: replaced by further waves
        return float(len(texts[-1]) > 4) if index % 3 else 1.0

    config = make_config(max_staleness=0)

    async def body(path, delays, steps, state=None):
        sampler = FakeSampler(random_delay(delays, 0.002))
        shipper = make_shipper(config, make_player(sampler, FakePool(reward)), path / FILE, last_step=6)
        if state:
            shipper.restore(Snapshot.from_bytes(state))
        batches = await train(shipper, steps[0], steps[1])
        if steps[1] < 6:
            await asyncio.sleep(0.003)
        state = shipper.snapshot().to_bytes()
        if is_killed and steps[1] < 6:
            await kill(shipper)
        else:
            await shipper.close()
        return batches, state, [[request.params.seed for request in call] for call in sampler.calls]

    def content(batches):
        return [
            [(r.group_id, r.member, r.task_id, r.tokens_T.tolist(), r.logprobs_T.tolist(), r.reward, advantage)
             for r, advantage in zip(batch.rollouts, batch.advantages, strict=True)]
            for batch in batches
        ]  # fmt: skip

    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    whole, _, calls = asyncio.run(body(tmp_path / "a", 1, (0, 6)))
    first, state, _ = asyncio.run(body(tmp_path / "b", 2, (0, 3)))
    second, _, calls_again = asyncio.run(body(tmp_path / "b", 3, (3, 6), state))
    assert content(whole) == content([*first, *second])
    assert calls[-len(calls_again) :] == calls_again
    assert len(calls) > 6
    assert staleness(whole) == [0] * 36
    assert checked(tmp_path / "a").dropped.keys() == {"zero_variance"}
    checked(tmp_path / "b")


async def kill(shipper):
    """Leave what a killed process leaves: nothing closed, what was not committed is gone."""
    await shipper._dispatcher.background.close()
    shipper._ledger._connection.close()


@settings(max_examples=8, phases=WITHOUT_SHRINKING)
@given(seed=st.integers(0, 10_000), max_staleness=st.integers(0, 2))
def test_crash_anywhere_and_resume_trains_every_group_once(tmp_path_factory, seed, max_staleness):
    path, rng, steps = tmp_path_factory.mktemp("run"), random.Random(seed), 5
    config = make_config(max_staleness=max_staleness)
    checkpoint = None

    async def attempt(crash_after_s):
        nonlocal checkpoint
        sampler = FakeSampler(random_delay(rng.random(), 0.03))
        shipper = make_shipper(config, make_player(sampler, FakePool(spread)), path / FILE, last_step=steps)
        version, state = checkpoint or (0, None)
        if state:
            shipper.restore(Snapshot.from_bytes(state))

        async def steps_on():
            nonlocal checkpoint
            await shipper.publish(None, version)
            for v in range(version, steps):
                batch = await shipper.next_batch(v)
                await asyncio.sleep(rng.random() * 0.01)
                shipper.record_trained(v + 1, batch.rollouts)
                if rng.random() < 0.5:
                    checkpoint = v + 1, shipper.snapshot().to_bytes()
                await shipper.publish(None, v + 1)

        try:
            await asyncio.wait_for(steps_on(), crash_after_s)
        except TimeoutError:
            await kill(shipper)
            return False
        await shipper.close()
        return True

    while not asyncio.run(attempt(rng.random() * 0.1 if rng.random() < 0.9 else 10.0)):
        pass
    account = checked(path)
    ledger = Ledger(path / FILE)
    trained = ledger._rows("SELECT group_id, member, count(*) FROM rollouts WHERE status = 'trained' GROUP BY 1, 2")
    tasks = ledger._rows("SELECT task_id FROM rollouts WHERE status = 'trained' AND member = 0 ORDER BY 1")
    ledger.close()
    assert trained == [(group, member, 1) for group in range(steps * 3) for member in range(2)]
    assert [row[0] for row in tasks] == list(range(steps * 3))  # exactly the tasks of an uninterrupted run
    assert set(account.dropped) <= {"rewound"}
    assert (account.in_flight, account.ready) == (0, 0)


def test_batch_that_was_handed_out_and_not_trained_comes_again(tmp_path):
    advantage = AdvantageConfig(type="reinforce_ema", ema_decay=0.5)

    async def body():
        shipper = make_shipper(
            make_config(), make_player(FakeSampler(), FakePool(spread)), tmp_path / FILE, advantage=advantage
        )
        (first,) = await train(shipper, 0, 1)
        second = await shipper.next_batch(1)
        state = shipper.snapshot().to_bytes()
        await shipper.close()
        resumed = make_shipper(
            make_config(), make_player(FakeSampler(), FakePool(spread)), tmp_path / FILE, advantage=advantage
        )
        resumed.restore(Snapshot.from_bytes(state))
        await resumed.publish(None, 1)
        again = await resumed.next_batch(1)
        resumed.record_trained(2, again.rollouts)
        await resumed.close()
        return first, second, again

    first, second, again = asyncio.run(body())
    assert groups_of([first, again]) == groups_of([first, second])
    assert again.advantages == second.advantages  # the moving baseline saw each reward once
    checked(tmp_path)


def test_failing_members_leave_ragged_groups_and_unbiased_advantages(tmp_path):
    def judge(env, index, texts):
        if random.Random(texts[-1] + str(index)).random() < 0.2:
            raise EnvFailed("a: reward: ZeroDivisionError")
        return spread(env, index, texts)

    config = make_config(batch_size=16, group_size=4)
    batches, account = run(tmp_path, FakeSampler(), FakePool(judge), 6, config)
    sizes = set()
    for batch in batches:
        by_group = {}
        for rollout, advantage in zip(batch.rollouts, batch.advantages, strict=True):
            by_group.setdefault(rollout.group_id, []).append((rollout.reward, advantage))
        for rewards, advantages in (zip(*pairs, strict=True) for pairs in by_group.values()):
            sizes.add(len(rewards))
            expected = (np.array(rewards) - np.mean(rewards)) / (np.std(rewards, ddof=1) + 1e-4)
            np.testing.assert_allclose(advantages, expected, rtol=1e-6, atol=1e-7)  # float32 of a float64 formula
    assert sizes >= {2, 3, 4}
    assert account.dropped["reward_error"] > 0
    assert account.by_reason["reward_error"] == "a: reward: ZeroDivisionError"


def test_group_of_which_one_member_is_left_is_incomplete(tmp_path):
    def judge(env, index, texts):
        if index % 2 and len(texts[-1]) % 2:
            raise EnvFailed("odd")
        return spread(env, index, texts)

    batches, account = run(tmp_path, FakeSampler(), FakePool(judge), 4)
    assert account.dropped["group_incomplete"] > 0
    assert {len(batch.rollouts) for batch in batches} == {6}


def test_single_survivor_is_enough_for_an_advantage_without_group(tmp_path):
    def judge(env, index, texts):
        if len(texts[-1]) % 2:
            raise EnvFailed("odd")
        return spread(env, index, texts)

    advantage = AdvantageConfig(type="reinforce_ema")
    batches, _ = run(tmp_path, FakeSampler(), FakePool(judge), 4, advantage=advantage)
    sizes = Counter(Counter(r.group_id for batch in batches for r in batch.rollouts).values())
    assert sizes.keys() == {1, 2}


def test_five_percent_failures_of_every_kind_and_the_account_balances(tmp_path):
    rng = random.Random(0)

    def judge(env, index, texts):
        if rng.random() < 0.05:
            raise EnvFailed("flaky")
        return spread(env, index, texts)

    sampler = FakeSampler(random_delay(4), is_lost=lambda request: rng.random() < 0.05)
    batches, account = run(tmp_path, sampler, FakePool(judge), 12, make_config(max_retries=20))
    assert {"reward_error", "sampler_lost", "group_incomplete", "run_ended"} <= set(account.dropped)
    assert account.trained == sum(len(batch.rollouts) for batch in batches)
    assert account.in_flight == account.ready == 0


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_lost_sampler_requeues_the_whole_group(tmp_path, max_staleness):
    lost = []

    def is_lost(request):
        if request.prefix_key == "train.1" and len(lost) < 2:
            lost.append(request.params.seed)
            return True
        return False

    sampler = FakeSampler(is_lost=is_lost)
    config = make_config(max_staleness=max_staleness)
    batches, _ = run(tmp_path, sampler, FakePool(spread), 3, config, last_step=3)
    assert sorted(chain.from_iterable(groups_of(batches))) == list(range(9))
    ledger = Ledger(tmp_path / FILE)
    rows = ledger._rows("SELECT attempt, member, reason FROM rollouts WHERE group_id = 1 ORDER BY attempt, member")
    ledger.close()
    # Both members of an attempt go, the one that had finished too.
    attempts = {attempt for attempt, _, _ in rows}
    assert [row[1] for row in rows] == [0, 1] * len(attempts)
    assert [row[2] for row in rows] == ["sampler_lost"] * (len(rows) - 2) + [None, None]
    assert len(attempts) >= 2


def test_sampler_that_stays_lost_ends_the_run(tmp_path):
    sampler = FakeSampler(is_lost=lambda request: True)
    with pytest.raises(SamplerLost, match=r"the sampler was lost 3 times .* connection reset"):
        run(tmp_path, sampler, FakePool(spread), 1, make_config(max_retries=2))
    assert set(checked(tmp_path).dropped) <= {"sampler_lost", "run_ended"}


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_sampler_that_is_gone_for_good_ends_the_run_at_once(tmp_path, max_staleness, caplog):
    class Gone(FakeSampler):
        async def _write(self, request):
            raise SamplerGone("non-finite log-probability under weights 0")

    with pytest.raises(SamplerGone, match="non-finite log-probability under weights 0"):
        run(tmp_path, Gone(), FakePool(spread), 1, make_config(max_staleness=max_staleness))
    assert caplog.text.count("non-finite") == 1
    assert set(checked(tmp_path).dropped) == {"run_ended"}


def test_lost_completion_does_not_stall_the_run(tmp_path):
    sampler = FakeSampler(delay=lambda request: 60.0 * (request.request_id == "train.3.0"))

    async def body():
        player = make_player(sampler, FakePool(spread), rollout_timeout_s=2.0)
        shipper = make_shipper(make_config(), player, tmp_path / FILE)
        batches = await train(shipper, 0, 3)
        await shipper.close()
        return batches

    batches = asyncio.run(body())
    assert sum(batch.metrics["drops/rollout_timeout"] for batch in batches) == 2  # its group shares one request
    assert checked(tmp_path).dropped["rollout_timeout"] == 2


def test_zero_variance_is_filtered_counted_and_replaced(tmp_path):
    def judge(env, index, texts):
        return 0.5 if index % 2 else spread(env, index, texts)

    batches, account = run(tmp_path, FakeSampler(), FakePool(judge), 5)
    assert all(rollout.task_id % 2 == 0 for batch in batches for rollout in batch.rollouts)
    assert {len(batch.rollouts) for batch in batches} == {6}
    assert sum(batch.metrics["drops/zero_variance"] for batch in batches) <= account.dropped["zero_variance"]
    assert account.dropped["zero_variance"] >= 2 * 12


def test_zero_variance_is_kept_when_asked_or_when_the_advantage_needs_no_group(tmp_path):
    pool = FakePool(lambda env, index, texts: 0.5)
    batches, _ = run(tmp_path, FakeSampler(), pool, 2, make_config(filter_zero_variance=False))
    assert [batch.advantages for batch in batches] == [[0.0] * 6] * 2
    advantage = AdvantageConfig(type="reinforce_ema", ema_decay=0.5)
    config = make_config(batch_size=3, group_size=1)
    batches, _ = run(tmp_path, FakeSampler(), pool, 2, config, advantage=advantage)
    assert [advantage for batch in batches for advantage in batch.advantages] == [0.5 / 2**n for n in range(6)]


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_run_in_which_nothing_can_be_learned_stops_and_says_why(tmp_path, max_staleness):
    config = make_config(max_staleness=max_staleness, max_fruitless_batches=4)
    with pytest.raises(ValueError, match=r"none of the last 12 groups could be trained.* mean reward 0\.25"):
        run(tmp_path, FakeSampler(), FakePool(lambda env, index, texts: 0.25), 1, config)
    checked(tmp_path)


def test_prompts_that_are_too_long_are_counted_and_skipped(tmp_path):
    pool = FakePool(spread, prompt=lambda env, index: "x" * (70 if index % 3 == 0 else 5))
    batches, account = run(tmp_path, FakeSampler(), pool, 3)
    assert all(rollout.task_id % 3 for batch in batches for rollout in batch.rollouts)
    assert account.dropped["prompt_too_long"] >= 2 * 4
    pool = FakePool(spread, prompt=lambda env, index: "x" * 70)
    with pytest.raises(ValueError, match=r"environment a: 7 tasks in a row .* no room left in a context of 64"):
        run(tmp_path, FakeSampler(), pool, 3, make_config(max_fruitless_tasks=7))


async def num_asked(sampler, least):
    """Wait until the sampler was asked for `least` groups; return for how many it was asked soon after."""
    async with asyncio.timeout(60):
        while len(sampler.calls) < least:
            await asyncio.sleep(0.005)
    await asyncio.sleep(0.05)
    return len(sampler.calls)


def test_slow_trainer_closes_admission(tmp_path):
    async def body():
        sampler = FakeSampler()
        shipper = make_shipper(make_config(max_staleness=1), make_player(sampler, FakePool(spread)), tmp_path / FILE)
        await shipper.publish(None, 0)
        waiting = await num_asked(sampler, 6)  # two batches of three groups can still be trained
        await shipper.next_batch(0)
        training = await num_asked(sampler, 6)  # batch 1 is ready; policy 0 is too old for batch 2
        await shipper.publish(None, 1)
        published = await num_asked(sampler, 9)
        await shipper.close()
        return waiting, training, published

    assert asyncio.run(body()) == (6, 6, 9)
    assert checked(tmp_path).dropped == {"run_ended": 18}


def test_cap_bounds_the_rollouts_in_flight(tmp_path):
    sampler = FakeSampler(random_delay(3))
    concurrency = ConcurrencyConfig(initial_inflight=5, max_inflight=5)
    run(tmp_path, sampler, FakePool(spread), 4, make_config(concurrency=concurrency))
    assert sampler.most_running == 4
    sampler = FakeSampler(random_delay(3))
    run(tmp_path, sampler, FakePool(spread), 4, make_config())
    assert sampler.most_running > 4


def test_version_is_routable_only_after_the_acknowledgement(tmp_path):
    async def body():
        sampler = FakeSampler()
        shipper = make_shipper(make_config(max_staleness=0), make_player(sampler, FakePool(spread)), tmp_path / FILE)
        sampler.publish_delay_s = 0.05
        publishing = asyncio.ensure_future(shipper.publish(None, 0))
        await asyncio.sleep(0.02)
        assert not sampler.calls
        await publishing
        await shipper.next_batch(0)
        publishing = asyncio.ensure_future(shipper.publish(None, 1))
        batch = asyncio.ensure_future(shipper.next_batch(1))  # may be asked for while the samplers swap
        await asyncio.sleep(0.02)
        assert len(sampler.calls) == 1
        await publishing
        versions = {v for r in (await batch).rollouts for v in r.versions_T[r.sampled_T].tolist()}
        await shipper.close()
        return versions

    assert asyncio.run(body()) == {1}


def test_silent_samplers_end_the_publish(tmp_path):
    async def body():
        sampler = FakeSampler()
        sampler.publish_delay_s = 30
        config = make_config(publish_timeout_s=0.02)
        shipper = make_shipper(config, make_player(sampler, FakePool(spread)), tmp_path / FILE)
        try:
            with pytest.raises(TimeoutError, match=r"publish\(0\): .* within publish_timeout_s=0.02"):
                await shipper.publish(None, 0)
        finally:
            await shipper.close()

    asyncio.run(body())


def test_batch_that_can_never_come_is_an_error_not_a_hang(tmp_path):
    async def body():
        shipper = make_shipper(make_config(), make_player(FakeSampler(), FakePool(spread)), tmp_path / FILE)
        try:
            with pytest.raises(AssertionError, match="publish first"):
                await shipper.next_batch(0)
            await shipper.publish(None, 0)
            await shipper.next_batch(0)
            await shipper.next_batch(1)
            with pytest.raises(AssertionError, match=r"next_batch\(2\) can never be filled"):
                await shipper.next_batch(2)
            with pytest.raises(AssertionError, match=r"next_batch\(1\): expected at least 2"):
                await shipper.next_batch(1)
        finally:
            await shipper.close()

    asyncio.run(body())


def test_metrics_against_their_definitions(tmp_path):
    def judge(env, index, texts):
        return 0.0 if env == "b" else spread(env, index, texts)

    (batch, *_), _ = run(tmp_path, FakeSampler(), FakePool(judge), 2, weights={"a": 2.0, "b": 1.0})
    metrics, rollouts = batch.metrics, batch.rollouts
    rewards = [rollout.reward for rollout in rollouts]
    assert metrics["train/agg/effective/reward/mean"] == pytest.approx(np.mean(rewards), rel=1e-12)
    assert metrics["train/a/effective/reward/p90"] == pytest.approx(np.percentile(rewards, 90), rel=1e-12)
    assert metrics["train/a/effective/length/mean"] == np.mean([r.reward_parts["length"] for r in rollouts])
    assert metrics["train/agg/effective/num_output_tokens/mean"] == np.mean([r.num_sampled for r in rollouts])
    assert metrics["reward/b/mean"] == metrics["reward/b/max"] == 0.0
    assert metrics["reward/all/mean"] < metrics["train/agg/effective/reward/mean"]
    assert "train/b/effective/reward/mean" not in metrics
    assert (metrics["batch/a"], metrics["batch/b"], metrics["batch/rollouts"]) == (1.0, 0.0, 6.0)
    assert 0 < metrics["train/agg/all/solved_none"] <= 0.5
    assert metrics["drops/zero_variance"] > 0
    assert metrics["drops/stale"] == metrics["off_policy/dropped"] == 0
    assert metrics["off_policy/mean"] == metrics["off_policy/in_flight/mean"] + metrics["off_policy/in_queue/mean"]
    assert metrics["watcher/policy_version"] == 0
    assert metrics["time/wait_for_batch"] >= 0


def test_snapshot_survives_bytes_exactly_and_damage_is_named(tmp_path):
    async def body():
        shipper = make_shipper(
            make_config(max_staleness=2),
            make_player(FakeSampler(random_delay(2)), FakePool(spread)),
            tmp_path / FILE,
            {"a": 1.0, "b": 0.3},
        )
        await train(shipper, 0, 3)
        snapshot = shipper.snapshot()
        await shipper.close()
        return snapshot

    snapshot = asyncio.run(body())
    data = snapshot.to_bytes()
    again = Snapshot.from_bytes(data)
    assert again.to_bytes() == data
    assert (again.pending, again.curriculum, again.position) == (
        snapshot.pending,
        snapshot.curriculum,
        snapshot.position,
    )
    for ours, theirs in zip(snapshot.groups, again.groups, strict=True):
        for left, right in zip(ours.rollouts, theirs.rollouts, strict=True):
            np.testing.assert_equal(vars(left), vars(right))
    with pytest.raises(ValueError, match="damaged"):
        Snapshot.from_bytes(data[: len(data) // 2])


def test_state_of_another_run_is_refused(tmp_path):
    async def body():
        shipper = make_shipper(make_config(), make_player(FakeSampler(), FakePool(spread)), tmp_path / FILE)
        await train(shipper, 0, 1)
        snapshot = shipper.snapshot()
        await shipper.close()
        (tmp_path / FILE).unlink()
        other = make_shipper(make_config(), make_player(FakeSampler(), FakePool(spread)), tmp_path / FILE)
        try:
            with pytest.raises(LedgerError, match="not the ledger of that run"):
                other.restore(snapshot)
        finally:
            await other.close()

    asyncio.run(body())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"batch_size": 10, "group_size": 4}, "batch_size=10: must be a multiple of group_size=4; try 8 or 12"),
        ({"batch_size": 3, "group_size": 4}, "batch_size=3: must be a multiple of group_size=4; try 4"),
        ({"max_staleness": -1}, "max_staleness=-1: must be between 0"),
        ({"group_size": 0}, "group_size=0"),
        ({"max_retries": -1}, "max_retries=-1"),
        ({"publish_timeout_s": 0.0}, "publish_timeout_s=0.0"),
    ],
)
def test_config_refuses(fields, message):
    with pytest.raises(ValueError, match=message):
        OrchestratorConfig(**fields)


# ---- the thread


def make_orchestrator(path, sampler, pool, config=None, **options):
    return Orchestrator(
        config or make_config(),
        player=make_player(sampler, pool),
        weights={"a": 1.0},
        advantages=Advantages(AdvantageConfig()),
        ledger_path=path / FILE,
        seed=5,
        **options,
    )


def test_blocking_calls_from_the_trainers_thread(tmp_path):
    orchestrator = make_orchestrator(tmp_path, FakeSampler(random_delay(5)), FakePool(spread), last_step=4)
    orchestrator.start()
    assert "orchestrator" in {thread.name for thread in threading.enumerate()}
    orchestrator.publish(None, 0)
    for version in range(3):
        batch = orchestrator.next_batch(version)
        orchestrator.record_trained(version + 1, batch.rollouts)
        orchestrator.publish(None, version + 1)
    state = orchestrator.state()
    orchestrator.close()
    orchestrator.close()
    assert "orchestrator" not in {thread.name for thread in threading.enumerate()}
    resumed = make_orchestrator(tmp_path, FakeSampler(), FakePool(spread), last_step=4)
    resumed.start()
    resumed.restore(state)
    resumed.publish(None, 3)
    resumed.record_trained(4, resumed.next_batch(3).rollouts)
    resumed.close()
    assert checked(tmp_path).trained == 24


def test_error_of_the_background_reaches_a_waiting_trainer(tmp_path):
    def judge(env, index, texts):
        raise ZeroDivisionError("a bug, not an environment's failure")

    orchestrator = make_orchestrator(tmp_path, FakeSampler(lambda request: 0.05), FakePool(judge))
    orchestrator.start()
    orchestrator.publish(None, 0)
    for _ in range(2):  # it does not go away
        with pytest.raises(ZeroDivisionError, match="a bug"):
            orchestrator.next_batch(0)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        orchestrator.publish(None, 1)
    assert Snapshot.from_bytes(orchestrator.state()).pending  # what was in flight can still be saved
    orchestrator.close()
    checked(tmp_path)


def test_start_that_fails_leaves_no_thread(tmp_path):
    (tmp_path / FILE).write_bytes(b"no database" * 100)
    orchestrator = make_orchestrator(tmp_path, FakeSampler(), FakePool(spread))
    with pytest.raises(LedgerError, match="not a database"):
        orchestrator.start()
    assert "orchestrator" not in {thread.name for thread in threading.enumerate()}


def test_real_environments_in_worker_processes(tmp_path):
    """guess_number, in several turns, rewarded by a worker process; a policy of random letters never hits."""
    pool = EnvPool([EnvConfig(id="guess_number", settings={"max_turns": 3})], PoolConfig())
    sampler = FakeSampler()
    player = Player(
        EpisodeConfig(max_tokens=8, max_turns=3),
        sampler=sampler,
        pool=pool,
        tokenizer=Tokenizer.byte_level(),
        context_len=256,
        seed=0,
    )
    orchestrator = Orchestrator(
        make_config(filter_zero_variance=False),
        player=player,
        weights={"guess_number": 1.0},
        advantages=Advantages(AdvantageConfig()),
        ledger_path=tmp_path / FILE,
        seed=0,
    )
    asyncio.run(pool.start())
    try:
        orchestrator.start()
        orchestrator.publish(None, 0)
        batch = orchestrator.next_batch(0)
        orchestrator.record_trained(1, batch.rollouts)
    finally:
        orchestrator.close()
        asyncio.run(pool.close())
    assert len(batch.rollouts) == 6
    for rollout in batch.rollouts:
        assert (rollout.num_turns, rollout.reward, rollout.reward_parts) == (3, 0.0, {"hit": 0.0})
        text = Tokenizer.byte_level().decode(rollout.tokens_T[~rollout.sampled_T])
        assert text.startswith("I think of a number from 1 to 20.")
        assert text.count("write one number") == 3  # the prompt says so too
    checked(tmp_path)


CHILD = """
import sys
from pathlib import Path
sys.path[:0] = {paths!r}
from test_orchestrator import train_forever
train_forever(Path(sys.argv[1]))
"""


def train_forever(path: Path) -> None:
    """Train until killed; checkpoint each step beside the ledger."""
    orchestrator = make_orchestrator(path, FakeSampler(random_delay(9, 0.05)), FakePool(spread))
    orchestrator.start()
    orchestrator.publish(None, 0)
    for version in range(100_000):
        batch = orchestrator.next_batch(version)
        orchestrator.record_trained(version + 1, batch.rollouts)
        (path / "aside").write_bytes((version + 1).to_bytes(8, "big") + orchestrator.state())
        (path / "aside").rename(path / "checkpoint")
        orchestrator.publish(None, version + 1)


def test_killed_process_resumes_with_a_balanced_account(tmp_path):
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[2])]
    child = subprocess.Popen([sys.executable, "-c", CHILD.format(paths=paths), str(tmp_path)])
    try:
        deadline = time.monotonic() + 60
        while not ((tmp_path / "checkpoint").exists() and (tmp_path / "checkpoint").read_bytes()[7] > 3):
            assert child.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(0.05)
    finally:
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
    before = checked(tmp_path)
    assert before.trained > 0
    data = (tmp_path / "checkpoint").read_bytes()
    version = int.from_bytes(data[:8], "big")
    resumed = make_orchestrator(tmp_path, FakeSampler(), FakePool(spread), last_step=version + 3)
    resumed.start()
    resumed.restore(data[8:])
    resumed.publish(None, version)
    for v in range(version, version + 3):
        resumed.record_trained(v + 1, resumed.next_batch(v).rollouts)
        resumed.publish(None, v + 1)
    resumed.close()
    after = checked(tmp_path)
    assert after.trained == (version + 3) * 6
    assert (after.in_flight, after.ready) == (0, 0)
    ledger = Ledger(tmp_path / FILE)
    groups = [row[0] for row in ledger._rows("SELECT group_id FROM rollouts WHERE status = 'trained' AND member = 0")]
    ledger.close()
    assert sorted(groups) == list(range((version + 3) * 3))  # nothing lost, nothing twice


def test_synchronous_wave_waits_for_the_trainer_to_ask(tmp_path):
    """So that an evaluation after a publish shares no batch of the sampler with it."""

    async def body():
        sampler = FakeSampler()
        shipper = make_shipper(make_config(max_staleness=0), make_player(sampler, FakePool(spread)), tmp_path / FILE)
        await shipper.publish(None, 0)
        before = await num_asked(sampler, 0)
        await shipper.next_batch(0)
        await shipper.publish(None, 1)
        after = await num_asked(sampler, 1)
        await shipper.close()
        return before, after

    assert asyncio.run(body()) == (0, 1)


def test_sampler_that_cancels_its_requests_is_an_error_not_a_hang(tmp_path):
    def shut_down(request):
        raise asyncio.CancelledError

    with pytest.raises(RuntimeError, match="was cancelled"):
        run(tmp_path, FakeSampler(is_lost=shut_down), FakePool(spread), 1)
