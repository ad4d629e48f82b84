"""Attention of a packed batch whose rows are shared out over the context axis (step 11 of docs/walk.md).

Every device has the queries, keys and values of its own tokens; a backend brings queries and keys together, a kernel
attends. Who sees whom follows from the segments and positions that travel with the tokens, so packing and any order of
tokens compose. T is the tokens of a device, C the devices that share a row.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Int

from rl_jax.axes import BATCH_AXES, TOKENS
from rl_jax.models.attention import Attend, attend_masked
from rl_jax.models.blockwise import Places, attend_partial, packed_mask
from rl_jax.models.splash import attend_splash
from rl_jax.models.zigzag import in_order, places

Kernel = Literal["reference", "blockwise", "splash"]
"""reference: the scores of all pairs exist; blockwise: those of one pair of blocks at a time, on any platform; splash:
in a kernel for TPUs, where scores never leave the core."""

ContextAttention = Literal["all_gather", "ring", "ulysses"]
"""all_gather: every device gets the keys and values of its whole rows; ring: they pass by, a shard at a time, and block
by block whatever the kernel; ulysses: every device gets whole rows of a share of the heads."""


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """How a packed batch attends."""

    kernel: Kernel = "reference"
    context: ContextAttention = "all_gather"
    block_tokens: int = 512
    """Side of a block of scores."""
    window: int = 0
    """Each token sees itself and the window - 1 tokens before it; 0 = all before it."""


def packed_attention(
    segments_BT: Int[Array, "B T"], positions_BT: Int[Array, "B T"], config: AttentionConfig | None = None
) -> Attend:
    """Return the Attend of a packed batch, sharded as TOKENS; it keeps no cache."""
    config = config or AttentionConfig()
    heads = PartitionSpec(BATCH_AXES, "context", "tensor")
    backend = partial(BACKENDS[config.context], config)
    # A kernel's results say nothing of the mesh axes they vary over; all of these arrays vary over all, or have no gradient.
    on_device = jax.shard_map(
        backend, in_specs=(heads, heads, heads, TOKENS), out_specs=heads, check_vma=config.kernel != "splash"
    )
    where = Places(segments_BT=segments_BT, positions_BT=positions_BT)

    def attend(
        layer: jax.Array, q_BTKQH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, cache: object
    ) -> tuple[jax.Array, object]:
        return on_device(q_BTKQH, k_BTKH, v_BTKH, where), cache

    return attend


def _attend(
    config: AttentionConfig, q_BTKQH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, queries: Places, keys: Places
) -> jax.Array:
    if config.kernel == "reference":
        return attend_masked(q_BTKQH, k_BSKH, v_BSKH, packed_mask(queries, keys, config.window))
    if config.kernel == "splash":
        return _attend_splash(config, q_BTKQH, k_BSKH, v_BSKH, queries, keys)
    out_BTKQH, _ = attend_partial(q_BTKQH, k_BSKH, v_BSKH, queries, keys, config.window, config.block_tokens)
    return out_BTKQH.astype(v_BSKH.dtype)


def _attend_splash(
    config: AttentionConfig, q_BTKQH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, queries: Places, keys: Places
) -> jax.Array:
    """Keys of whole rows are put into the order of the row, where the kernel counts their places by itself."""
    num_shards, num_keys = lax.axis_size("context"), k_BSKH.shape[1]
    k_BSKH, v_BSKH, segments_BS = (in_order(x, num_shards) for x in (k_BSKH, v_BSKH, keys.segments_BT))
    places_CT = places(num_keys, num_shards)
    is_whole = q_BTKQH.shape[1] == num_keys
    places_T = places_CT.reshape(-1) if is_whole else places_CT[lax.axis_index("context")]
    return attend_splash(
        q_BTKQH, k_BSKH, v_BSKH, queries.segments_BT, segments_BS, places_T, config.window, config.block_tokens
    )


_gather = partial(lax.all_gather, axis_name="context", axis=1, tiled=True)


def _all_gather(
    config: AttentionConfig, q_BTKQH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, places: Places
) -> jax.Array:
    """Gather keys and values: 2 * B * T * K * H * (C - 1) numbers a layer and device, and as many back for gradients."""
    k_BSKH, v_BSKH, keys = jax.tree.map(_gather, (k_BTKH, v_BTKH, places))
    return _attend(config, q_BTKQH, k_BSKH, v_BSKH, places, keys)


def _ulysses(
    config: AttentionConfig, q_BTKQH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, places: Places
) -> jax.Array:
    """Trade heads for tokens and back: B * T * (2 * N + 2 * K) * H * (C - 1) / C numbers a layer and device."""
    whole = jax.tree.map(_gather, places)
    trade = partial(lax.all_to_all, axis_name="context", tiled=True)
    q, k, v = (trade(x, split_axis=2, concat_axis=1) for x in (q_BTKQH, k_BTKH, v_BTKH))
    return trade(_attend(config, q, k, v, whole, whole), split_axis=1, concat_axis=2)


def _ring(
    config: AttentionConfig, q_BTKQH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, places: Places
) -> jax.Array:
    """Pass keys and values round and merge the parts; moves as much as _all_gather, holds one shard of keys at a time.

    The backward pass attends to each shard again. Zigzag order gives every device as much to do in each turn.
    """
    num_shards = lax.axis_size("context")
    pass_on = partial(lax.ppermute, axis_name="context", perm=[(i, (i + 1) % num_shards) for i in range(num_shards)])
    block = config.block_tokens if config.kernel == "blockwise" else q_BTKQH.shape[1]
    part = partial(attend_partial, window=config.window, block_tokens=block)

    def turn(carry: tuple, _: None) -> tuple[tuple, None]:
        shard, out_BTKQH, log_sum_BTKQ = carry
        shard = jax.tree.map(pass_on, shard)
        k, v, keys = shard
        theirs_BTKQH, their_log_sum_BTKQ = part(q_BTKQH, k, v, places, keys)
        merged_BTKQ = jnp.logaddexp(log_sum_BTKQ, their_log_sum_BTKQ)
        mine, other = (jnp.exp(x - merged_BTKQ)[..., None] for x in (log_sum_BTKQ, their_log_sum_BTKQ))
        return (shard, out_BTKQH * mine + theirs_BTKQH * other, merged_BTKQ), None

    start = ((k_BTKH, v_BTKH, places), *part(q_BTKQH, k_BTKH, v_BTKH, places, places))
    (_, out_BTKQH, _), _ = lax.scan(jax.checkpoint(turn, prevent_cse=False), start, length=num_shards - 1)
    return out_BTKQH.astype(v_BTKH.dtype)


BACKENDS: dict[ContextAttention, Callable[..., jax.Array]] = {
    "all_gather": _all_gather,
    "ring": _ring,
    "ulysses": _ulysses,
}
