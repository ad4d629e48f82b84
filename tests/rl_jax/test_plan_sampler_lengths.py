"""Lengths: what is drawn has the mean, spread, total and cut that the config asks for."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_jax.config import ConfigError
from rl_jax.plan.lengths import LengthConfig, Lengths, Turn

FIXED = LengthConfig(kind="fixed", sampled_tokens=100, prompt_tokens=20)


def drawn(config: LengthConfig, num: int, max_len: int = 10**9) -> np.ndarray:
    """Return the sampled tokens of `num` groups of two, [groups, 2]."""
    lengths = Lengths(config, max_len, seed=3)
    groups = [lengths.group(2) for _ in range(num)]
    return np.array([[sum(turn.sampled_tokens for turn in turns) for turns in group] for group in groups])


def test_fixed_lengths_are_split_over_turns_to_the_token():
    config = replace(FIXED, sampled_tokens=101, reply_tokens=7, turns=3)
    (turns,) = Lengths(config, 1000, seed=0).group(1)
    assert [turn.new_tokens for turn in turns] == [20, 3, 4]
    assert [turn.sampled_tokens for turn in turns] == [33, 34, 34]
    assert {turn.env_s for turn in turns} == {0.0}


def test_what_passes_the_context_is_cut():
    config = replace(FIXED, reply_tokens=60, turns=4)  # turns of 20+25, 20+25, 20+25, 20+25
    assert Lengths(config, 130, seed=0).group(1) == [
        [
            Turn(new_tokens=20, sampled_tokens=25, env_s=0.0),
            Turn(new_tokens=20, sampled_tokens=25, env_s=0.0),
            Turn(new_tokens=20, sampled_tokens=20, env_s=0.0),
        ]
    ]
    assert sum(map(len, Lengths(config, 110, seed=0).group(1))) == 2  # no room to answer the third


def test_lognormal_sizes_have_their_mean_and_spread():
    tokens = drawn(LengthConfig(sampled_tokens=5000, sigma=0.8), 20_000)
    logs = np.log(tokens)
    # Standard errors over 40,000 draws: 0.5 % of the mean, 0.004 of a deviation.
    assert tokens.mean() == pytest.approx(5000, rel=0.03)
    assert logs.std() == pytest.approx(0.8, abs=0.02)
    assert abs(np.corrcoef(logs.T)[0, 1]) < 0.03


def test_members_of_a_group_share_what_the_config_says():
    logs = np.log(drawn(LengthConfig(sampled_tokens=5000, sigma=0.8, group_frac=0.6), 20_000))
    assert np.corrcoef(logs.T)[0, 1] == pytest.approx(0.6, abs=0.03)
    assert logs.std() == pytest.approx(0.8, abs=0.03)


@pytest.mark.parametrize("cv", [0.0, 0.4, 1.0, 2.0])
def test_environment_times_have_their_mean_and_spread(cv: float):
    lengths = Lengths(replace(FIXED, env_s=12.0, env_cv=cv, turns=5), 1000, seed=1)
    waits = np.array([turn.env_s for _ in range(2000) for turns in lengths.group(2) for turn in turns])
    # Of 20,000 draws the mean has a standard error of cv * 0.7 %.
    assert waits.mean() == pytest.approx(12.0, rel=0.05)
    assert waits.std() / 12.0 == pytest.approx(cv, rel=0.08, abs=1e-9)


def test_empirical_sizes_are_those_of_the_file(tmp_path: Path):
    file = tmp_path / "tokens.txt"
    file.write_text("100\n100\n400\n\n1000\n")
    lengths = Lengths(LengthConfig(kind="empirical", file=str(file)), 10**6, seed=2)
    tokens = [turns[0].sampled_tokens for _ in range(4000) for turns in lengths.group(2)]
    assert lengths.config.sampled_tokens == 400
    counts = {value: tokens.count(value) / len(tokens) for value in set(tokens)}
    assert counts == {
        100: pytest.approx(0.5, abs=0.02),
        400: pytest.approx(0.25, abs=0.02),
        1000: pytest.approx(0.25, abs=0.02),
    }


def test_a_run_gives_its_mean_and_spread(tmp_path: Path):
    rows = [
        {"step": 0, "loss/policy": 1.0},
        {"step": 1} | {f"train/agg/all/num_output_tokens/{k}": v for k, v in (("mean", 60), ("p10", 20), ("p90", 80))},
        {"step": 2} | {f"train/agg/all/num_output_tokens/{k}": v for k, v in (("mean", 40), ("p10", 10), ("p90", 40))},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = Lengths(LengthConfig(kind="run", file=str(tmp_path)), 1000, seed=0).config
    assert config.sampled_tokens == 50
    assert config.sigma == pytest.approx(math.log(4) / (2 * 1.2815515655446004))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, "cannot be read"),
        ("", "is empty"),
        ("12\nabc\n", "entry 2 is 'abc', expected a number"),
        ("12\nnan\n", "entry 2 is 'nan', expected at least 1 token"),
        ("0\n", "entry 1 is '0', expected at least 1 token"),
    ],
)
def test_a_file_that_is_no_list_of_lengths_is_refused(tmp_path: Path, text: str | None, expected: str):
    file = tmp_path / "tokens.txt"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=expected):
        Lengths(LengthConfig(kind="empirical", file=str(file)), 1000, seed=0)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"kind": "empirical"}, "kind='empirical' needs file"),
        ({"file": "x"}, "kind='lognormal' takes no file"),
        ({"sampled_tokens": 0.5}, "sampled_tokens=0.5: must be at least 1"),
        ({"sigma": 9.0}, "sigma=9.0: must be in"),
        ({"turns": 0.0}, "turns=0.0: must be in"),
        ({"env_s": -1.0}, "env_s=-1.0: must not be negative"),
        ({"env_cv": 11.0}, "env_cv=11.0: must be in"),
    ],
)
def test_impossible_lengths_are_refused(change: dict, expected: str):
    with pytest.raises(ConfigError, match=expected):
        LengthConfig(**change)


def test_a_prompt_that_fills_the_context_is_refused():
    with pytest.raises(ConfigError, match="prompt_tokens=20: leaves no room in a context of 20 tokens"):
        Lengths(FIXED, 20, seed=0)


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="no metrics of a run there"):
        Lengths(LengthConfig(kind="run", file=str(tmp_path)), 1000, seed=0)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(ConfigError, match="holds no train/agg/all/num_output_tokens"):
        Lengths(LengthConfig(kind="run", file=str(tmp_path)), 1000, seed=0)


@given(
    sampled=st.floats(1, 3000),
    sigma=st.floats(0, 2),
    prompt=st.integers(1, 500),
    reply=st.floats(0, 2000),
    turns=st.floats(1, 30),
    room=st.integers(1, 5000),
    seed=st.integers(0, 99),
)
def test_every_rollout_fits_the_context_and_answers(
    sampled: float, sigma: float, prompt: int, reply: float, turns: float, room: int, seed: int
):
    config = LengthConfig(
        sampled_tokens=sampled, sigma=sigma, prompt_tokens=prompt, reply_tokens=reply, turns=turns, env_s=1.0
    )
    group = Lengths(config, prompt + room, seed).group(3)
    assert group == Lengths(config, prompt + room, seed).group(3)
    for rollout in group:
        assert rollout[0].new_tokens == prompt
        assert all(turn.sampled_tokens >= 1 and turn.env_s >= 0 for turn in rollout)
        assert sum(turn.new_tokens + turn.sampled_tokens for turn in rollout) <= prompt + room
