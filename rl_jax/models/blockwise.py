"""Attention block by block in plain JAX: memory linear in the tokens, on any platform.

Sees the tokens of one device, inside a shard_map over the whole mesh. What a query may see follows from the places of queries and keys, so nothing here knows
in which order tokens come.
"""

import typing
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from rl_jax.axes import MESH_AXES

LOWEST = -1e30
"""Score of a masked pair, and logarithm of an empty sum; finite, so that a difference of two is a number."""


class Places(typing.NamedTuple):
    """Where tokens are in their packed rows: all that a mask needs. [B, T] or, of one row, [T]."""

    segments_BT: jax.Array
    """int32, 0 = padding"""
    positions_BT: jax.Array
    """int32, from 0 in each segment"""


def packed_mask(queries: Places, keys: Places, window: int = 0) -> Bool[Array, "*B T S"]:
    """Return what each query may see: itself and earlier tokens of its own segment, `window` tokens at most."""
    is_same_BTS = queries.segments_BT[..., :, None] == keys.segments_BT[..., None, :]
    distance_BTS = queries.positions_BT[..., :, None] - keys.positions_BT[..., None, :]
    return is_same_BTS & (distance_BTS >= 0) & (distance_BTS < (window or jnp.iinfo(jnp.int32).max))


def attend_partial(
    q_BTKQH: Float[Array, "B T K Q H"],
    k_BSKH: Float[Array, "B S K H"],
    v_BSKH: Float[Array, "B S K H"],
    queries: Places,
    keys: Places,
    window: int,
    block_tokens: int,
) -> tuple[Float[Array, "B T K Q H"], Float[Array, "B T K Q"]]:
    """Return float32 softmax attention over these keys, and the log of the sum of exponentials that it divides by.

    Both are differentiable, so parts over different keys can be merged. A query that sees none of the keys gets zeros
    and LOWEST. Memory beyond inputs and outputs: a few blocks of block_tokens * block_tokens * N float32; the backward
    pass makes each block of probabilities again. A pair of blocks where nothing is visible costs its mask only.
    Source: arXiv 2307.08691.
    """
    num_queries = q_BTKQH.shape[1]
    block_t, block_s = min(block_tokens, num_queries), min(block_tokens, k_BSKH.shape[1])
    # Tokens that fill up the last block have a segment that no other has.
    q_BITKQH, queries = _blocks(q_BTKQH, block_t), jax.tree.map(partial(_blocks, block=block_t, fill=-1), queries)
    k_BJSKH, v_BJSKH = _blocks(k_BSKH, block_s), _blocks(v_BSKH, block_s)
    keys = jax.tree.map(partial(_blocks, block=block_s, fill=-2), keys)
    rows = (q_BITKQH, k_BJSKH, v_BJSKH, queries, keys)
    out, log_sum = lax.map(lambda row: typing.cast(tuple[jax.Array, jax.Array], _row(window, *row)), rows)
    shape = (out.shape[0], -1, *out.shape[3:])
    return out.reshape(shape)[:, :num_queries], log_sum.reshape(shape[:-1])[:, :num_queries]


def _blocks(x: jax.Array, block: int, fill: int = 0) -> jax.Array:
    """Cut dimension 1 into blocks, the last one filled up."""
    padding = ((0, 0), (0, -x.shape[1] % block), *((0, 0),) * (x.ndim - 2))
    return jnp.pad(x, padding, constant_values=fill).reshape(x.shape[0], -1, block, *x.shape[2:])


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _row(
    window: int, q_ITKQH: jax.Array, k_JSKH: jax.Array, v_JSKH: jax.Array, queries: Places, keys: Places
) -> tuple[jax.Array, jax.Array]:
    """Return output and log-sums of one row, [I, T, K, Q, H] and [I, T, K, Q] float32.

    The gradient is written out: automatic differentiation would keep a block of probabilities for each pair, and lift
    the mask, which depends on no float, out of all loops as one array of [T, S].
    """

    def of_queries(block: tuple[jax.Array, Places]) -> tuple[jax.Array, jax.Array]:
        q_TKQH, places = block

        def visit(carry: tuple, block: tuple) -> tuple[tuple, None]:
            k_SKH, v_SKH, theirs = block
            mask_TS = packed_mask(places, theirs, window)
            args = (carry, q_TKQH, k_SKH, v_SKH, mask_TS)
            with jax.named_scope("attention_pair"):
                return lax.cond(jnp.any(mask_TS), _online_softmax, lambda carry, *_: carry, *args), None

        shape_KTQH = (q_TKQH.shape[1], q_TKQH.shape[0], *q_TKQH.shape[2:])
        start = (_varying(shape_KTQH), _varying(shape_KTQH[:-1], LOWEST), _varying(shape_KTQH[:-1]))
        carry, _ = lax.scan(visit, start, (k_JSKH, v_JSKH, keys))
        sum_KTQH, peak_KTQ, total_KTQ = carry
        safe_KTQ = jnp.where(total_KTQ > 0, total_KTQ, 1.0)
        log_sum_KTQ = jnp.where(total_KTQ > 0, peak_KTQ + jnp.log(safe_KTQ), LOWEST)
        return jnp.einsum("KTQH->TKQH", sum_KTQH / safe_KTQ[..., None]), jnp.einsum("KTQ->TKQ", log_sum_KTQ)

    return lax.map(of_queries, (q_ITKQH, queries))


