"""Grouped matmul of a mixture-of-experts layer: rows of tokens through the experts of one device (docs/walk.md step 11).

A backend takes rows with the ids of their experts, and returns the weighted sum for each row. Ids outside 0..E-1 are
another device's and count nothing. No row is ever dropped here. Who moves the rows to the order of the experts and back
can be passed in (`rows`). Knows no mesh.
"""

import math
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from rl_jax.models.permute import GATHERS, Rows
from rl_jax.models.route import Routing

GroupedMatmul = Literal["blocks", "ragged", "dense"]
"""blocks: a loop over blocks of rows of one expert (CPU; correct on any platform); ragged: lax.ragged_dot (TPU); dense:
every expert on every row (the oracle)."""


def _swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    return jax.nn.silu(gate) * up


def _experts_dense(
    x_TD: jax.Array,
    routing: Routing,
    gate_EDF: jax.Array,
    up_EDF: jax.Array,
    down_EFD: jax.Array,
    *,
    rows: Rows = GATHERS,
) -> jax.Array:
    """Every local expert on every row, in place; ids outside 0..E-1 are another shard's and count nothing."""
    chosen_TAE = jax.nn.one_hot(routing.experts_TA, gate_EDF.shape[0], dtype=jnp.float32)
    weights_TE = jnp.einsum("TAE,TA->TE", chosen_TAE, routing.weights_TA)
    hidden_TEF = _swiglu(jnp.einsum("TD,EDF->TEF", x_TD, gate_EDF), jnp.einsum("TD,EDF->TEF", x_TD, up_EDF))
    out_TED = jnp.einsum("TEF,EFD->TED", hidden_TEF, down_EFD)
    return jnp.einsum("TED,TE->TD", out_TED, weights_TE.astype(out_TED.dtype))


