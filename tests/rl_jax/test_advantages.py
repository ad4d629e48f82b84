"""Advantages against closed forms written out in exact fractions or float64."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_jax.advantages import AdvantageConfig, Advantages, LengthPenaltyConfig, is_degenerate
from rl_jax.config import ConfigError

GROUP_TYPES = ["grpo", "dr_grpo", "rloo", "max_rl"]
ONE_ULP = 6.1e-8  # computed in float64, rounded once to float32
rewards_lists = st.lists(st.floats(0, 4, width=16), min_size=2, max_size=7)


def advantages_of(
    config: AdvantageConfig | Advantages, rewards: list, out: list | None = None, env: str = "e"
) -> np.ndarray:
    """Advantages of a group; without `out` every length is 1."""
    advantages = config if isinstance(config, Advantages) else Advantages(config)
    ones_G = np.ones(len(rewards), np.int64)
    return advantages(np.array(rewards, np.float64), ones_G if out is None else np.array(out), ones_G, ones_G, env)


def exact(type: str, rewards: list[float]) -> list[float]:
    """Formulas of the config in exact arithmetic (but for the square root)."""
    r = [Fraction(x) for x in rewards]
    mean = sum(r) / len(r)
    if type == "dr_grpo":
        return [float(x - mean) for x in r]
    if type == "rloo":
        return [float(x - (sum(r) - x) / (len(r) - 1)) for x in r]
    if type == "max_rl":
        return [float((x - mean) / mean) if mean > 0 else 0.0 for x in r]
    variance = sum((x - mean) ** 2 for x in r) / (len(r) - 1)
    return [float(x - mean) / (math.sqrt(variance) + 1e-4) for x in r]


@pytest.mark.parametrize("type", GROUP_TYPES)
@given(rewards=rewards_lists)
def test_group_advantages_equal_the_closed_form(type, rewards):
    adv_G = advantages_of(AdvantageConfig(type=type), rewards)
    assert adv_G.dtype == np.float32
    np.testing.assert_allclose(adv_G, exact(type, rewards), rtol=2 * ONE_ULP, atol=1e-14)


@pytest.mark.parametrize(
    ("type", "expected"),
    [
        ("dr_grpo", [0.75, -0.25, -0.25, -0.25]),
        ("rloo", [1.0, -1 / 3, -1 / 3, -1 / 3]),
        ("max_rl", [3.0, -1.0, -1.0, -1.0]),
        ("grpo", [0.75 / 0.5001, -0.25 / 0.5001, -0.25 / 0.5001, -0.25 / 0.5001]),
    ],
)
def test_one_success_in_four(type, expected):
    np.testing.assert_allclose(advantages_of(AdvantageConfig(type=type), [1, 0, 0, 0]), expected, rtol=ONE_ULP)


@pytest.mark.parametrize("type", GROUP_TYPES)
@pytest.mark.parametrize("num_members", [2, 3, 4, 7])
@pytest.mark.parametrize("reward", [0.0, 0.1, 1 / 3, 1.0])
def test_equal_rewards_give_exactly_zero(type, num_members, reward):
    """0.1 - mean([0.1] * 3) is not 0 in float64, and grpo would divide it by a tiny spread."""
    assert is_degenerate(np.full(num_members, reward))
    assert not advantages_of(AdvantageConfig(type=type), [reward] * num_members).any()


@pytest.mark.parametrize("type", GROUP_TYPES)
def test_ragged_groups_do_not_leak_into_each_other(type):
    """A group that lost a member is normalised over the survivors, and the equal one stays exactly 0."""
    advantages = Advantages(AdvantageConfig(type=type))
    groups = [[1.0, 0.0, 1.0, 0.0], [0.5, 0.5, 0.5], [0.0, 0.0, 1.0, 0.25]]
    for rewards in groups:
        adv_G = advantages_of(advantages, rewards)
        np.testing.assert_allclose(adv_G, exact(type, rewards) if rewards != groups[1] else 0, rtol=2 * ONE_ULP)


def test_max_rl_gives_zero_without_success():
    assert not advantages_of(AdvantageConfig(type="max_rl"), [-1.0, 0.5, 0.25]).any()


@given(rewards=rewards_lists, data=st.data())
def test_length_penalty_equals_the_closed_form(rewards, data):
    lengths = st.lists(st.integers(0, 9), min_size=len(rewards), max_size=len(rewards))
    out, inp, turns = data.draw(lengths), data.draw(lengths), data.draw(lengths)
    r, mean = [Fraction(x) for x in rewards], sum(map(Fraction, rewards)) / len(rewards)
    weights = (Fraction(0.25), Fraction(0.1), Fraction(0.1))
    shaped = [
        reward - mean * sum(w * Fraction(n[i], max(*n, 1)) for w, n in zip(weights, (out, inp, turns), strict=True))
        for i, reward in enumerate(r)
    ]
    expected = [float(x - sum(shaped) / len(shaped)) for x in shaped]
    advantages = Advantages(AdvantageConfig(type="dr_grpo", length_penalty=LengthPenaltyConfig()))
    adv_G = advantages(np.array(rewards), np.array(out), np.array(inp), np.array(turns), "e")
    np.testing.assert_allclose(adv_G, expected, rtol=2 * ONE_ULP, atol=1e-14)


def test_length_penalty_prefers_short_success_and_leaves_failure_alone():
    config = AdvantageConfig(type="dr_grpo", length_penalty=LengthPenaltyConfig())
    np.testing.assert_allclose(advantages_of(config, [1, 1], out=[4, 8]), [0.0625, -0.0625], rtol=ONE_ULP)
    assert not advantages_of(config, [0, 0], out=[4, 8]).any()


def test_reinforce_ema_reads_the_baseline_before_it_moves():
    """b: 0 -> 0.05 * 1 -> 0.95 * 0.05 + 0.05 * 0.5; another environment has its own."""
    advantages = Advantages(AdvantageConfig(type="reinforce_ema"))
    np.testing.assert_allclose(advantages_of(advantages, [1.0]), [1.0], rtol=ONE_ULP)
    np.testing.assert_allclose(advantages_of(advantages, [0.5]), [0.45], rtol=ONE_ULP)
    np.testing.assert_allclose(advantages_of(advantages, [0.5], env="other"), [0.5], rtol=ONE_ULP)
    assert advantages.state() == pytest.approx({"e": 0.0725, "other": 0.025})


@given(rewards=rewards_lists, cut=st.integers(0, 7))
def test_reinforce_ema_is_blind_to_groups_and_restarts(rewards, cut):
    config = AdvantageConfig(type="reinforce_ema", ema_decay=0.5)
    whole, first, second = Advantages(config), Advantages(config), Advantages(config)
    expected_G = advantages_of(whole, rewards)
    got = [advantages_of(first, [reward]) for reward in rewards[:cut]]
    second.restore(first.state())
    got += [advantages_of(second, [reward]) for reward in rewards[cut:]]
    np.testing.assert_array_equal(np.concatenate(got), expected_G)
    assert second.state() == (whole.state() if rewards[cut:] else first.state())


def test_restore_does_not_share_state():
    advantages = Advantages(AdvantageConfig(type="reinforce_ema"))
    state = {"e": 0.5}
    advantages.restore(state)
    advantages_of(advantages, [1.0])
    assert state == {"e": 0.5}


@pytest.mark.parametrize("type", [*GROUP_TYPES, "reinforce_ema"])
def test_only_reinforce_ema_works_alone(type):
    config = AdvantageConfig(type=type)
    assert config.needs_group == (type != "reinforce_ema")
    if config.needs_group:
        with pytest.raises(ValueError, match=f"has 1 usable member: {type} compares members"):
            advantages_of(config, [1.0])
    else:
        np.testing.assert_array_equal(advantages_of(config, [1.0]), [1.0])


@pytest.mark.parametrize("reward", [math.nan, math.inf])
@pytest.mark.parametrize("type", ["grpo", "reinforce_ema"])
def test_non_finite_reward_is_refused(type, reward):
    with pytest.raises(ValueError, match=r"rewards of e: .* must be finite"):
        advantages_of(AdvantageConfig(type=type), [0.0, reward])


@pytest.mark.parametrize(
    ("build", "fault"),
    [
        (lambda: AdvantageConfig(std_eps=0.0), "std_eps=0.0"),
        (lambda: AdvantageConfig(ema_decay=1.0), "ema_decay=1.0"),
        (lambda: LengthPenaltyConfig(num_turns_weight=-0.1), "num_turns_weight=-0.1"),
        (lambda: AdvantageConfig(type="reinforce_ema", length_penalty=LengthPenaltyConfig()), "length_penalty"),
    ],
)
def test_bad_configs_are_refused(build, fault):
    with pytest.raises(ConfigError) as error:
        build()
    assert [got.startswith(fault) for got in error.value.faults] == [True]