def _online_softmax(
    carry: tuple[jax.Array, jax.Array, jax.Array],
    q_TKQH: jax.Array,
    k_SKH: jax.Array,
    v_SKH: jax.Array,
    mask_TS: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Add a block of keys to (weighted sum of values, highest score, sum of exponentials relative to it)."""
    sum_KTQH, peak_KTQ, total_KTQ = carry
    is_seen_KTQS = mask_TS[None, :, None, :]
    scores_KTQS = jnp.where(is_seen_KTQS, _scores(q_TKQH, k_SKH), LOWEST)
    new_peak_KTQ = jnp.maximum(peak_KTQ, jnp.max(scores_KTQS, axis=-1))
    weight_KTQS = jnp.where(is_seen_KTQS, jnp.exp(scores_KTQS - new_peak_KTQ[..., None]), 0.0)
    shrink_KTQ = jnp.exp(peak_KTQ - new_peak_KTQ)
    added_KTQH = _matmul("KTQS,SKH->KTQH", weight_KTQS.astype(v_SKH.dtype), v_SKH)
    total_KTQ = total_KTQ * shrink_KTQ + jnp.sum(weight_KTQS, axis=-1)
    return sum_KTQH * shrink_KTQ[..., None] + added_KTQH, new_peak_KTQ, total_KTQ


def _scores(q_TKQH: jax.Array, k_SKH: jax.Array) -> jax.Array:
    return _matmul("TKQH,SKH->KTQS", q_TKQH, k_SKH) * q_TKQH.shape[-1] ** -0.5


def _matmul(equation: str, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.einsum(equation, x, y, preferred_element_type=jnp.float32)


def _varying(shape: tuple[int, ...], value: float = 0.0) -> jax.Array:
    """Return a constant typed as differing between devices, as the carry of a loop must be."""
    return lax.pcast(jnp.full(shape, value, jnp.float32), MESH_AXES, to="varying")


def _row_forward(window: int, *args: typing.Any) -> tuple[tuple[jax.Array, jax.Array], tuple]:
    out, log_sum = typing.cast(tuple[jax.Array, jax.Array], _row(window, *args))
    return (out, log_sum), (*args, out, log_sum)


def _row_backward(window: int, kept: tuple, grads: tuple[jax.Array, jax.Array]) -> tuple:
    """Visit each pair of blocks once; the gradient of the queries goes round with the loop over key blocks.

    With p the probabilities: dv = p' dout, ds = p * (dout v' - sum(out * dout) + dlog_sum), dq = ds k, dk = ds' q.
    """
    q_ITKQH, k_JSKH, v_JSKH, queries, keys, out_ITKQH, log_sum_ITKQ = kept
    dout_ITKQH, dlog_sum_ITKQ = grads
    shift_ITKQ = dlog_sum_ITKQ - jnp.sum(out_ITKQH * dout_ITKQH, axis=-1)
    dout_ITKQH = dout_ITKQH.astype(v_JSKH.dtype)

    def of_keys(dq_ITKQH: jax.Array, block: tuple) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        k_SKH, v_SKH, theirs = block

        def visit(carry: tuple, block: tuple) -> tuple[tuple, jax.Array]:
            *rest, places, dq_TKQH = block
            mask_TS = packed_mask(places, theirs, window)
            args = ((*carry, dq_TKQH), k_SKH, v_SKH, mask_TS, *rest)
            with jax.named_scope("attention_pair"):
                dk_SKH, dv_SKH, dq_TKQH = lax.cond(jnp.any(mask_TS), _add_gradients, lambda sums, *_: sums, *args)
            return (dk_SKH, dv_SKH), dq_TKQH

        start = (_varying(k_SKH.shape), _varying(v_SKH.shape))
        blocks = (q_ITKQH, dout_ITKQH, log_sum_ITKQ, shift_ITKQ, queries, dq_ITKQH)
        dkv, dq_ITKQH = lax.scan(visit, start, blocks)
        return dq_ITKQH, dkv

    dq_ITKQH, (dk_JSKH, dv_JSKH) = lax.scan(of_keys, _varying(q_ITKQH.shape), (k_JSKH, v_JSKH, keys))
    cast = (d.astype(x.dtype) for d, x in zip((dq_ITKQH, dk_JSKH, dv_JSKH), kept[:3], strict=True))
    return *cast, None, None


def _add_gradients(
    sums: tuple[jax.Array, jax.Array, jax.Array],
    k_SKH: jax.Array,
    v_SKH: jax.Array,
    mask_TS: jax.Array,
    q_TKQH: jax.Array,
    dout_TKQH: jax.Array,
    log_sum_TKQ: jax.Array,
    shift_TKQ: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Add what one pair of blocks gives to the gradients of keys, values and queries, all float32."""
    dk_SKH, dv_SKH, dq_TKQH = sums
    log_sum_KTQ1, shift_KTQ1 = (jnp.einsum("TKQ->KTQ", x)[..., None] for x in (log_sum_TKQ, shift_TKQ))
    probs_KTQS = jnp.where(mask_TS[None, :, None, :], jnp.exp(_scores(q_TKQH, k_SKH) - log_sum_KTQ1), 0.0)
    dprobs_KTQS = _matmul("TKQH,SKH->KTQS", dout_TKQH, v_SKH)
    dscores_KTQS = probs_KTQS * (dprobs_KTQS + shift_KTQ1) * q_TKQH.shape[-1] ** -0.5
    dscores_KTQS, probs_KTQS = dscores_KTQS.astype(k_SKH.dtype), probs_KTQS.astype(v_SKH.dtype)
    dk_SKH = dk_SKH + _matmul("KTQS,TKQH->SKH", dscores_KTQS, q_TKQH)
    dv_SKH = dv_SKH + _matmul("KTQS,TKQH->SKH", probs_KTQS, dout_TKQH)
    return dk_SKH, dv_SKH, dq_TKQH + _matmul("KTQS,SKH->TKQH", dscores_KTQS, k_SKH)


_row.defvjp(_row_forward, _row_backward)
