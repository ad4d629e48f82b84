"""Attention by JAX's splash kernel: scores never leave the core. TPU only; elsewhere it is interpreted, for tests.

The kernel is made without its mask builder, which visits every pair of blocks in Python: which blocks are visible is
computed on the device, from the places of queries and the segments, so other documents of a packed row cost nothing. Its
fused backward pass is left alone: it writes a gradient of the queries for each block of keys.
"""

import functools
import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import MaskInfo
from jax.sharding import get_abstract_mesh
from jaxtyping import Array, Float, Int

from rl_jax.models.blockwise import LOWEST

LANES = 128
"""Blocks are multiples of this."""


def splash_fault(num_tokens: int, head_width: int) -> str | None:
    """Return why the kernel cannot take rows of this many tokens of a device, None where it can."""
    if num_tokens % LANES:
        return f"forward.attention='splash': the {num_tokens} tokens of a row on a device must be a multiple of {LANES}"
    if head_width % LANES and head_width != 64:
        return (
            f"forward.attention='splash': head_width={head_width} must be 64 or a multiple of {LANES}; use 'blockwise'"
        )
    return None


def attend_splash(
    q_BTKQH: Float[Array, "B T K Q H"],
    k_BSKH: Float[Array, "B S K H"],
    v_BSKH: Float[Array, "B S K H"],
    query_segments_BT: Int[Array, "B T"],
    key_segments_BS: Int[Array, "B S"],
    places_T: Int[Array, " T"],
    window: int,
    block_tokens: int,
) -> Float[Array, "B T K Q H"]:
    """Softmax attention of each query to the keys of its segment that are not after it in the row.

    Args:
        key_segments_BS: of the whole row in its own order, as k and v are.
        places_T: of the queries in that row; the same in all rows.
        window: as packed_mask; 0 = all before it.
        block_tokens: side of a block; rounded down to what divides the tokens.
    """
    blocks = block_size(q_BTKQH.shape[1], block_tokens), block_size(k_BSKH.shape[1], block_tokens)

    def one(row: tuple[jax.Array, ...]) -> jax.Array:
        *qkv, segments_T, segments_S = row
        kernel = _kernel(places_T, segments_T, segments_S, window, blocks)
        return _attend(kernel, splash.SegmentIds(q=segments_T, kv=segments_S), *qkv)

    return lax.map(one, (q_BTKQH, k_BSKH, v_BSKH, query_segments_BT, key_segments_BS))


def block_size(num_tokens: int, wanted: int) -> int:
    """Return the largest multiple of LANES that divides the tokens and is at most `wanted`, or LANES."""
    return max((n for n in range(LANES, max(wanted, LANES) + 1, LANES) if num_tokens % n == 0), default=LANES)


def _kernel(
    places_T: jax.Array, segments_T: jax.Array, segments_S: jax.Array, window: int, blocks: tuple[int, int]
) -> splash.SplashAttentionKernel:
    """Return the kernel of one row: what it visits is data, its blocks and its mask are not."""
    block_t, block_s = blocks
    is_visible_IJ = visible_blocks(places_T, segments_T, segments_S, window, blocks)
    by_keys, by_queries = _mask_info(is_visible_IJ, places_T, 1), _mask_info(is_visible_IJ, places_T, 0)
    device = get_abstract_mesh().abstract_device
    return splash.SplashAttentionKernel(
        by_keys,
        by_keys,
        by_queries,
        block_sizes=splash.BlockSizes(
            block_q=block_t,
            block_kv=block_s,
            block_kv_compute=block_s,
            block_q_dkv=block_t,
            block_kv_dkv=block_s,
            block_kv_dkv_compute=block_s,
            block_q_dq=block_t,
            block_kv_dq=block_s,
        ),
        is_mqa=False,
        save_residuals=False,
        mask_value=LOWEST,
        attn_logits_soft_cap=None,
        residual_checkpoint_name=None,
        mask_function=_mask_function(window),
        interpret=device is None or device.platform != "tpu",
    )


def _attend(
    kernel: splash.SplashAttentionKernel,
    segments: splash.SegmentIds,
    q_TKQH: jax.Array,
    k_SKH: jax.Array,
    v_SKH: jax.Array,
) -> jax.Array:
    num_tokens, num_kv_heads, queries_per_kv, width = q_TKQH.shape
    scaled_TKQH = (q_TKQH.astype(jnp.float32) * width**-0.5).astype(q_TKQH.dtype)
    q_NTH = jnp.einsum("TKQH->KQTH", scaled_TKQH).reshape(-1, num_tokens, width)
    k_KSH, v_KSH = (jnp.einsum("SKH->KSH", x) for x in (k_SKH, v_SKH))
    out_NTH = typing.cast(jax.Array, kernel(q_NTH, k_KSH, v_KSH, segments))
    return jnp.einsum("KQTH->TKQH", out_NTH.reshape(num_kv_heads, queries_per_kv, num_tokens, width))


def visible_blocks(
    places_T: jax.Array, segments_T: jax.Array, segments_S: jax.Array, window: int, blocks: tuple[int, int]
) -> jax.Array:
    """Return which pairs of blocks [I, J] can hold a visible pair: by order, by window, by ranges of segments."""
    places_IT, segments_IT = (x.reshape(-1, blocks[0]) for x in (places_T, segments_T))
    segments_JS = segments_S.reshape(-1, blocks[1])
    starts_J = jnp.arange(segments_JS.shape[0], dtype=jnp.int32) * blocks[1]
    last_I, first_I = jnp.max(places_IT, axis=1), jnp.min(places_IT, axis=1)
    is_before_IJ = starts_J[None, :] <= last_I[:, None]
    low_I, high_I = jnp.min(segments_IT, axis=1), jnp.max(segments_IT, axis=1)
    low_J, high_J = jnp.min(segments_JS, axis=1), jnp.max(segments_JS, axis=1)
    is_met_IJ = (low_I[:, None] <= high_J[None, :]) & (low_J[None, :] <= high_I[:, None])
    if window:
        is_met_IJ &= starts_J[None, :] + blocks[1] > first_I[:, None] - window + 1
    return is_before_IJ & is_met_IJ


def _mask_info(is_visible_IJ: jax.Array, places_T: jax.Array, axis: int) -> MaskInfo:
    """Return what steers the kernel: 1 for a block that is computed, and the block to fetch at each step.

    A step that is skipped names block 0, so at most one fetch is wasted in a run of skipped steps.
    """
    steps_IJ = lax.broadcasted_iota(jnp.int32, is_visible_IJ.shape, axis)
    return MaskInfo(
        data_next=jnp.where(is_visible_IJ, steps_IJ, 0).astype(jnp.int16)[None],
        mask_next=None,
        block_mask=is_visible_IJ.astype(jnp.int8)[None],
        partial_mask_blocks=None,
        q_sequence=places_T,  # type: ignore[arg-type]
    )


@functools.cache
def _mask_function(window: int) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Return the mask by places; one function for each window, because the kernel is compiled for the function."""

    def mask(queries: jax.Array, keys: jax.Array) -> jax.Array:
        is_seen = queries >= keys
        return is_seen & (queries - keys < window) if window else is_seen

    return mask
