"""Sampling against a float64 NumPy reference, key by key and in distribution."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_jax.engine.sampling import Filters, _draw, keep_mask, sample, uses_filters
from rl_jax.sampler import SamplingParams

V = 23


def logits(rows: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(rows, V)).astype(np.float32) * 2


def filters(top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0, rows: int = 1) -> Filters:
    return Filters(
        top_p_B=jnp.full(rows, top_p, jnp.float32),
        top_k_B=jnp.full(rows, top_k, jnp.int32),
        min_p_B=jnp.full(rows, min_p, jnp.float32),
    )


def reference(logits_V: np.ndarray, temperature: float, top_p: float, top_k: int, min_p: float) -> np.ndarray:
    """float64 [V] probabilities, by sorting and walking down."""
    scaled_V = logits_V.astype(np.float64) / temperature
    probs_V = np.exp(scaled_V - scaled_V.max())
    probs_V /= probs_V.sum()
    order = [int(v) for v in np.argsort(-probs_V)]
    order = [v for v in order if probs_V[v] >= min_p * probs_V[order[0]]]
    order = order[: top_k or V]
    total, kept, reached = probs_V[order].sum(), [], 0.0
    for v in order:
        kept.append(v)
        reached += probs_V[v] / total
        if reached >= top_p:
            break
    result_V = np.zeros(V)
    result_V[kept] = probs_V[kept] / probs_V[kept].sum()
    return result_V


CASES = [(1.0, 0, 0.0), (0.8, 0, 0.0), (1.0, 3, 0.0), (1.0, 0, 0.1), (0.7, 9, 0.02), (0.01, 0, 0.0), (1.0, 1, 0.0)]


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
@pytest.mark.parametrize(("top_p", "top_k", "min_p"), CASES)
def test_logprobs_are_those_of_the_renormalised_distribution(temperature, top_p, top_k, min_p):
    logits_BV = logits(31)
    seeds_B2 = np.stack([np.zeros(31), np.arange(31)], axis=1).astype(np.uint32)
    tokens_B, logprobs_B = sample(
        logits_BV,
        seeds_B2,
        jnp.zeros(31, jnp.int32),
        jnp.full(31, temperature, jnp.float32),
        filters(top_p, top_k, min_p, rows=31),
    )
    expected_BV = np.stack([reference(row, temperature, top_p, top_k, min_p) for row in logits_BV])
    chosen_B = np.take_along_axis(expected_BV, np.asarray(tokens_B)[:, None], 1)[:, 0]
    assert (chosen_B > 0).all()
    # float32 logits of size 6 have an ulp of 5e-7; scaling, exponential and sum of 23 terms round a few times each.
    np.testing.assert_allclose(logprobs_B, np.log(chosen_B), atol=3e-6)


@pytest.mark.parametrize(("top_p", "top_k", "min_p"), CASES)
def test_kept_tokens_are_those_of_the_reference(top_p, top_k, min_p):
    logits_BV = logits(17, seed=5)
    kept_BV = keep_mask(logits_BV, filters(top_p, top_k, min_p, rows=17))
    expected_BV = np.stack([reference(row, 1.0, top_p, top_k, min_p) > 0 for row in logits_BV])
    np.testing.assert_array_equal(kept_BV, expected_BV)


def test_tied_tokens_stay_together():
    tied_BV = jnp.asarray([[0.0, 3.0, 1.0, 1.0, -2.0]], jnp.float32)
    np.testing.assert_array_equal(keep_mask(tied_BV, filters(top_k=2)), [[False, True, True, True, False]])


@pytest.mark.parametrize(("top_p", "top_k", "min_p"), [CASES[0], CASES[4]])
def test_frequencies_are_those_of_the_distribution(top_p, top_k, min_p):
    rows, logits_V = 20_000, logits(1, seed=2)[0]
    seeds_B2 = np.stack([np.arange(rows) % 3, np.arange(rows)], axis=1).astype(np.uint32)
    tokens_B, _ = sample(
        jnp.broadcast_to(logits_V, (rows, V)),
        seeds_B2,
        jnp.arange(rows, dtype=jnp.int32) % 5,
        jnp.full(rows, 0.9, jnp.float32),
        filters(top_p, top_k, min_p, rows=rows),
    )
    expected_V = reference(logits_V, 0.9, top_p, top_k, min_p) * rows
    counts_V = np.bincount(np.asarray(tokens_B), minlength=V)
    assert counts_V[expected_V == 0].sum() == 0
    used_V = expected_V > 0
    chi_square = ((counts_V - expected_V)[used_V] ** 2 / expected_V[used_V]).sum()
    degrees = used_V.sum() - 1
    assert chi_square < degrees + 4 * np.sqrt(2 * degrees)  # four standard deviations of chi-square


def test_the_key_is_made_of_seed_and_position_only():
    logits_BV, seeds = logits(6), np.array([0, 1, 5, 2**32 - 1, 2**32, 2**63 + 3], np.uint64)
    seeds_B2 = np.stack([seeds >> np.uint64(32), seeds & np.uint64(0xFFFFFFFF)], axis=1).astype(np.uint32)
    index_B = np.array([0, 3, 3, 7, 1, 0], np.int32)
    ones_B = jnp.ones(6, jnp.float32)
    tokens_B, _ = sample(logits_BV, seeds_B2, index_B, ones_B, None)
    for b in range(4):  # seeds below 2**32 are those of jax.random.key
        key = jax.random.fold_in(jax.random.key(np.uint32(seeds[b])), index_B[b])
        ends_V = reference(logits_BV[b], 1.0, 1.0, 0, 0.0).cumsum()
        assert np.searchsorted(ends_V, float(jax.random.uniform(key)), side="right") == tokens_B[b]
    alone = [sample(logits_BV[b:][:1], seeds_B2[b:][:1], index_B[b:][:1], ones_B[:1], None)[0][0] for b in range(6)]
    np.testing.assert_array_equal(tokens_B, alone)
    assert len({bytes(np.asarray(jax.random.key_data(k))) for k in map(_key, seeds_B2)}) == 6


def _key(words_2: np.ndarray) -> jax.Array:
    return jax.random.wrap_key_data(words_2, impl="threefry2x32")


def test_every_part_of_a_large_vocabulary_is_drawn_and_what_is_dropped_never_is():
    rows, size = 4096, 1000
    logits_V = np.where(np.arange(size) % 250 == 131, 0.0, -np.inf).astype(np.float32)
    words_B2 = np.stack([np.zeros(rows), np.arange(rows)], axis=1).astype(np.uint32)
    ones_B, zeros_B = jnp.ones(rows, jnp.float32), jnp.zeros(rows, jnp.int32)
    tokens_B, logprobs_B = sample(jnp.broadcast_to(logits_V, (rows, size)), words_B2, zeros_B, ones_B, None)
    ids, counts = np.unique(tokens_B, return_counts=True)
    assert ids.tolist() == [131, 381, 631, 881]
    assert np.abs(counts - rows / 4).max() < 4 * np.sqrt(rows * 3 / 16)
    np.testing.assert_allclose(logprobs_B, np.log(1 / 4), atol=1e-6)


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-24, 1.0])
def test_the_ends_of_the_unit_interval_draw_tokens_that_have_weight(uniform):
    weights_BV = jnp.asarray([[0, 0, 1e-9, 3, 1e-7, 0] + [0] * 300, [0, 7] + [0] * 304], jnp.float32)
    tokens_B, total_B = _draw(weights_BV, jnp.full(2, uniform, jnp.float32))
    assert (np.take_along_axis(np.asarray(weights_BV), np.asarray(tokens_B)[:, None], 1) > 0).all()
    np.testing.assert_allclose(total_B, [3, 7], rtol=1e-6)


def test_greedy_takes_the_likeliest_at_temperature_one():
    logits_BV = logits(9, seed=3)
    zeros_B = jnp.zeros(9, jnp.float32)
    tokens_B, logprobs_B = sample(logits_BV, np.ones((9, 2), np.uint32), jnp.zeros(9, jnp.int32), zeros_B, None)
    np.testing.assert_array_equal(tokens_B, logits_BV.argmax(1))
    expected_B = [np.log(reference(row, 1.0, 1.0, 0, 0.0).max()) for row in logits_BV]
    np.testing.assert_allclose(logprobs_B, expected_B, atol=3e-6)
    assert not uses_filters(SamplingParams(max_tokens=1, temperature=0.0, top_k=4))
    assert uses_filters(SamplingParams(max_tokens=1, min_p=0.1))
