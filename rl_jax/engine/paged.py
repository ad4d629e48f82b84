"""Attention over the paged KV cache, one Attend for decoding (T = 1) and for pieces of prompts.

Every layer first writes the keys and values of all rows, then reads: rows of one call may build on each other's pages.
"""

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Int

from rl_jax.axes import BATCH_AXES, TOKENS
from rl_jax.models.attention import Attend, attend_masked


@struct.dataclass
class Cache:
    """Keys and values of every layer in pages of M tokens, in the compute dtype; heads are sharded over tensor."""

    k_LPMKH: jax.Array
    v_LPMKH: jax.Array


def paged_attention(
    tables_BP: Int[Array, "B P"], positions_BT: Int[Array, "B T"], is_real_BT: Bool[Array, "B T"]
) -> Attend:
    """Return the Attend of sequences whose token at position p lies in row p % M of page tables_BP[b, p // M].

    A query sees the keys at its own and lower positions. Tokens that are not real are written to the scratch page.
    """

    def attend(
        layer: jax.Array, q_BTKQH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, cache: object
    ) -> tuple[jax.Array, object]:
        assert isinstance(cache, Cache)
        heads = PartitionSpec(BATCH_AXES, "context", "tensor")
        pages = PartitionSpec(None, None, None, "tensor")
        on_device = jax.shard_map(
            _attend_on_device,
            in_specs=(PartitionSpec(), heads, heads, heads, pages, PartitionSpec(BATCH_AXES), TOKENS, TOKENS),
            out_specs=(heads, pages),
            # The batch and context axes of the mesh have size 1; the check would take the pages for rows of one of them.
            check_vma=False,
        )
        return on_device(layer, q_BTKQH, k_BTKH, v_BTKH, cache, tables_BP, positions_BT, is_real_BT)

    return attend


def _attend_on_device(
    layer: jax.Array,
    q_BTKQH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    cache: Cache,
    tables_BP: jax.Array,
    positions_BT: jax.Array,
    is_real_BT: jax.Array,
) -> tuple[jax.Array, Cache]:
    page_size = cache.k_LPMKH.shape[2]
    pages_BT = jnp.where(is_real_BT, jnp.take_along_axis(tables_BP, positions_BT // page_size, axis=1), 0)
    at_BT = (layer, pages_BT, positions_BT % page_size)
    cache = Cache(
        k_LPMKH=cache.k_LPMKH.at[at_BT].set(k_BTKH, mode="promise_in_bounds"),
        v_LPMKH=cache.v_LPMKH.at[at_BT].set(v_BTKH, mode="promise_in_bounds"),
    )
    batch, num_keys = tables_BP.shape[0], tables_BP.shape[1] * page_size

    def read(pages_LPMKH: jax.Array) -> jax.Array:
        found_BPMKH = pages_LPMKH.at[layer, tables_BP].get(mode="promise_in_bounds")
        return found_BPMKH.reshape(batch, num_keys, *pages_LPMKH.shape[3:])

    mask_BTS = jnp.arange(num_keys, dtype=jnp.int32)[None, None, :] <= positions_BT[:, :, None]
    return attend_masked(q_BTKQH, read(cache.k_LPMKH), read(cache.v_LPMKH), mask_BTS), cache
