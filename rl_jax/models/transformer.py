"""The decoder: embedding, layers under one scan, final norm. One function serves training, prefill and decode.

What differs between them is the Attend passed in and the cache that it keeps.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jax.sharding import PartitionSpec, reshard
from jaxtyping import Array, Float, Int

from rl_jax.axes import EXPERT_AXES, TOKENS, spec
from rl_jax.config import refuse
from rl_jax.models.architecture import Architecture
from rl_jax.models.attention import Attend, attention
from rl_jax.models.context import AttentionConfig, ContextAttention, Kernel
from rl_jax.models.dispatch import Dispatch
from rl_jax.models.grouped_matmul import GroupedMatmul
from rl_jax.models.moe import MoeConfig, Routes, moe_layer
from rl_jax.models.moe_kernels import MoeKernels
from rl_jax.models.norm import rms_norm
from rl_jax.models.schema import Param, Params, parameter_table

Remat = Literal["none", "dots", "full"]


@dataclass(frozen=True, kw_only=True)
class ForwardConfig:
    """How a forward pass computes; changes speed and memory, and no number beyond the compute dtype."""

    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of activations and of weights in matmuls; router, norms, softmax and log-probabilities stay float32."""
    attention: Kernel = "reference"
    """Kernel of the trainer's attention: reference (memory T * T: short rows), blockwise (memory linear in T), splash (a
    kernel for TPUs: memory linear, and scores never leave the core)."""
    attention_block_tokens: int = 512
    """Side of the blocks of blockwise and splash attention, in tokens."""
    context_attention: ContextAttention = "all_gather"
    """How queries meet the keys of other context shards: all_gather (of keys and values), ring (one shard of them at a
    time), ulysses (trades heads for tokens; tensor * context must divide the key/value heads)."""
    grouped_matmul: GroupedMatmul = "blocks"
    """Backend of the experts: blocks (any platform), ragged (forward TPU; its gradients of weights compute every row with
    every expert of the device), dense (oracle: computes every expert)."""
    expert_block_rows: int = 64
    """Rows of a block of `blocks` at most: 64 on a CPU, 512 or 1024 on accelerators."""
    dispatch: Dispatch = "all_gather"
    """How tokens reach experts of other devices, see models/dispatch.py: all_gather (of all tokens), all_to_all (in
    bounded buffers, as many rounds as the routing needs), capacity (one round; drops the rest and counts it, which the
    sampler does not), ragged_all_to_all (exact pieces; native on TPU, emulated elsewhere)."""
    dispatch_buffer: float = 1.5
    """Rows of the buffer to one device, relative to an even share, for all_to_all and capacity; at least 1."""
    moe_kernels: MoeKernels = "xla"
    """Who chooses experts and moves rows to their order: xla, or triton (the kernels of kernels/, on NVIDIA GPUs; needs
    the extra `triton`)."""
    remat: Remat = "none"
    """What the backward pass computes again: none, dots (all but matmul results), full (all of a layer)."""
    scan_unroll: int = 1
    """Layers unrolled in one step of the scan."""
    head_chunk_tokens: int = 1024
    """Tokens whose logits exist at a time; [tokens, vocabulary] is never held whole."""

    def __post_init__(self) -> None:
        positive = (
            "scan_unroll",
            "head_chunk_tokens",
            "attention_block_tokens",
            "dispatch_buffer",
            "expert_block_rows",
        )
        is_ring_of_splash = self.attention == "splash" and self.context_attention == "ring"
        refuse(
            [
                *(f"{k}={getattr(self, k)}: must be at least 1" for k in positive if not getattr(self, k) >= 1),
                "context_attention='ring': the splash kernel attends to whole rows; use 'all_gather' or 'ulysses'"
                if is_ring_of_splash
                else None,
            ]
        )

    @property
    def dtype(self) -> jnp.dtype:
        """Compute dtype as a NumPy dtype."""
        return jnp.dtype(self.compute_dtype)

    @property
    def moe(self) -> MoeConfig:
        """Backends of the experts."""
        return MoeConfig(
            dispatch=self.dispatch,
            grouped_matmul=self.grouped_matmul,
            buffer=self.dispatch_buffer,
            block_rows=self.expert_block_rows,
            kernels=self.moe_kernels,
        )

    @property
    def packed_attention(self) -> AttentionConfig:
        """Attention of the trainer's packed rows."""
        return AttentionConfig(
            kernel=self.attention, context=self.context_attention, block_tokens=self.attention_block_tokens
        )


@struct.dataclass
class Decoded:
    """What the decoder returns."""

    hidden_BTD: jax.Array
    """Compute dtype, after the final norm."""
    cache: object
    """The cache after all layers."""
    experts_LBTA: jax.Array | None
    """int32 expert ids of every token, None in a dense model."""
    router_probs_LBTE: jax.Array | None
    """float32 router probabilities, None in a dense model; costs nothing where it is not used."""
    router_log_sums_LBT: jax.Array | None
    """float32 logarithm of the sum of exponentials of the router's logits, None in a dense model."""
    num_dropped_L: jax.Array | None
    """int32 choices of experts that the capacity dispatch dropped, None in a dense model."""


