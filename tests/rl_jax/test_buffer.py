"""orchestrator/buffer.py against a brute-force reading of the staleness bound."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rl_jax.orchestrator.buffer import Buffer, Group
from rl_jax.types import FinishReason, Rollout


def make_group(group_id, *versions):
    """A group whose i-th member has tokens by versions[i]."""
    rollouts = tuple(
        Rollout(
            rollout_id=group_id * 10 + member,
            group_id=group_id,
            member=member,
            env="a",
            task_id=group_id,
            tokens_T=np.arange(1 + len(made), dtype=np.int32),
            sampled_T=np.array([False] + [True] * len(made)),
            logprobs_T=np.zeros(1 + len(made), np.float32),
            versions_T=np.array([-1, *made], np.int32),
            temperature=1.0,
            finish=FinishReason.STOP,
            reward=0.5,
        )
        for member, made in enumerate(versions)
    )
    return Group(rollouts=rollouts, landed_version=max(max(made) for made in versions))


def ids(groups):
    return None if groups is None else [group.group_id for group in groups]


def filled(*groups, groups_per_batch=2, max_staleness=1):
    buffer = Buffer(groups_per_batch=groups_per_batch, max_staleness=max_staleness)
    for group in groups:
        buffer.add(group)
    return buffer


def test_age_of_a_group_is_its_oldest_token():
    assert make_group(1, [4, 5], [3, 5, 5]).oldest_version == 3


def test_oldest_first_by_version_then_by_id_and_handed_out_by_id():
    buffer = filled(make_group(2, [5]), make_group(9, [4]), make_group(7, [5]), make_group(8, [5]))
    assert ids(buffer.cut(5, [])) == [2, 9]
    assert ids(buffer.cut(5, [])) == [7, 8]
    assert buffer.cut(5, []) is None
    assert len(buffer) == 0


def test_too_old_for_the_batch_is_dropped():
    buffer = filled(make_group(1, [4, 6]), make_group(2, [5]), make_group(3, [6]))
    assert ids(buffer.drop_stale(6)) == [1]
    assert ids(buffer.groups) == [2, 3]
    assert ids(buffer.drop_stale(7)) == [2]


def test_batch_waits_for_a_slow_group_only_at_its_last_chance():
    ready = make_group(5, [0]), make_group(6, [0])
    assert ids(filled(*ready).cut(0, [0, 0])) == [5, 6]  # two in flight can still be in batch 1
    assert filled(*ready).cut(0, [0, 0, 0]) is None  # three cannot
    assert filled(*ready).cut(1, [0]) is None  # its last batch
    assert ids(filled(*ready).cut(1, [1, 1])) == [5, 6]


@given(
    ready=st.lists(st.integers(0, 4), max_size=10),
    in_flight=st.lists(st.integers(0, 4), max_size=6),
    groups_per_batch=st.integers(1, 3),
    max_staleness=st.integers(0, 3),
)
def test_cut_leaves_behind_only_what_later_batches_can_take(ready, in_flight, groups_per_batch, max_staleness):
    version = 4
    fresh = [v for v in ready if v >= version - max_staleness]
    flying = [v for v in in_flight if v >= version - max_staleness]
    buffer = filled(
        *(make_group(i, [v]) for i, v in enumerate(fresh)),
        groups_per_batch=groups_per_batch,
        max_staleness=max_staleness,
    )
    batch = buffer.cut(version, flying)
    taken = sorted(fresh)[:groups_per_batch]
    left = sorted(sorted(fresh)[groups_per_batch:] + flying)
    # Train what is left in order of age, groups_per_batch at each version: who is too late, and still in flight?
    late = [v for i, v in enumerate(left) if version + 1 + i // groups_per_batch > v + max_staleness]
    must_wait = any(v <= oldest for v in flying for oldest in late)
    assert (batch is None) == (len(taken) < groups_per_batch or must_wait)
    if batch is not None:
        assert sorted(group.oldest_version for group in batch) == taken
        assert len(buffer) == len(fresh) - groups_per_batch
