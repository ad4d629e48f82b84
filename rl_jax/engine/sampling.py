"""One token from logits: temperature, top-k, top-p, min-p, a key for each request; log-probabilities are float32.

A request's token depends on its logits, its settings, its seed and its position, never on its neighbours in the batch.
"""

import math

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int, UInt

from rl_jax.sampler import SamplingParams

_BLOCK = 128
"""Tokens whose probabilities are summed before one of the sums is chosen."""


@struct.dataclass
class Filters:
    """Which tokens may be sampled; see keep_mask."""

    top_p_B: jax.Array
    """float32 in (0, 1], 1 = off."""
    top_k_B: jax.Array
    """int32, 0 = off."""
    min_p_B: jax.Array
    """float32 in [0, 1], 0 = off."""


def sample(
    logits_BV: Float[Array, "B V"],
    seeds_B2: UInt[Array, "B 2"],
    index_B: Int[Array, " B"],
    temperature_B: Float[Array, " B"],
    filters: Filters | None,
) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
    """Return the token of each row and its log-probability in the distribution that it was drawn from.

    Args:
        seeds_B2: high and low word of the seed.
        index_B: position in the completion: the token is drawn with one number of the key fold_in(key(seed), index).
        temperature_B: 0 = the most likely token; its log-probability is that of temperature 1.
        filters: None = every token may be sampled.
    """
    is_greedy_B = temperature_B == 0
    logits_BV = logits_BV / jnp.where(is_greedy_B, 1.0, temperature_B)[:, None]
    if filters is not None:
        logits_BV = jnp.where(keep_mask(logits_BV, filters), logits_BV, -jnp.inf)
    peak_B = jnp.max(logits_BV, axis=1)
    weights_BV = jnp.exp(logits_BV - peak_B[:, None])
    keys_B = jax.vmap(jax.random.fold_in)(jax.random.wrap_key_data(seeds_B2, impl="threefry2x32"), index_B)
    uniform_B = jax.vmap(lambda key: jax.random.uniform(key, (), jnp.float32))(keys_B)
    drawn_B, total_B = _draw(weights_BV, uniform_B)
    # Two plain reductions: XLA's argmax is ten times slower than they are on CPU.
    ids_V = jnp.arange(logits_BV.shape[1], dtype=jnp.int32)[None, :]
    likeliest_B = jnp.min(jnp.where(logits_BV == peak_B[:, None], ids_V, logits_BV.shape[1] - 1), axis=1)
    tokens_B = jnp.where(is_greedy_B, likeliest_B, drawn_B)
    chosen_B = jnp.take_along_axis(logits_BV, tokens_B[:, None], axis=1)[:, 0]
    return tokens_B, chosen_B - peak_B - jnp.log(total_B)


def _draw(
    weights_BV: Float[Array, "B V"], uniform_B: Float[Array, " B"]
) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
    """Return a token drawn by inverting the cumulative sum of its row, and the sum of the row.

    One random number a row instead of one a token, and two levels, so that no sum runs over the whole vocabulary.
    """
    width = _BLOCK
    blocks_BCW = jnp.pad(weights_BV, ((0, 0), (0, -weights_BV.shape[1] % width))).reshape(len(weights_BV), -1, width)
    ends_BC = jnp.cumsum(jnp.sum(blocks_BCW, axis=2), axis=1)
    total_B = ends_BC[:, -1]
    block_B, before_B = _invert(ends_BC, uniform_B * total_B)
    ends_BW = jnp.cumsum(jnp.take_along_axis(blocks_BCW, block_B[:, None, None], axis=1)[:, 0], axis=1)
    inside_B, _ = _invert(ends_BW, uniform_B * total_B - before_B)
    return block_B * width + inside_B, total_B


def _invert(ends_BC: jax.Array, target_B: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the first index whose cumulative sum is above the target, and the sum before it.

    Rounding may put the target at or above the whole sum: then it is the last index that adds anything.
    """
    is_before_BC = (ends_BC <= target_B[:, None]) & (ends_BC < ends_BC[:, -1:])
    index_B = jnp.sum(is_before_BC, axis=1, dtype=jnp.int32)
    return index_B, jnp.max(jnp.where(is_before_BC, ends_BC, 0.0), axis=1)


def keep_mask(logits_BV: Float[Array, "B V"], filters: Filters) -> Bool[Array, "B V"]:
    """Return which tokens may be sampled from softmax(logits).

    min-p drops what is less likely than min_p times the likeliest; top-k keeps the k likeliest of the rest; top-p keeps
    the smallest set of these whose renormalised probabilities reach top_p. Tokens tied with the last one kept stay.
    """
    sorted_BV = -jnp.sort(-logits_BV, axis=-1)
    probs_BV = jax.nn.softmax(sorted_BV, axis=-1)
    rank_V = jnp.arange(logits_BV.shape[1], dtype=jnp.int32)[None, :]
    is_kept_BV = probs_BV >= filters.min_p_B[:, None] * probs_BV[:, :1]
    is_kept_BV &= (filters.top_k_B[:, None] == 0) | (rank_V < filters.top_k_B[:, None])
    probs_BV = jnp.where(is_kept_BV, probs_BV, 0.0)
    before_BV = jnp.cumsum(probs_BV, axis=-1) - probs_BV
    is_reached_BV = before_BV >= filters.top_p_B[:, None] * jnp.sum(probs_BV, axis=-1, keepdims=True)
    is_kept_BV &= ~is_reached_BV | (filters.top_p_B[:, None] >= 1)
    last_B = jnp.sum(is_kept_BV, axis=-1, dtype=jnp.int32) - 1
    return logits_BV >= jnp.take_along_axis(sorted_BV, last_B[:, None], axis=1)


def uses_filters(params: SamplingParams) -> bool:
    """Return whether some token may not be sampled; greedy sampling ignores the filters."""
    return params.temperature > 0 and (params.top_p < 1 or params.top_k > 0 or params.min_p > 0)


def check_params(params: SamplingParams) -> None:
    """Raise ValueError, naming every setting that is out of range."""
    temperature, is_finite = params.temperature, math.isfinite(params.temperature)
    faults = [
        None if params.max_tokens >= 1 else f"max_tokens={params.max_tokens}: expected at least 1",
        None if is_finite and temperature >= 0 else f"temperature={temperature}: expected a finite number >= 0",
        None if 0 < params.top_p <= 1 else f"top_p={params.top_p}: expected a number in (0, 1]",
        None if params.top_k >= 0 else f"top_k={params.top_k}: expected 0 (off) or more",
        None if 0 <= params.min_p <= 1 else f"min_p={params.min_p}: expected a number in [0, 1]",
        None if 0 <= params.seed < 2**64 else f"seed={params.seed}: expected 0 .. 2**64 - 1",
        "stop=('',): expected text" if "" in params.stop else None,
    ]
    found = [fault for fault in faults if fault]
    if found:
        raise ValueError("sampling parameters: " + "; ".join(found))
