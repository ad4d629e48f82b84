"""Mixture-of-experts layer: route, dispatch, grouped matmul, combine. Dropless on every backend.

Runs inside one shard_map over the whole mesh. With expert parallelism the rows of all expert shards are gathered,
each shard computes its own experts, and the results are summed and scattered back ("ring of experts"; bytes moved per
layer and device: 2 * rows * D * (expert - 1) / expert of the compute dtype).
"""

import math
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from rl_jax.axes import BATCH_AXES, spec
from rl_jax.models.architecture import Architecture

GroupedMatmul = Literal["blocks", "ragged", "dense"]
"""blocks: a loop over blocks of rows of one expert (CPU; correct on any platform); ragged: lax.ragged_dot (TPU); dense:
every expert on every row (the oracle)."""


@struct.dataclass
class Routing:
    """Where each token goes. Rows are the tokens of one device."""

    experts_TA: jax.Array
    """int32"""
    weights_TA: jax.Array
    """float32"""


def moe_layer(
    arch: Architecture,
    x_BTD: Float[Array, "B T D"],
    w: dict[str, jax.Array],
    forced_BTA: Int[Array, "B T A"] | None,
    backend: GroupedMatmul,
) -> tuple[Float[Array, "B T D"], Int[Array, "B T A"], Float[Array, "B T E"]]:
    """Return the output of the experts, and of each token the expert ids and the router's probabilities.

    Args:
        w: weights of one layer, gathered over fsdp: router_DE (float32, whole), gate_EDF, up_EDF, down_EFD.
        forced_BTA: experts to use instead of the router's choice (router replay); a token with an id < 0 is free.
    """
    batch = PartitionSpec(BATCH_AXES)
    forced = () if forced_BTA is None else (forced_BTA,)
    weights = (w["router_DE"], w["gate_EDF"], w["up_EDF"], w["down_EFD"])
    specs = (batch, PartitionSpec(), spec("E D F", ("fsdp",)), spec("E D F", ("fsdp",)), spec("E F D", ("fsdp",)))
    layer = jax.shard_map(
        partial(_moe_on_device, arch, backend),
        in_specs=specs + (batch,) * len(forced),
        out_specs=(batch, batch, batch),
    )
    return layer(x_BTD, *weights, *forced)


def route(
    arch: Architecture,
    x_TD: Float[Array, "T D"],
    router_DE: Float[Array, "D E"],
    forced_TA: Int[Array, "T A"] | None = None,
) -> tuple[Routing, Float[Array, "T E"]]:
    """Choose experts by softmax top-k in float32, ties going to the lower id; return that and the softmax.

    The weight of a forced expert is its own probability, so the router keeps its gradient under replay.
    """
    logits_TE = jnp.einsum("TD,DE->TE", x_TD.astype(jnp.float32), router_DE)
    probs_TE = jax.nn.softmax(logits_TE, axis=-1)
    _, experts_TA = lax.top_k(lax.stop_gradient(probs_TE), arch.num_active_experts)
    if forced_TA is not None:
        experts_TA = jnp.where(forced_TA >= 0, forced_TA, experts_TA)
    chosen_TAE = jax.nn.one_hot(experts_TA, arch.num_experts, dtype=jnp.float32)
    weights_TA = jnp.einsum("TAE,TE->TA", chosen_TAE, probs_TE)
    if arch.normalise_routing:
        weights_TA = weights_TA / jnp.sum(weights_TA, axis=-1, keepdims=True)
    return Routing(experts_TA=experts_TA, weights_TA=weights_TA), probs_TE


