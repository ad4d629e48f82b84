"""orchestrator/curriculum.py: shares, epochs, state, and the end of patience."""

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_jax.orchestrator.curriculum import Curriculum

ENVS = {"a": 2.0, "b": 1.0, "c": 0.5}
SIZES = {"a": 7, "b": None, "c": 3}


def draws(curriculum, n):
    return [curriculum.next() for _ in range(n)]


def test_smooth_round_robin_of_the_docstring():
    curriculum = Curriculum({"a": 2.0, "b": 1.0}, {"a": None, "b": None}, 0)
    assert [env for env, _ in draws(curriculum, 6)] == list("abaaba")


@given(
    weights=st.lists(st.floats(0.1, 10), min_size=1, max_size=5),
    n=st.integers(1, 300),
)
def test_every_environment_has_its_share_to_within_its_number_of_rivals(weights, n):
    named = {f"e{i}": weight for i, weight in enumerate(weights)}
    counts = Counter(env for env, _ in draws(Curriculum(named, dict.fromkeys(named), 0), n))
    for env, weight in named.items():
        assert abs(counts[env] - n * weight / sum(weights)) <= max(1, len(weights) - 1) + 1e-6


def test_epochs_are_different_permutations_and_endless_counts_up():
    by_env = {env: [] for env in ENVS}
    for env, task in draws(Curriculum(ENVS, SIZES, 0), 7 * 7):
        by_env[env].append(task)
    assert by_env["b"] == list(range(14))
    epochs = [by_env["a"][i : i + 7] for i in range(0, 28, 7)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert draws(Curriculum(ENVS, SIZES, 0), 20) == draws(Curriculum(ENVS, SIZES, 0), 20)
    assert draws(Curriculum(ENVS, SIZES, 0), 20) != draws(Curriculum(ENVS, SIZES, 1), 20)


@given(before=st.integers(0, 40))
def test_restored_goes_on_where_it_was(before):
    curriculum = Curriculum(ENVS, SIZES, 3)
    draws(curriculum, before)
    state = json.loads(json.dumps(curriculum.state()))
    resumed = Curriculum(ENVS, SIZES, 3)
    resumed.restore(state)
    assert draws(resumed, 25) == draws(curriculum, 25)
    assert resumed.progress() == curriculum.progress()


def test_patience_ends_after_tasks_in_a_row():
    curriculum = Curriculum(ENVS, SIZES, 3, max_fruitless=3)
    for _ in range(5):
        curriculum.count_fruitless("a", "too long")
        curriculum.count_fruitless("a", "too long")
        curriculum.count_fruitful("a")
    curriculum.count_fruitless("b", "boom")
    curriculum.count_fruitless("b", "boom")
    with pytest.raises(ValueError, match=r"environment b: 3 tasks in a row gave no usable rollout; the last: boom"):
        curriculum.count_fruitless("b", "boom")


def test_empty_environment_is_refused():
    with pytest.raises(ValueError, match="environment b has size 0"):
        Curriculum({"a": 1, "b": 1}, {"a": None, "b": 0}, 0)
