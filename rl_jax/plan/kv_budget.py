"""How much KV cache is left on a GPU beside the weights, and whether vLLM can split a model that way at all.

    memory * utilization = weights + activations + other + KV cache            (of one GPU)

A layout that vLLM would refuse is named with the nearest sizes that it takes; a model that does not fit is a result,
with the bytes that are missing.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from rl_jax.models.fp8_rule import BLOCK
from rl_jax.plan.sampler_config import ServingConfig
from rl_jax.plan.served import Matrix, ServedModel

GIB = 2**30
SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
"""Tensor- and data-parallel sizes that are looked at for a legal layout."""


@dataclass(frozen=True, kw_only=True)
class KvBudget:
    """Memory of one GPU of a replica, and what the KV cache of the replica holds.

    Example: GLM-5 in FP8 on 64 H200 (data 64, experts shared out): 29 GiB of weights, 60 KiB a token, ...
    """

    memory_bytes: int
    usable_bytes: int
    weight_bytes: int
    activation_bytes: int
    other_bytes: int
    token_bytes: int
    """KV cache of one token on one GPU."""
    block_size: int
    ranks: int
    """Data-parallel ranks, each with a cache of its own; the GPUs of one rank hold the same tokens."""
    max_num_seqs: int
    """Of a rank."""

    @property
    def free_bytes(self) -> int:
        """Bytes for the KV cache of a GPU; negative if the rest does not fit."""
        return self.usable_bytes - self.weight_bytes - self.activation_bytes - self.other_bytes

    @property
    def rank_tokens(self) -> int:
        """Tokens in whole blocks that one rank's cache holds."""
        return max(self.free_bytes, 0) // (self.token_bytes * self.block_size) * self.block_size

    @property
    def tokens(self) -> int:
        """Tokens that the caches of a replica hold."""
        return self.ranks * self.rank_tokens

    def concurrency(self, length: float) -> int:
        """Return how many sequences of `length` tokens a replica holds at once, max_num_seqs included."""
        blocks = -(-max(int(length), 1) // self.block_size)
        return self.ranks * min(self.rank_tokens // (blocks * self.block_size), self.max_num_seqs)

    def missing_bytes(self, length: int) -> int:
        """Return the bytes that one GPU lacks to hold the weights and one sequence of `length` tokens; 0 = it fits."""
        blocks = -(-length // self.block_size)
        return max(0, blocks * self.block_size * self.token_bytes - self.free_bytes)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One way to serve a model, tried. Example: Layout(serving=..., faults=(), budget=...) is legal."""

    serving: ServingConfig
    faults: tuple[str, ...]
    """Why vLLM refuses it; empty = legal."""
    budget: KvBudget

    @property
    def fits(self) -> bool:
        """Legal, and room for one sequence of full length."""
        return not self.faults and not self.budget.missing_bytes(self.serving.max_len)


def kv_budget(model: ServedModel, serving: ServingConfig) -> KvBudget:
    """Return the memory budget of a replica; it says nothing about whether the layout is legal."""
    estimate = _activation_bytes(model, serving)
    given = int(serving.activation_reserve_gib * GIB)
    return KvBudget(
        memory_bytes=serving.spec.memory_bytes,
        usable_bytes=int(serving.spec.memory_bytes * serving.memory_utilization),
        weight_bytes=round(sum(device_bytes(model, serving, m) for m in model.matrices)),
        activation_bytes=given or estimate,
        other_bytes=int(serving.other_reserve_gib * GIB),
        token_bytes=model.cache.token_bytes(serving.tensor, serving.kv_dtype),
        block_size=serving.block_size,
        ranks=serving.data,
        max_num_seqs=serving.max_num_seqs,
    )


def device_bytes(model: ServedModel, serving: ServingConfig, matrix: Matrix) -> float:
    """Return the bytes of all tensors of one kind on the GPU that holds most of them."""
    total = matrix.nbytes(model.fmt) * matrix.count
    if matrix.is_expert and serving.expert_parallel:
        return total * -(-model.num_experts // serving.num_gpus) / model.num_experts
    return total / _ways(model, serving, matrix)


def serving_faults(model: ServedModel, serving: ServingConfig) -> list[str]:
    """Return a line for each reason why vLLM cannot serve a model in this layout, with the nearest legal size."""
    faults = list(_layout_faults(model, serving))
    if faults:
        faults[0] += f"; {_advice(model, serving)}"
    if serving.max_len > model.max_positions:
        faults.append(f"max_len={serving.max_len}: the model has max_positions={model.max_positions}")
    return faults


def layouts(model: ServedModel, serving: ServingConfig) -> list[Layout]:
    """Return, for each number of GPUs from 1 to 128, the layout with the most KV tokens: of those that fit, else of those
    that are legal, else of all."""
    best = []
    for num_gpus in SIZES:
        tried = [_layout(model, candidate) for candidate in _of_size(model, serving, num_gpus)]
        best.append(max(tried, key=_merit))
    return best


def _merit(layout: Layout) -> tuple[bool, bool, bool, int, int]:
    budget = layout.budget
    return not layout.faults, layout.fits, budget.free_bytes >= 0, budget.tokens, budget.free_bytes


def _layout(model: ServedModel, serving: ServingConfig) -> Layout:
    return Layout(serving=serving, faults=tuple(_layout_faults(model, serving)), budget=kv_budget(model, serving))


def _of_size(model: ServedModel, serving: ServingConfig, num_gpus: int) -> Iterator[ServingConfig]:
    for tensor in (size for size in SIZES if num_gpus % size == 0):
        for is_expert_parallel in (False, True) if model.num_experts and num_gpus > 1 else (False,):
            yield replace(serving, tensor=tensor, data=num_gpus // tensor, expert_parallel=is_expert_parallel)


def _layout_faults(model: ServedModel, serving: ServingConfig) -> Iterator[str]:
    tensor, heads, kv_heads = serving.tensor, model.num_heads, model.num_kv_heads
    if heads % tensor:
        yield f"tensor={tensor}: must divide num_heads={heads}"
    if kv_heads and kv_heads % tensor and tensor % kv_heads:
        yield f"tensor={tensor}: must divide num_kv_heads={kv_heads}, or be a multiple of it (they are repeated then)"
    if serving.expert_parallel and not model.num_experts:
        yield "expert_parallel=true: the model has no experts"
    elif serving.expert_parallel and serving.num_gpus > model.num_experts:
        yield f"tensor*data={serving.num_gpus}: expert parallelism needs at most num_experts={model.num_experts} GPUs"
    for matrix in model.matrices:
        ways, what = _ways(model, serving, matrix), _key(serving, matrix)
        unit = BLOCK if matrix.is_fp8 and model.fmt == "fp8-block" else 1
        size = matrix.shape[-1] if matrix.split == "columns" else matrix.shape[0]
        # vLLM pads the vocabulary by itself.
        if matrix.split in ("rows", "kv_rows", "columns") and ways > 1 and size % (ways * unit):
            share = f"{size / ways:g} a GPU" + (f", no multiple of {BLOCK}" if unit > 1 else "")
            yield f"{what}={ways}: {matrix.name} has {size} {matrix.split.removeprefix('kv_')}, {share}"


def _advice(model: ServedModel, serving: ServingConfig) -> str:
    """Return the nearest legal sizes of the tensor axis, and whether expert parallelism would do."""
    legal = [n for n in range(1, 129) if not any(_layout_faults(model, replace(serving, tensor=n)))]
    near = [
        max((n for n in legal if n < serving.tensor), default=0),
        min((n for n in legal if n > serving.tensor), default=0),
    ]
    ways = [f"tensor={' or '.join(str(n) for n in near if n)}"] if any(near) else []
    other = replace(serving, expert_parallel=not serving.expert_parallel)
    if model.num_experts and not any(_layout_faults(model, other)):
        ways.append(f"expert_parallel={str(other.expert_parallel).lower()}")
    if model.fmt == "fp8-block" and not ways and not any(_layout_faults(replace(model, fmt="fp8-channel"), serving)):
        ways.append("format='fp8-channel'")
    return (
        f"try {', or '.join(ways)}" if ways else "no tensor size up to 128 is legal with this data and expert_parallel"
    )


def _ways(model: ServedModel, serving: ServingConfig, matrix: Matrix) -> int:
    """Return over how many GPUs a matrix is split. Without expert parallelism vLLM splits experts over all ranks."""
    if matrix.split == "none" or (matrix.is_expert and serving.expert_parallel):
        return 1
    if matrix.is_expert:
        return serving.num_gpus
    return min(serving.tensor, model.num_kv_heads) if matrix.split == "kv_rows" else serving.tensor


def _key(serving: ServingConfig, matrix: Matrix) -> str:
    return "tensor*data" if matrix.is_expert and serving.data > 1 else "tensor"


def _activation_bytes(model: ServedModel, serving: ServingConfig) -> int:
    """Estimate the peak of vLLM's profile run, a step of max_batched_tokens: six residual-wide buffers, the widest MLP
    (gate, up and product) or the rows of all active experts (in, gate, up, out) in bf16, and float32 logits twice."""
    shards = 1 if serving.expert_parallel else serving.num_gpus
    expert_row = 2 * model.width + 3 * model.expert_width / shards
    widest = max(3 * model.mlp_width / serving.tensor, model.num_active_experts * expert_row)
    rows = 2 * serving.max_batched_tokens * (6 * model.width + widest)
    return int(rows + 2 * 4 * serving.max_num_seqs * model.vocab_size)