def _moe_on_device(
    arch: Architecture,
    backend: GroupedMatmul,
    x_BTD: jax.Array,
    router_DE: jax.Array,
    gate_EDF: jax.Array,
    up_EDF: jax.Array,
    down_EFD: jax.Array,
    *forced: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    x_TD = x_BTD.reshape(-1, x_BTD.shape[-1])
    forced_TA = forced[0].reshape(x_TD.shape[0], -1) if forced else None
    routing, probs_TE = route(arch, x_TD, router_DE, forced_TA)
    experts_BTA = routing.experts_TA.reshape(*x_BTD.shape[:2], -1)
    probs_BTE = probs_TE.reshape(*x_BTD.shape[:2], -1)
    num_shards = lax.axis_size("expert")
    if num_shards > 1:
        gather = partial(lax.all_gather, axis_name="expert", axis=0, tiled=True)
        x_TD, routing = gather(x_TD), jax.tree.map(gather, routing)
        first = lax.axis_index("expert") * gate_EDF.shape[0]
        routing = routing.replace(experts_TA=routing.experts_TA - first)
    # In the backward pass these two lines sum the gradients of the weights over data and fsdp, of the rows over tensor.
    weights = lax.pcast((gate_EDF, up_EDF, down_EFD), ("data", "fsdp"), to="varying")
    y_TD = EXPERTS[backend](lax.pcast(x_TD, "tensor", to="varying"), routing, *weights)
    if num_shards > 1:
        y_TD = lax.psum_scatter(y_TD, "expert", scatter_dimension=0, tiled=True)
    y_TD = lax.psum(y_TD, "tensor")
    return y_TD.reshape(x_BTD.shape).astype(x_BTD.dtype), experts_BTA, probs_BTE


def _swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    return jax.nn.silu(gate) * up


def _experts_dense(
    x_TD: jax.Array, routing: Routing, gate_EDF: jax.Array, up_EDF: jax.Array, down_EFD: jax.Array
) -> jax.Array:
    """Every local expert on every row; ids outside 0..E-1 are another shard's and count nothing."""
    chosen_TAE = jax.nn.one_hot(routing.experts_TA, gate_EDF.shape[0], dtype=jnp.float32)
    weights_TE = jnp.einsum("TAE,TA->TE", chosen_TAE, routing.weights_TA)
    hidden_TEF = _swiglu(jnp.einsum("TD,EDF->TEF", x_TD, gate_EDF), jnp.einsum("TD,EDF->TEF", x_TD, up_EDF))
    out_TED = jnp.einsum("TEF,EFD->TED", hidden_TEF, down_EFD)
    return jnp.einsum("TED,TE->TD", out_TED, weights_TE.astype(out_TED.dtype))


def _experts_ragged(
    x_TD: jax.Array, routing: Routing, gate_EDF: jax.Array, up_EDF: jax.Array, down_EFD: jax.Array
) -> jax.Array:
    """Rows sorted by expert (stable), lax.ragged_dot over the groups; rows of other shards sort last, past the sum."""
    num_experts, num_active = gate_EDF.shape[0], routing.experts_TA.shape[1]
    owner_R = _local_or(routing.experts_TA, num_experts).reshape(-1)
    order_R = jnp.argsort(owner_R, stable=True)
    sizes_E = _count(owner_R, num_experts)
    x_RD = x_TD[order_R // num_active]
    hidden_RF = _swiglu(lax.ragged_dot(x_RD, gate_EDF, sizes_E), lax.ragged_dot(x_RD, up_EDF, sizes_E))
    out_RD = lax.ragged_dot(hidden_RF, down_EFD, sizes_E)
    slots_TA = jnp.argsort(order_R).reshape(routing.experts_TA.shape)
    return _combine(out_RD, slots_TA, routing, num_experts)


def _experts_blocks(
    x_TD: jax.Array, routing: Routing, gate_EDF: jax.Array, up_EDF: jax.Array, down_EFD: jax.Array
) -> jax.Array:
    """Rows of each expert padded to whole blocks of M rows; a loop over the blocks, each with one expert's weights.

    The number of blocks Z is static and enough for any routing, so nothing is ever dropped; the loop ends with the
    last block in use. Few rows do without blocks.
    """
    num_experts, num_active = gate_EDF.shape[0], routing.experts_TA.shape[1]
    num_rows, num_tokens = routing.experts_TA.size, x_TD.shape[0]
    if num_rows <= 2 * num_experts:
        return _experts_rows(x_TD, routing, gate_EDF, up_EDF, down_EFD)
    block = block_rows(num_rows, num_experts)
    num_blocks = num_rows // block + num_experts
    owner_R = _local_or(routing.experts_TA, num_experts).reshape(-1)
    slot_R, expert_Z, num_used = _place(owner_R, num_experts, block, num_blocks)
    rows_ZM = jnp.full((num_blocks * block,), num_rows, jnp.int32)
    rows_ZM = rows_ZM.at[slot_R].set(jnp.arange(num_rows, dtype=jnp.int32), mode="drop")
    slots_TA = slot_R.reshape(routing.experts_TA.shape)
    token_ZM = jnp.where(rows_ZM < num_rows, rows_ZM // num_active, num_tokens)
    x_ZMD = _dispatch(x_TD, token_ZM, slots_TA).reshape(num_blocks, block, -1)
    out_ZMD = _loop(x_ZMD, gate_EDF, up_EDF, down_EFD, expert_Z, num_used)
    picked_TAD = _collect(out_ZMD.reshape(num_blocks * block, -1), rows_ZM, slots_TA)
    weights_TA = jnp.where(slots_TA < num_blocks * block, routing.weights_TA, 0.0)
    return jnp.einsum("TAD,TA->TD", picked_TAD, weights_TA.astype(picked_TAD.dtype))


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


def block_rows(num_rows: int, num_experts: int) -> int:
    """Return the rows of a block: the power of two at or below an expert's share, at most 64.

    Larger blocks waste padding (E * M / 2 rows), smaller ones read the weights of an expert more often.
    """
    return min(64, 2 ** int(math.log2(max(1, num_rows // num_experts))))


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


@jax.custom_vjp
def _dispatch(x_TD: jax.Array, token_R: jax.Array, slots_TA: jax.Array) -> jax.Array:
    """Copy token rows to their slots; a slot with token id T is a row of zeros.

    The transpose of a gather is a scatter, which is slow on every platform; here both directions are gathers, because
    the inverse map is known.
    """
    return jnp.take(x_TD, token_R, axis=0, mode="fill", fill_value=0)


def _dispatch_forward(x_TD: jax.Array, token_R: jax.Array, slots_TA: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _dispatch(x_TD, token_R, slots_TA), slots_TA


def _dispatch_backward(slots_TA: jax.Array, dx_RD: jax.Array) -> tuple[jax.Array, None, None]:
    return jnp.sum(jnp.take(dx_RD, slots_TA, axis=0, mode="fill", fill_value=0), axis=1), None, None


_dispatch.defvjp(_dispatch_forward, _dispatch_backward)


@jax.custom_vjp
def _collect(out_RD: jax.Array, rows_R: jax.Array, slots_TA: jax.Array) -> jax.Array:
    """Return [T, A, D]: the row that each token has at each of its experts, zeros for another shard's."""
    return jnp.take(out_RD, slots_TA, axis=0, mode="fill", fill_value=0)


def _collect_forward(out_RD: jax.Array, rows_R: jax.Array, slots_TA: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _collect(out_RD, rows_R, slots_TA), rows_R


def _collect_backward(rows_R: jax.Array, dy_TAD: jax.Array) -> tuple[jax.Array, None, None]:
    dy_RD = dy_TAD.reshape(-1, dy_TAD.shape[-1])
    return jnp.take(dy_RD, rows_R, axis=0, mode="fill", fill_value=0), None, None


_collect.defvjp(_collect_forward, _collect_backward)
