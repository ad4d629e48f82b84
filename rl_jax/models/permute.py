"""Rows of tokens to slots and back, both directions gathers (used by dispatch and grouped matmul).

The transpose of a gather is a scatter, which is slow on every platform and to compile; here the inverse map is known.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp


class Rows(NamedTuple):
    """Who moves rows of tokens to slots and back; a slot from R on is nowhere."""

    spread: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
    """(x_TD, token_R, slots_TA) -> x_RD, see copy_rows"""
    combine: Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]
    """(out_RD, rows_R, slots_TA, weights_TA) -> sum_TD, see combine_rows"""


@jax.custom_vjp
def copy_rows(x_TD: jax.Array, token_R: jax.Array, slots_TA: jax.Array) -> jax.Array:
    """Copy token rows to their slots; a slot with token id T is a row of zeros.

    The transpose of a gather is a scatter, which is slow on every platform; here both directions are gathers, because
    the inverse map is known.
    """
    return jnp.take(x_TD, token_R, axis=0, mode="fill", fill_value=0)


def _copy_forward(x_TD: jax.Array, token_R: jax.Array, slots_TA: jax.Array) -> tuple[jax.Array, jax.Array]:
    return copy_rows(x_TD, token_R, slots_TA), slots_TA


def _copy_backward(slots_TA: jax.Array, dx_RD: jax.Array) -> tuple[jax.Array, None, None]:
    return jnp.sum(jnp.take(dx_RD, slots_TA, axis=0, mode="fill", fill_value=0), axis=1), None, None


copy_rows.defvjp(_copy_forward, _copy_backward)


@jax.custom_vjp
def collect_rows(out_RD: jax.Array, rows_R: jax.Array, slots_TA: jax.Array) -> jax.Array:
    """Return [T, A, D]: the row that each token has at each of its experts, zeros for another shard's."""
    return jnp.take(out_RD, slots_TA, axis=0, mode="fill", fill_value=0)


def _collect_forward(out_RD: jax.Array, rows_R: jax.Array, slots_TA: jax.Array) -> tuple[jax.Array, jax.Array]:
    return collect_rows(out_RD, rows_R, slots_TA), rows_R


def _collect_backward(rows_R: jax.Array, dy_TAD: jax.Array) -> tuple[jax.Array, None, None]:
    dy_RD = dy_TAD.reshape(-1, dy_TAD.shape[-1])
    return jnp.take(dy_RD, rows_R, axis=0, mode="fill", fill_value=0), None, None


collect_rows.defvjp(_collect_forward, _collect_backward)


def combine_rows(out_RD: jax.Array, rows_R: jax.Array, slots_TA: jax.Array, weights_TA: jax.Array) -> jax.Array:
    """Return [T, D]: the sum of the rows of each token, times their weights (float32); what is nowhere adds nothing."""
    weights_TA = jnp.where(slots_TA < out_RD.shape[0], weights_TA, 0.0).astype(out_RD.dtype)
    return jnp.einsum("TAD,TA->TD", collect_rows(out_RD, rows_R, slots_TA), weights_TA)


GATHERS = Rows(spread=copy_rows, combine=combine_rows)
