"""lax.ragged_all_to_all over the experts' devices, and its exact emulation where the platform lacks it."""

import jax
import jax.numpy as jnp
from jax import lax

from rl_jax.axes import EXPERT_AXES


def ragged_all_to_all(
    x_RD: jax.Array,
    room_RD: jax.Array,
    starts_C: jax.Array,
    sizes_C: jax.Array,
    targets_C: jax.Array,
    arriving_C: jax.Array,
) -> jax.Array:
    """Send rows starts_C[c] .. starts_C[c] + sizes_C[c] to device c, which puts them from its row targets_C[c] on.

    Args:
        room_RD: what rows that nobody sends stay.
        arriving_C: how many rows come from each device.
    """
    args = (x_RD, room_RD, starts_C, sizes_C, targets_C, arriving_C)
    return lax.platform_dependent(*args, tpu=_native, default=_emulated)


def _native(x_RD: jax.Array, room_RD: jax.Array, *sizes: jax.Array) -> jax.Array:
    return lax.ragged_all_to_all(x_RD, room_RD, *sizes, axis_name=EXPERT_AXES)


def _emulated(
    x_RD: jax.Array,
    room_RD: jax.Array,
    starts_C: jax.Array,
    sizes_C: jax.Array,
    targets_C: jax.Array,
    arriving_C: jax.Array,
) -> jax.Array:
    """Exchange pieces padded to all rows: C times the memory."""
    num_shards, num_rows = starts_C.shape[0], x_RD.shape[0]
    steps_R = jnp.arange(num_rows, dtype=jnp.int32)[None, :]
    is_sent_CR = steps_R < sizes_C[:, None]
    rows_CR = jnp.where(is_sent_CR, starts_C[:, None] + steps_R, num_rows)
    pieces_CRD = jnp.take(x_RD, rows_CR, axis=0, mode="fill", fill_value=0)
    pieces_CRD, targets_C = (lax.all_to_all(x, EXPERT_AXES, 0, 0, tiled=True) for x in (pieces_CRD, targets_C))
    goals_CR = jnp.where(steps_R < arriving_C[:, None], targets_C[:, None] + steps_R, room_RD.shape[0])
    flat = (num_shards * num_rows, *x_RD.shape[1:])
    return room_RD.at[goals_CR.reshape(-1)].set(pieces_CRD.reshape(flat), mode="drop")
