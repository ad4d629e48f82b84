"""Order of a row's tokens on the context axis: zigzag, so that causal attention costs every shard the same.

A row is cut into 2 * C chunks; shard i of C holds chunks i and 2 * C - 1 - i, an early one and a late one. Masks come
from segments and positions, never from the place in a row, so the model is blind to the order. Example, C = 2: chunks
0 1 2 3 become 0 3 | 1 2.
"""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec, get_abstract_mesh, reshard
from jaxtyping import Array, Int, Shaped

from rl_jax.axes import ROWS, TOKENS


def spread(x: Shaped[Array, "..."], dim: int = 1) -> Shaped[Array, "..."]:
    """Put whole rows into zigzag order and share them out over context; moves nothing, rows are on every device.

    Args:
        dim: the dimension T; the one before it is B.
    """
    num_shards = get_abstract_mesh().shape["context"]
    if num_shards > 1:
        halves = x.reshape(*x.shape[:dim], 2, num_shards, -1, *x.shape[dim + 1 :])
        early, late = (jax.lax.index_in_dim(halves, i, dim, keepdims=False) for i in (0, 1))
        x = jnp.stack([early, jnp.flip(late, dim)], axis=dim + 1).reshape(x.shape)
    return reshard(x, PartitionSpec(*(None,) * (dim - 1), *TOKENS))


def gather(x: Shaped[Array, "B T *rest"]) -> Shaped[Array, "B T *rest"]:
    """Return whole rows in their own order; each device receives (C - 1) / C of the numbers of its rows."""
    num_shards = get_abstract_mesh().shape["context"]
    x = reshard(x, ROWS)
    return in_order(x, num_shards)


def in_order(x: Shaped[Array, "B T *rest"], num_shards: int) -> Shaped[Array, "B T *rest"]:
    """Return whole rows in their own order from those of all shards one after the other."""
    if num_shards == 1:
        return x
    pairs = x.reshape(x.shape[0], num_shards, 2, -1, *x.shape[2:])
    return jnp.concatenate([pairs[:, :, 0], jnp.flip(pairs[:, :, 1], 1)], axis=1).reshape(x.shape)


def places(num_tokens: int, num_shards: int) -> Int[Array, "C T"]:
    """Return where in its row each token of each shard is, int32."""
    if num_shards == 1:
        return jnp.arange(num_tokens, dtype=jnp.int32)[None]
    chunks_CT = jnp.arange(num_tokens, dtype=jnp.int32).reshape(2 * num_shards, -1)
    return jnp.concatenate([chunks_CT[:num_shards], jnp.flip(chunks_CT[num_shards:], 0)], axis=1)
