"""Packing: what goes in comes out once, every target is the next token of its own sequence."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_jax.config import ConfigError
from rl_jax.packing import PackingConfig, fill_frac, pack, pack_documents, pack_routes
from rl_jax.types import Batch, FinishReason, Rollout

SEQ_LEN, ROWS = 13, 3
CONFIG = PackingConfig(rows=ROWS, seq_len=SEQ_LEN)


def make_rollout(seed: int, length: int, temperature: float = 0.7, routes: str = "") -> Rollout:
    """A rollout of random tokens, about half of them sampled, with garbage where nothing was sampled."""
    rng = np.random.default_rng(seed)
    sampled_T = rng.random(length) < 0.5
    sampled_T[0] = False
    num_routed = {"": 0, "all": length, "input": length - 1, "short": length - 2}[routes]
    return Rollout(
        rollout_id=1000 + seed,
        group_id=seed // 2,
        member=seed % 2,
        env="e",
        task_id=0,
        tokens_T=rng.integers(1, 1000, length, dtype=np.int32),
        sampled_T=sampled_T,
        logprobs_T=np.where(sampled_T, -rng.exponential(1, length), np.nan).astype(np.float32),
        versions_T=np.where(sampled_T, 3, -1).astype(np.int32),
        temperature=temperature,
        finish=FinishReason.STOP,
        reward=1.0,
        routed_experts_TLA=rng.integers(0, 9, (num_routed, 2, 5), dtype=np.uint16) if routes else None,
    )


def unpack(batches: list[Batch]) -> dict[int, dict[str, np.ndarray]]:
    """Collect the slots of each sequence by its index, in order; a sequence must be one run in one row."""
    found: dict[int, dict[str, np.ndarray]] = {}
    for batch in batches:
        for b in range(batch.tokens_BT.shape[0]):
            for index in np.unique(batch.rollouts_BT[b][batch.rollouts_BT[b] >= 0]):
                slots_S = np.flatnonzero(batch.rollouts_BT[b] == index)
                assert index not in found
                assert (np.diff(slots_S) == 1).all()
                found[int(index)] = {f.name: getattr(batch, f.name)[b, slots_S] for f in dataclasses.fields(batch)}
    return found


lengths = st.lists(st.integers(1, SEQ_LEN), max_size=24)


@given(lengths=lengths)
def test_unpacking_gives_back_every_rollout(lengths):
    rollouts = [make_rollout(i, length, 0.5 + 0.1 * (i % 3)) for i, length in enumerate(lengths)]
    advantages = [0.25 * i - 1 for i in range(len(rollouts))]
    batches = pack(rollouts, advantages, CONFIG)
    found = unpack(batches)
    assert sorted(found) == list(range(len(rollouts)))
    for i, rollout in enumerate(rollouts):
        got, length, sampled_T = found[i], len(rollout.tokens_T), rollout.sampled_T[1:]
        np.testing.assert_array_equal(got["tokens_BT"], rollout.tokens_T)
        np.testing.assert_array_equal(got["positions_BT"], np.arange(length))
        assert len(set(got["segments_BT"])) == 1
        assert got["segments_BT"][0] > 0
        np.testing.assert_array_equal(got["targets_BT"], [*rollout.tokens_T[1:], 0])
        np.testing.assert_array_equal(got["mask_BT"], [*sampled_T, False])
        np.testing.assert_array_equal(got["logprobs_BT"], [*np.where(sampled_T, rollout.logprobs_T[1:], 0), 0])
        np.testing.assert_array_equal(got["advantages_BT"], [*np.where(sampled_T, advantages[i], 0), 0])
        expected_T = np.array([*np.where(sampled_T, rollout.temperature, 1), 1], np.float32)
        np.testing.assert_array_equal(got["temperatures_BT"], expected_T)
    assert sum(batch.num_trained_tokens for batch in batches) == sum(rollout.num_sampled for rollout in rollouts)


@given(lengths=lengths)
def test_shapes_dtypes_and_padding(lengths):
    batches = pack([make_rollout(i, length) for i, length in enumerate(lengths)], [1.0] * len(lengths), CONFIG)
    dtypes = {"mask_BT": np.bool_} | dict.fromkeys(("logprobs_BT", "advantages_BT", "temperatures_BT"), np.float32)
    for batch in batches:
        padding_BT = batch.segments_BT == 0
        for field in dataclasses.fields(batch):
            array = getattr(batch, field.name)
            assert array.shape == (ROWS, SEQ_LEN)
            assert array.dtype == dtypes.get(field.name, np.int32)
            pad = {"rollouts_BT": -1, "temperatures_BT": 1}.get(field.name, 0)
            assert (array[padding_BT] == pad).all(), field.name
        # Numbers of segments rise from 1, and a target never looks into the next one.
        for segments_T, targets_T, tokens_T in zip(batch.segments_BT, batch.targets_BT, batch.tokens_BT, strict=True):
            used_T = segments_T[segments_T > 0]
            np.testing.assert_array_equal(np.unique(used_T), np.arange(1, used_T.max(initial=0) + 1))
            is_last_T = np.append(segments_T[1:] != segments_T[:-1], True)
            np.testing.assert_array_equal(targets_T, np.where(is_last_T, 0, np.roll(tokens_T, -1)))
    num_slots = len(batches) * ROWS * SEQ_LEN
    assert fill_frac(batches) == (sum(lengths) / num_slots if lengths else 0)


@given(lengths=lengths)
def test_first_fit_leaves_no_two_rows_that_would_fit_in_one(lengths):
    """So rows * seq_len < 2 * tokens + seq_len, and only the last micro-batch may have empty rows."""
    batches = pack([make_rollout(i, length) for i, length in enumerate(lengths)], [1.0] * len(lengths), CONFIG)
    used_R = np.array([(batch.segments_BT > 0).sum(1) for batch in batches], np.int64).reshape(-1)
    full_R = used_R[used_R > 0]
    assert (used_R[: len(full_R)] > 0).all()
    assert len(batches) == -(-len(full_R) // ROWS)
    assert all(a + b > SEQ_LEN for i, a in enumerate(full_R) for b in full_R[:i])


def test_first_fit_decreasing_fills_rows_exactly():
    """Lengths 3 4 5 6 7 1 in rows of 13: 7+6, 5+4+3+1."""
    rollouts = [make_rollout(i, length) for i, length in enumerate([3, 4, 5, 6, 7, 1])]
    (batch,) = pack(rollouts, [0.0] * 6, CONFIG)
    assert [sorted(set(row_T[row_T >= 0].tolist())) for row_T in batch.rollouts_BT] == [[3, 4], [0, 1, 2, 5], []]
    assert fill_frac([batch]) == 26 / 39


def test_worked_example_of_the_record():
    documents = [(np.array([5, 6, 7]), np.array([False, False, True])), (np.array([8, 9]), np.array([True, True]))]
    (batch,) = pack_documents(documents, PackingConfig(rows=1, seq_len=6))
    assert batch.tokens_BT.tolist() == [[5, 6, 7, 8, 9, 0]]
    assert batch.targets_BT.tolist() == [[6, 7, 0, 9, 0, 0]]
    assert batch.positions_BT.tolist() == [[0, 1, 2, 0, 1, 0]]
    assert batch.segments_BT.tolist() == [[1, 1, 1, 2, 2, 0]]
    assert batch.mask_BT.tolist() == [[False, True, False, True, False, False]]
    assert batch.temperatures_BT.tolist() == [[1.0] * 6]
    assert not batch.logprobs_BT.any()
    assert not batch.advantages_BT.any()


@given(lengths=lengths)
def test_documents_and_rollouts_share_the_packer(lengths):
    rollouts = [make_rollout(i, length) for i, length in enumerate(lengths)]
    of_documents = pack_documents([(r.tokens_T, r.sampled_T) for r in rollouts], CONFIG)
    for batch, document_batch in zip(pack(rollouts, [2.0] * len(rollouts), CONFIG), of_documents, strict=True):
        for name in ("tokens_BT", "targets_BT", "positions_BT", "segments_BT", "mask_BT", "rollouts_BT"):
            np.testing.assert_array_equal(getattr(batch, name), getattr(document_batch, name))


@given(lengths=lengths)
def test_packing_is_deterministic(lengths):
    rollouts = [make_rollout(i, length) for i, length in enumerate(lengths)]
    first, second = (pack(rollouts, np.arange(len(rollouts)), CONFIG) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        for field in dataclasses.fields(a):
            np.testing.assert_array_equal(getattr(a, field.name), getattr(b, field.name))


def test_greedy_rollouts_are_scored_at_temperature_one():
    (batch,) = pack([make_rollout(1, 7, temperature=0.0)], [1.0], CONFIG)
    assert (batch.temperatures_BT == 1).all()


@given(
    members=st.lists(st.tuples(st.integers(2, SEQ_LEN), st.sampled_from(["", "all", "input"])), min_size=1, max_size=15)
)
def test_routes_follow_their_tokens(members):
    rollouts = [make_rollout(0, 4, routes="input")]
    rollouts += [make_rollout(i, length, routes=routes) for i, (length, routes) in enumerate(members, start=1)]
    batches = pack(rollouts, [1.0] * len(rollouts), CONFIG)
    routes = pack_routes(batches, rollouts)
    placed = 0
    for batch, routes_BTLA in zip(batches, routes, strict=True):
        assert routes_BTLA.shape == (ROWS, SEQ_LEN, 2, 5)
        assert routes_BTLA.dtype == np.int32
        for b, t in np.ndindex(ROWS, SEQ_LEN):
            index, position = batch.rollouts_BT[b, t], batch.positions_BT[b, t]
            routes_TLA = rollouts[index].routed_experts_TLA if index >= 0 else None
            if routes_TLA is None or position >= len(routes_TLA):
                assert (routes_BTLA[b, t] == -1).all()
            else:
                np.testing.assert_array_equal(routes_BTLA[b, t], routes_TLA[position])
                placed += 1
    assert placed == sum(len(r.routed_experts_TLA) for r in rollouts if r.routed_experts_TLA is not None)


def test_partial_or_absent_routes_are_refused():
    partial = [make_rollout(1, 7, routes="short")]
    with pytest.raises(ValueError, match="rollout 1001: routed experts for 5 tokens of 7"):
        pack_routes(pack(partial, [1.0], CONFIG), partial)
    absent = [make_rollout(1, 7)]
    with pytest.raises(ValueError, match=r"in \[\]: expected exactly one shape"):
        pack_routes(pack(absent, [1.0], CONFIG), absent)


def replaced(**changes: object) -> Rollout:
    return dataclasses.replace(make_rollout(4, 7), **changes)


@pytest.mark.parametrize(
    ("rollout", "advantage", "message"),
    [
        (make_rollout(4, SEQ_LEN + 1), 1.0, "rollout 1004 has 14 tokens: expected 1 to seq_len=13"),
        (replaced(sampled_T=np.ones(6, np.bool_)), 1.0, "rollout 1004: .* lengths 7, 6 and 7"),
        (replaced(sampled_T=np.ones(7, np.bool_)), 1.0, r"rollout 1004: sampled_T\[0\] is True"),
        (replaced(logprobs_T=np.full(7, -np.inf, np.float32)), 1.0, "rollout 1004: .* must be finite"),
        (make_rollout(4, 7), float("nan"), "rollout 1004: advantage nan .* must be finite"),
    ],
)
def test_bad_rollouts_are_refused_by_name(rollout, advantage, message):
    with pytest.raises(ValueError, match=message):
        pack([make_rollout(1, 5), rollout], [1.0, advantage], CONFIG)


def test_bad_documents_and_counts_are_refused():
    with pytest.raises(ValueError, match="document 0: 3 tokens but 2 marks"):
        pack_documents([(np.arange(3), np.ones(2, np.bool_))], CONFIG)
    with pytest.raises(ValueError, match="document 1 has 0 tokens"):
        pack_documents([(np.arange(n), np.ones(n, np.bool_)) for n in (3, 0)], CONFIG)
    with pytest.raises(ValueError, match="1 rollouts but 2 advantages"):
        pack([make_rollout(1, 5)], [1.0, 2.0], CONFIG)


def test_bad_config_is_refused():
    with pytest.raises(ConfigError) as error:
        PackingConfig(rows=0, seq_len=1)
    assert [fault.split(":")[0] for fault in error.value.faults] == ["rows=0", "seq_len=1"]
