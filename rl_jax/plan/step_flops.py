"""FLOPs of a step by formula: what the model needs, and what the step executes with recomputation.

The compiler's own count is no help: it counts loop bodies once. These numbers are checked against the matmuls that are
counted in the compiled text (`hlo_cost.py`).
"""

import math
from dataclasses import dataclass

from rl_jax.mesh import MeshConfig
from rl_jax.models.architecture import Architecture
from rl_jax.models.grouped_matmul import block_rows
from rl_jax.models.schema import num_active_params
from rl_jax.models.transformer import ForwardConfig
from rl_jax.packing import PackingConfig

ATTENTION_BACKWARD = {"reference": 4, "blockwise": 5, "splash": 7}
"""Attention kernel -> matmuls of its backward pass; the scores are made again by two of these kernels."""


@dataclass(frozen=True, kw_only=True)
class MicroBatchFlops:
    """Of one micro-batch and one device; rows are full, one sequence each.

    Example: Qwen3-30B-A3B, 8 rows of 131,072 tokens on 64 devices, full remat, blockwise: attention is 85 % of executed.
    """

    model: float
    """What the mathematics needs: 6 a parameter and token, 12 a layer, head dimension and visible pair."""
    attention: float
    """Executed in attention over visible pairs."""
    experts: float
    """Executed in routed experts, rows of real tokens only."""
    rest: float
    """Executed in projections, router, dense layers and head."""

    @property
    def executed(self) -> float:
        """All that is executed, recomputation included."""
        return self.attention + self.experts + self.rest


def micro_batch_flops(
    arch: Architecture, forward: ForwardConfig, packing: PackingConfig, mesh: MeshConfig
) -> MicroBatchFlops:
    """Count one micro-batch on one device, work being even over devices."""
    num_tokens = packing.rows * packing.seq_len
    share = num_tokens / mesh.num_devices
    passes = 3 if forward.remat == "none" else 4
    linear, experts, head = _weights(arch)
    share_of_pairs = visible_share(forward, packing.seq_len)
    matmul = 2.0 * arch.num_heads * arch.head_width * packing.seq_len * share_of_pairs * arch.num_layers
    attention = attention_matmuls(forward) * matmul * share
    executed_experts = experts * 2.0 * _expert_passes(forward) * share * _padding(arch, forward, packing, mesh)
    rest = (linear * passes + head * 4) * 2.0 * share
    pairs = (packing.seq_len + 1) / 2
    model = 6.0 * num_active_params(arch) + 12.0 * arch.num_layers * arch.num_heads * arch.head_width * pairs
    return MicroBatchFlops(model=model * share, attention=attention, experts=executed_experts, rest=rest)


def kernel_bytes(forward: ForwardConfig, attention_flops: float) -> float:
    """Return what the splash kernel reads from HBM: keys and values once for each block of queries.

    4 * M * M * H FLOPs forward for the 4 * M * H bytes of a block of keys and values in bfloat16; backward a little less.
    """
    return attention_flops / forward.attention_block_tokens if forward.attention == "splash" else 0.0


def attention_matmuls(forward: ForwardConfig) -> int:
    """Return how often a matmul of queries and keys (or what is as large) runs: forward, recomputation, backward."""
    kernel = "blockwise" if forward.context_attention == "ring" else forward.attention
    again = (forward.remat != "none") + (forward.context_attention == "ring")
    return 2 + 2 * again + ATTENTION_BACKWARD[kernel]


def visible_share(forward: ForwardConfig, seq_len: int) -> float:
    """Return the share of pairs of a full row that the kernel computes: causal, whole blocks."""
    if forward.attention == "reference" and forward.context_attention != "ring":
        return 1.0
    num_blocks = math.ceil(seq_len / forward.attention_block_tokens)
    return (num_blocks + 1) / (2 * num_blocks)


def expected_scopes(
    arch: Architecture, forward: ForwardConfig, packing: PackingConfig, mesh: MeshConfig
) -> dict[str, float]:
    """Return for each named scope of the step that depends on data how often it runs: full rows, even routing."""
    num_experts = max(1, arch.num_experts // (mesh.expert * mesh.context))
    tokens = packing.rows * packing.seq_len // (mesh.data * mesh.fsdp * mesh.expert * mesh.context)
    rows = tokens * max(1, arch.num_active_experts)
    buffer = rows * (mesh.expert * mesh.context if forward.dispatch == "all_gather" else forward.dispatch_buffer)
    block = block_rows(max(1, int(buffer)), num_experts, forward.expert_block_rows)
    return {
        "attention_pair": visible_share(forward, packing.seq_len),
        "dispatch_round": 1.0,
        "expert_block": rows / block + num_experts / 2,
    }


def _padding(arch: Architecture, forward: ForwardConfig, packing: PackingConfig, mesh: MeshConfig) -> float:
    """Return the rows that are multiplied over the real ones: blocks of an expert are padded, half a block each."""
    if forward.grouped_matmul != "blocks" or not arch.num_experts:
        return 1.0
    num_experts = arch.num_experts // (mesh.expert * mesh.context)
    tokens = packing.rows * packing.seq_len // (mesh.data * mesh.fsdp * mesh.expert * mesh.context)
    rows = tokens * arch.num_active_experts
    gathered = mesh.expert * mesh.context if forward.dispatch == "all_gather" else forward.dispatch_buffer
    block = block_rows(max(1, int(rows * gathered)), num_experts, forward.expert_block_rows)
    return 1 + num_experts * block / 2 / rows


def _weights(arch: Architecture) -> tuple[float, float, float]:
    """Return what a token is multiplied with: outside routed experts, in them, and in the head."""
    heads = arch.num_heads * 2 + arch.num_kv_heads * 2
    linear = arch.width * arch.head_width * heads
    experts = 3 * arch.num_active_experts * arch.width * arch.expert_width if arch.num_experts else 0
    if arch.num_experts:
        linear += arch.width * arch.num_experts + 3 * arch.width * arch.shared_expert_width
    else:
        linear += 3 * arch.width * arch.mlp_width
    return float(arch.num_layers * linear), float(arch.num_layers * experts), float(arch.width * arch.vocab_size)


def _expert_passes(forward: ForwardConfig) -> float:
    """Return the forward passes that the experts' matmuls amount to: forward, recomputation, two of the backward pass.

    all_to_all recomputes by itself; the loop over blocks makes gate and up again in its backward pass, two of three.
    """
    again = forward.remat != "none" or forward.dispatch == "all_to_all"
    return 1 + again + 2 + (2 / 3 if forward.grouped_matmul == "blocks" else 0)
