"""rl_jax/rollout/routing.py: groups stay together, load is even, and few keys move when a replica leaves."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from rl_jax.rollout.routing import IMBALANCE, Router, ranked

NAMES = {f"replica{i}": 0 for i in range(5)}
KEYS = [f"train.{i}" for i in range(2000)]


def test_only_the_keys_of_a_lost_replica_move():
    before = {key: ranked(key, NAMES)[0] for key in KEYS}
    left = {name: 0 for name in NAMES if name != "replica3"}
    after = {key: ranked(key, left)[0] for key in KEYS}
    assert {key for key in KEYS if before[key] != after[key]} == {key for key in KEYS if before[key] == "replica3"}
    counts = Counter(before.values())
    # Each count is binomial(2000, 1/5): standard deviation 18; five of them.
    assert all(abs(counts[name] - 400) < 5 * 18 for name in NAMES)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=40))
def test_members_stay_together_and_groups_pass_over_the_crowded(sizes: list[int]):
    router, loads = Router(), dict.fromkeys(NAMES, 0)
    for group, size in enumerate(sizes):
        mean = (sum(loads.values()) + 1) / len(loads)
        first = router.choose(f"g{group}", loads)
        assert loads[first] < IMBALANCE * mean + 1
        for _ in range(size):
            assert router.choose(f"g{group}", loads) == first
            loads[first] += 1


def test_a_group_whose_replica_is_lost_goes_on_elsewhere():
    router = Router()
    first = router.choose("g", dict(NAMES))
    left = {name: 0 for name in NAMES if name != first}
    second = router.choose("g", left)
    assert second in left
    assert router.choose("g", dict(NAMES)) == second  # its prompt is there


def test_what_has_no_key_goes_to_the_idle_one():
    assert Router().choose("", {"a": 3, "b": 1, "c": 2}) == "b"