def _experts_ragged(
    x_TD: jax.Array,
    routing: Routing,
    gate_EDF: jax.Array,
    up_EDF: jax.Array,
    down_EFD: jax.Array,
    *,
    rows: Rows = GATHERS,
) -> jax.Array:
    """Rows sorted by expert (stable), lax.ragged_dot over the groups; rows of other shards sort last, past the sum."""
    num_experts, num_active = gate_EDF.shape[0], routing.experts_TA.shape[1]
    owner_R = _local_or(routing.experts_TA, num_experts).reshape(-1)
    order_R = jnp.argsort(owner_R, stable=True)
    sizes_E = _count(owner_R, num_experts)
    slot_R = jnp.where(owner_R < num_experts, jnp.argsort(order_R), order_R.shape[0])
    slots_TA = slot_R.reshape(routing.experts_TA.shape)
    x_RD = rows.spread(x_TD, order_R // num_active, slots_TA)
    hidden_RF = _swiglu(lax.ragged_dot(x_RD, gate_EDF, sizes_E), lax.ragged_dot(x_RD, up_EDF, sizes_E))
    out_RD = lax.ragged_dot(hidden_RF, down_EFD, sizes_E)
    return rows.combine(out_RD, order_R, slots_TA, routing.weights_TA)


def _experts_blocks(
    x_TD: jax.Array,
    routing: Routing,
    gate_EDF: jax.Array,
    up_EDF: jax.Array,
    down_EFD: jax.Array,
    *,
    rows: Rows = GATHERS,
    most: int = 64,
) -> jax.Array:
    """Rows of each expert padded to whole blocks of M rows; a loop over the blocks, each with one expert's weights.

    Args:
        most: rows of a block at most, see block_rows.

    The number of blocks Z is static and enough for any routing, so nothing is ever dropped; the loop ends with the
    last block in use. Few rows do without blocks.
    """
    num_experts, num_active = gate_EDF.shape[0], routing.experts_TA.shape[1]
    num_rows, num_tokens = routing.experts_TA.size, x_TD.shape[0]
    if num_rows <= 2 * num_experts:
        return _experts_rows(x_TD, routing, gate_EDF, up_EDF, down_EFD)
    block = block_rows(num_rows, num_experts, most)
    num_blocks = num_rows // block + num_experts
    owner_R = _local_or(routing.experts_TA, num_experts).reshape(-1)
    slot_R, expert_Z, num_used = _place(owner_R, num_experts, block, num_blocks)
    rows_ZM = jnp.full((num_blocks * block,), num_rows, jnp.int32)
    rows_ZM = rows_ZM.at[slot_R].set(jnp.arange(num_rows, dtype=jnp.int32), mode="drop")
    slots_TA = slot_R.reshape(routing.experts_TA.shape)
    token_ZM = jnp.where(rows_ZM < num_rows, rows_ZM // num_active, num_tokens)
    x_ZMD = rows.spread(x_TD, token_ZM, slots_TA).reshape(num_blocks, block, -1)
    out_ZMD = _loop(x_ZMD, gate_EDF, up_EDF, down_EFD, expert_Z, num_used)
    return rows.combine(out_ZMD.reshape(num_blocks * block, -1), rows_ZM, slots_TA, routing.weights_TA)


def _experts_rows(
    x_TD: jax.Array, routing: Routing, gate_EDF: jax.Array, up_EDF: jax.Array, down_EFD: jax.Array
) -> jax.Array:
    """Each row with its own copy of its expert's weights: the least to read and to do when rows are few."""
    num_experts, num_active = gate_EDF.shape[0], routing.experts_TA.shape[1]
    # A row of another shard takes the last expert here, and counts nothing in _combine.
    owner_R = jnp.minimum(_local_or(routing.experts_TA, num_experts), num_experts - 1).reshape(-1)
    x_RD = jnp.repeat(x_TD, num_active, axis=0)
    gate_RF = jnp.einsum("RD,RDF->RF", x_RD, gate_EDF[owner_R])
    hidden_RF = _swiglu(gate_RF, jnp.einsum("RD,RDF->RF", x_RD, up_EDF[owner_R]))
    out_RD = jnp.einsum("RF,RFD->RD", hidden_RF, down_EFD[owner_R])
    slots_TA = jnp.arange(owner_R.shape[0], dtype=jnp.int32).reshape(routing.experts_TA.shape)
    return _combine(out_RD, slots_TA, routing, num_experts)


EXPERTS = {"dense": _experts_dense, "ragged": _experts_ragged, "blocks": _experts_blocks}


RAGGED_LIMIT_BYTES = 2**30
"""On CUDA, what the copies of the rows that ragged_dot makes may take."""


def ragged_fault(platform: str, num_rows: int, num_experts: int, width: int, itemsize: int) -> str | None:
    """Return why lax.ragged_dot is refused, None where it is not.

    XLA has no grouped matmul for CUDA: it holds the rows once for each local expert and multiplies them all.

    Args:
        platform: of a device, as JAX names it.
        num_rows: routed rows of one device, at most.
        num_experts: of one device.
        width: numbers in a row.
    """
    needed = num_rows * num_experts * width * itemsize
    if platform != "gpu" or needed <= RAGGED_LIMIT_BYTES:
        return None
    return (
        f"forward.grouped_matmul='ragged': on CUDA lax.ragged_dot holds the {num_rows} rows of width {width} once for "
        f"each of the {num_experts} experts of a device, {needed / 2**30:.1f} GiB, and computes every expert on every "
        f"row; the limit is {RAGGED_LIMIT_BYTES / 2**30:.0f} GiB; use 'blocks', smaller micro-batches or more expert shards"
    )


def block_rows(num_rows: int, num_experts: int, most: int = 64) -> int:
    """Return the rows of a block: the power of two at or below an expert's share, at most `most`.

    Larger blocks waste padding (E * M / 2 rows), smaller ones read the weights of an expert, and write their gradients,
    more often: on accelerators blocks of less than 500 rows wait for memory.
    """
    return min(most, 2 ** int(math.log2(max(1, num_rows // num_experts))))


def _place(owner_R: jax.Array, num_experts: int, block: int, num_blocks: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the slot of each row (Z * M: another shard's), the expert of each block, and how many blocks are in use."""
    is_mine_RE = owner_R[:, None] == jnp.arange(num_experts, dtype=jnp.int32)[None, :]
    earlier_RE = jnp.cumsum(is_mine_RE.astype(jnp.int32), axis=0)
    rank_R = jnp.sum(jnp.where(is_mine_RE, earlier_RE - 1, 0), axis=1)
    blocks_E = -(-earlier_RE[-1] // block)
    ends_E = jnp.cumsum(blocks_E)
    start_R = jnp.sum(jnp.where(is_mine_RE, (ends_E - blocks_E)[None, :], 0), axis=1)
    slot_R = jnp.where(owner_R < num_experts, start_R * block + rank_R, num_blocks * block)
    ids_Z = jnp.arange(num_blocks, dtype=jnp.int32)
    expert_Z = jnp.minimum(jnp.sum(ids_Z[:, None] >= ends_E[None, :], axis=1), num_experts - 1)
    return slot_R, expert_Z, ends_E[-1]


def _block(x_MD: jax.Array, gate_DF: jax.Array, up_DF: jax.Array, down_FD: jax.Array) -> jax.Array:
    hidden_MF = _swiglu(jnp.einsum("MD,DF->MF", x_MD, gate_DF), jnp.einsum("MD,DF->MF", x_MD, up_DF))
    return jnp.einsum("MF,FD->MD", hidden_MF, down_FD)


@jax.custom_vjp
def _loop(
    x_ZMD: jax.Array,
    gate_EDF: jax.Array,
    up_EDF: jax.Array,
    down_EFD: jax.Array,
    expert_Z: jax.Array,
    num_used: jax.Array,
) -> jax.Array:
    """Compute the blocks in use, one after the other; the others stay zeros.

    A loop of unknown length has no automatic gradient. This one keeps no hidden row: it computes a block again, and
    adds to the weight gradients (float32) in place, where a batched matmul scatters a gradient for each block.
    """

    def step(z: jax.Array, out_ZMD: jax.Array) -> jax.Array:
        e = expert_Z[z]
        return out_ZMD.at[z].set(_block(x_ZMD[z], gate_EDF[e], up_EDF[e], down_EFD[e]))

    with jax.named_scope("expert_block"):
        return lax.fori_loop(0, num_used, step, jnp.zeros_like(x_ZMD))


def _loop_forward(*args: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    return _loop(*args), args


def _loop_backward(args: tuple[jax.Array, ...], dout_ZMD: jax.Array) -> tuple[jax.Array | None, ...]:
    x_ZMD, *weights, expert_Z, num_used = args

    def step(z: jax.Array, grads: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        e = expert_Z[z]
        dx_ZMD, *dweights = grads
        _, transpose = jax.vjp(_block, x_ZMD[z], *(weight[e] for weight in weights))
        dx_MD, *terms = transpose(dout_ZMD[z])
        sums = (total.at[e].add(term.astype(jnp.float32)) for total, term in zip(dweights, terms, strict=True))
        return dx_ZMD.at[z].set(dx_MD), *sums

    zeros = (jnp.zeros_like(x_ZMD), *(jnp.zeros_like(weight, jnp.float32) for weight in weights))
    with jax.named_scope("expert_block"):
        dx_ZMD, *dweights = lax.fori_loop(0, num_used, step, zeros)
    return dx_ZMD, *(d.astype(w.dtype) for d, w in zip(dweights, weights, strict=True)), None, None


_loop.defvjp(_loop_forward, _loop_backward)


def _local_or(experts_TA: jax.Array, num_experts: int) -> jax.Array:
    """Ids of this shard's experts; every other id becomes num_experts."""
    is_local = (experts_TA >= 0) & (experts_TA < num_experts)
    return jnp.where(is_local, experts_TA, num_experts)


def _count(owner_R: jax.Array, num_experts: int) -> jax.Array:
    ids_E = jnp.arange(num_experts, dtype=jnp.int32)
    return jnp.sum(owner_R[:, None] == ids_E[None, :], axis=0, dtype=jnp.int32)


def _combine(out_RD: jax.Array, slots_TA: jax.Array, routing: Routing, num_experts: int) -> jax.Array:
    is_local_TA = _local_or(routing.experts_TA, num_experts) < num_experts
    weights_TA = jnp.where(is_local_TA, routing.weights_TA, 0.0).astype(out_RD.dtype)
    return jnp.einsum("TAD,TA->TD", out_RD[slots_TA], weights_TA)