def decoder(
    arch: Architecture,
    forward: ForwardConfig,
    params: Params,
    tokens_BT: Int[Array, "B T"],
    positions_BT: Int[Array, "B T"],
    attend: Attend,
    cache: object = (),
    forced_LBTA: Int[Array, "L B T A"] | None = None,
) -> Decoded:
    """Run the decoder.

    Args:
        params: see models/schema.py, any float dtype, sharded on the mesh in scope (jax.set_mesh).
        attend: attention over the batch or the cache; it gets the int32 index of the layer.
        cache: carried through the layers, updated by `attend`.
        forced_LBTA: experts to use instead of the router's choice, -1 = free.
    """
    layer_table = parameter_table(arch)["layers"]
    assert isinstance(layer_table, dict)
    x_BTD = embed(params["embed_VD"], tokens_BT).astype(forward.dtype)

    def layer(carry: tuple[jax.Array, object], xs: tuple) -> tuple[tuple[jax.Array, object], Routes | None]:
        x_BTD, cache = carry
        index, stacked, forced_BTA = xs
        w = {_unstacked(name): _gather(value, layer_table[name], forward) for name, value in stacked.items()}
        normed_BTD = rms_norm(x_BTD, w["attention_norm_D"], arch.norm_eps)
        y_BTD, cache = attention(arch, normed_BTD, w, positions_BT, index, attend, cache)
        x_BTD = x_BTD + y_BTD
        normed_BTD = rms_norm(x_BTD, w["mlp_norm_D"], arch.norm_eps)
        if not arch.num_experts:
            return (x_BTD + _mlp(normed_BTD, w, ""), cache), None
        y_BTD, routes = moe_layer(arch, normed_BTD, w, forced_BTA, forward.moe)
        if arch.shared_expert_width:
            y_BTD = y_BTD + _mlp(normed_BTD, w, "shared_")
        return (x_BTD + y_BTD, cache), routes

    xs = (jnp.arange(arch.num_layers, dtype=jnp.int32), params["layers"], forced_LBTA)
    carry, routes = lax.scan(_remat(layer, forward.remat), (x_BTD, cache), xs, unroll=forward.scan_unroll)
    x_BTD, cache = carry
    final_norm_D = reshard(params["final_norm_D"], PartitionSpec(None))
    return Decoded(
        hidden_BTD=rms_norm(x_BTD, final_norm_D, arch.norm_eps),
        cache=cache,
        experts_LBTA=routes and routes.experts_BTA,
        router_probs_LBTE=routes and routes.probs_BTE,
        router_log_sums_LBT=routes and routes.log_sums_BT,
        num_dropped_L=routes and routes.num_dropped,
    )


def compute_params(arch: Architecture, params: Params, dtype: jnp.dtype) -> Params:
    """Cast to the compute dtype all weights that are no float32 island: what a sampler needs."""
    return jax.tree.map(
        lambda p, value: value if p.is_island else value.astype(dtype),
        parameter_table(arch),
        params,
        is_leaf=lambda node: isinstance(node, Param),
    )


def embed(embed_VD: Float[Array, "V D"], tokens_BT: Int[Array, "B T"]) -> Float[Array, "B T D"]:
    """Look up tokens in an embedding whose rows are sharded over tensor."""
    # Gathering D over fsdp moves the embedding once; the sum over tensor moves B*T*D.
    gathered_VD = reshard(embed_VD, spec("V D", ("fsdp",)))

    @partial(
        jax.shard_map,
        in_specs=(spec("V D", ("fsdp",)), TOKENS),
        out_specs=TOKENS,
    )
    def lookup(rows_VD: jax.Array, ids_BT: jax.Array) -> jax.Array:
        ids_BT = ids_BT - lax.axis_index("tensor") * rows_VD.shape[0]
        is_mine_BT = (ids_BT >= 0) & (ids_BT < rows_VD.shape[0])
        found_BTD = rows_VD[jnp.where(is_mine_BT, ids_BT, 0)]
        return lax.psum(jnp.where(is_mine_BT[..., None], found_BTD, 0), "tensor")

    return lookup(gathered_VD, tokens_BT)


def _mlp(x_BTD: jax.Array, w: dict[str, jax.Array], prefix: str) -> jax.Array:
    gate_BTF = jnp.einsum("BTD,DF->BTF", x_BTD, w[f"{prefix}gate_DF"])
    up_BTF = jnp.einsum("BTD,DF->BTF", x_BTD, w[f"{prefix}up_DF"])
    hidden_BTF = jax.nn.silu(gate_BTF) * up_BTF
    return jnp.einsum("BTF,FD->BTD", hidden_BTF, w[f"{prefix}down_FD"], out_sharding=TOKENS)


def _gather(value: jax.Array, param: Param, forward: ForwardConfig) -> jax.Array:
    """Undo the fsdp sharding of one layer's weight just before its use, in the compute dtype (half the bytes)."""
    axes = " ".join(letter for letter in param.axes.split() if letter != "L")
    whole = (
        ("fsdp", *EXPERT_AXES) if axes in ("D E", "E") else ("fsdp",)
    )  # the router scores all experts on every device
    return reshard(value if param.is_island else value.astype(forward.dtype), spec(axes, whole))


def _unstacked(name: str) -> str:
    stem, axes = name.rsplit("_", 1)
    return f"{stem}_{axes.removeprefix('L')}"


def _remat(layer: Callable[..., Any], remat: Remat) -> Callable[..., Any]:
    if remat == "none":
        return layer
    saved = jax.checkpoint_policies.dots_with_no_batch_dims_saveable if remat == "dots" else None
    return jax.checkpoint(layer, policy=saved, prevent_cse=False)
