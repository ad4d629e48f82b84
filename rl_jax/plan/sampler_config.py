"""The numbers of the sampler side of a plan: table [sampler_plan] of a plan's TOML file."""

from dataclasses import dataclass, field
from typing import Literal

from rl_jax.config import refuse
from rl_jax.models.fp8_rule import Format
from rl_jax.plan.cache import CacheDtype
from rl_jax.plan.gpus import GPUS, Gpu
from rl_jax.plan.lengths import LengthConfig
from rl_jax.plan.served import LatentModelConfig


@dataclass(frozen=True, kw_only=True)
class ServingConfig:
    """One vLLM replica, and how far from the peaks of its GPUs it stays."""

    gpu: Literal["h200", "h100"] = "h200"
    """Which GPU."""
    format: Format = "fp8-block"
    """Format of the served weights."""
    kv_dtype: CacheDtype = "bf16"
    """Dtype of the KV cache."""
    tensor: int = 8
    """Tensor-parallel size: GPUs that share every matrix."""
    data: int = 1
    """Data-parallel size: ranks with attention and KV cache of their own; a replica is tensor * data GPUs."""
    expert_parallel: bool = False
    """Each GPU holds whole experts instead of a slice of every one."""
    memory_utilization: float = 0.9
    """Share of the GPU's memory that vLLM may use (gpu_memory_utilization)."""
    max_len: int = 131_072
    """Longest context in tokens (max_model_len)."""
    block_size: int = 16
    """Tokens of a KV page."""
    max_num_seqs: int = 256
    """Sequences that one data-parallel rank runs at once."""
    max_batched_tokens: int = 8192
    """Tokens of one step of a rank; sizes the activation reserve."""
    activation_reserve_gib: float = 0.0
    """Memory of activations; 0 = estimated from max_batched_tokens and max_num_seqs."""
    other_reserve_gib: float = 3.0
    """Memory of the CUDA context, graphs, NCCL and all-to-all buffers. Assumed."""
    prefill_gpus: int = 0
    """GPUs beside each replica that only prefill (P/D); 0 = the replica prefills between its decode steps."""
    prefill_servers: int = 1
    """Servers that these GPUs make up."""
    memory_frac: float = 0.7
    """Share of the memory bandwidth that a decode step reaches. Assumed."""
    compute_frac: float = 0.4
    """Share of the matrix peak that prefill and decode reach. Assumed."""
    network_frac: float = 0.6
    """Share of the link bandwidth that all-to-all and all-reduce reach. Assumed."""
    layer_overhead_us: float = 60.0
    """Microseconds of a layer in which neither memory nor matrix units work: launches, synchronisation. Assumed."""

    def __post_init__(self) -> None:
        at_least_one = ("tensor", "data", "max_len", "block_size", "max_num_seqs", "max_batched_tokens")
        fractions = ("memory_utilization", "memory_frac", "compute_frac", "network_frac")
        not_negative = ("activation_reserve_gib", "other_reserve_gib", "prefill_gpus", "layer_overhead_us")
        refuse(
            [
                *(f"{k}={getattr(self, k)}: must be at least 1" for k in at_least_one if getattr(self, k) < 1),
                *(f"{k}={getattr(self, k)}: must be in (0, 1]" for k in fractions if not 0 < getattr(self, k) <= 1),
                *(f"{k}={getattr(self, k)}: must not be negative" for k in not_negative if getattr(self, k) < 0),
                None
                if self.format != "float32"
                else "format='float32': the planner has peaks for bf16 and FP8 only; use 'bf16' or 'fp8-block'",
                None
                if 1 <= self.prefill_servers <= max(self.prefill_gpus, 1)
                else f"prefill_servers={self.prefill_servers}: must be 1..prefill_gpus={self.prefill_gpus}",
            ]
        )

    @property
    def spec(self) -> Gpu:
        """The GPU."""
        return GPUS[self.gpu]

    @property
    def num_gpus(self) -> int:
        """GPUs that decode in one replica."""
        return self.tensor * self.data

    @property
    def cell_gpus(self) -> int:
        """GPUs of a cell: a replica and its prefill servers. A fleet is a number of cells."""
        return self.num_gpus + self.prefill_gpus


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """The asynchronous loop; the first three mean what they mean in [orchestrator]."""

    batch_size: int = 256
    """Rollouts of one training step."""
    group_size: int = 16
    """Rollouts of one prompt."""
    max_staleness: int = 1
    """Policy versions that a trained token may be behind; 0 = synchronous."""
    max_inflight: int = 0
    """Rollouts in flight, their environment time included; 0 = 1.5 times what the replicas run at once."""
    filtered_frac: float = 0.0
    """Share of the groups that are dropped since all members got one reward; they are replaced."""
    failed_frac: float = 0.0
    """Share of the rollouts whose environment fails; the batch is smaller by them."""
    keep_prefixes: bool = False
    """A request after an update reuses the KV cache that older weights made. rl_jax never does: it computes the whole
    context again, once for each rollout and update."""

    def __post_init__(self) -> None:
        refuse(
            [
                None if self.batch_size >= 1 else f"batch_size={self.batch_size}: must be at least 1",
                None if self.group_size >= 1 else f"group_size={self.group_size}: must be at least 1",
                f"batch_size={self.batch_size}: must be a multiple of group_size={self.group_size}"
                if min(self.batch_size, self.group_size) >= 1 and self.batch_size % self.group_size
                else None,
                None
                if 0 <= self.max_staleness <= 1000
                else f"max_staleness={self.max_staleness}: must be between 0 (synchronous) and 1000",
                None if self.max_inflight >= 0 else f"max_inflight={self.max_inflight}: must not be negative",
                None if 0 <= self.filtered_frac < 1 else f"filtered_frac={self.filtered_frac}: must be in [0, 1)",
                None if 0 <= self.failed_frac < 1 else f"failed_frac={self.failed_frac}: must be in [0, 1)",
            ]
        )

    @property
    def groups_per_batch(self) -> int:
        """Groups of one training step."""
        return self.batch_size // self.group_size


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """The trainer as the sampler side sees it: nodes, and seconds of a step."""

    nodes: int = 1
    """Hosts of the trainer, whatever they hold."""
    step_s: float = 0.0
    """Seconds of a training step on these nodes, without the weight update; 0 = from mfu. The compiled plan's number
    takes the place of both."""
    mfu: float = 0.2
    """Model FLOPs of a step over what the nodes could do; only without step_s. Assumed."""
    node_flops_s: float = 8 * 989e12
    """FLOP/s of a node; default: eight H200 in bf16."""
    network_bytes_s: float = 400e9
    """Bytes/s that a node sends; default: eight adapters of 400 Gb/s."""

    def __post_init__(self) -> None:
        refuse(
            [
                None if self.nodes >= 1 else f"nodes={self.nodes}: must be at least 1",
                None if self.step_s >= 0 else f"step_s={self.step_s}: must not be negative",
                None if 0 < self.mfu <= 1 else f"mfu={self.mfu}: must be in (0, 1]",
                None if self.node_flops_s > 0 else f"node_flops_s={self.node_flops_s}: must be positive",
                None if self.network_bytes_s > 0 else f"network_bytes_s={self.network_bytes_s}: must be positive",
            ]
        )


@dataclass(frozen=True, kw_only=True)
class SyncConfig:
    """One weight update."""

    changed_frac: float = 1.0
    """Share of the bytes of an export that an update carries; below 1 for deltas."""
    network_frac: float = 0.3
    """Share of the network's bandwidth that the transfer reaches. Assumed."""
    is_staged: bool = True
    """Replicas go on while the bytes arrive, and pause only to swap them in. Else they pause for all of it."""
    swap_bytes_s: float = 200e9
    """Bytes/s at which one GPU swaps staged weights in. Assumed."""
    swap_s: float = 0.3
    """Seconds of a pause beside that: requests, acknowledgements. A vLLM on CPU took 0.3 s."""

    def __post_init__(self) -> None:
        refuse(
            [
                None if 0 < self.changed_frac <= 1 else f"changed_frac={self.changed_frac}: must be in (0, 1]",
                None if 0 < self.network_frac <= 1 else f"network_frac={self.network_frac}: must be in (0, 1]",
                None if self.swap_bytes_s > 0 else f"swap_bytes_s={self.swap_bytes_s}: must be positive",
                None if self.swap_s >= 0 else f"swap_s={self.swap_s}: must not be negative",
            ]
        )


@dataclass(frozen=True, kw_only=True)
class SearchConfig:
    """How long the loop is simulated, and what is searched."""

    cells: int = 0
    """Cells (replicas with their prefill servers) of the fleet; 0 = the number that balances the trainer."""
    total_nodes: int = 0
    """Also find the best split of so many nodes over trainer and fleet; 0 = do not."""
    tolerance: float = 0.05
    """A step this much longer than the bound set by the other side counts as balanced."""
    staleness: tuple[int, ...] = (0, 1, 2, 4, 8)
    """Bounds on staleness that the chosen pair is also simulated under."""
    max_cells: int = 256
    """Largest fleet that is tried."""
    warmup_steps: int = 10
    """Steps before measuring; at least twice max_staleness + 1 are taken."""
    steps: int = 30
    """Steps that are measured, rounded up to a multiple of max_staleness + 1."""
    seed: int = 0
    """Of lengths, environment times and failures."""

    def __post_init__(self) -> None:
        refuse(
            [
                *(f"{k}={v}: must be at least 1" for k in ("max_cells", "steps") if (v := getattr(self, k)) < 1),
                *(
                    f"{k}={v}: must not be negative"
                    for k in ("cells", "total_nodes", "warmup_steps", "seed")
                    if (v := getattr(self, k)) < 0
                ),
                *(
                    f"staleness={bound}: must be between 0 and 1000"
                    for bound in self.staleness
                    if not 0 <= bound <= 1000
                ),
                None if 0 < self.tolerance < 1 else f"tolerance={self.tolerance}: must be in (0, 1)",
                None
                if self.total_nodes != 1
                else "total_nodes=1: one node cannot be split; give at least 2, or 0 for no search",
            ]
        )


@dataclass(frozen=True, kw_only=True)
class SamplerPlanConfig:
    """Everything of the sampler side of a plan."""

    model: LatentModelConfig | None = None
    """A model that the trainer's parameter table does not have; else model.architecture of the file is served."""
    serving: ServingConfig = field(default_factory=ServingConfig)
    """A replica."""
    lengths: LengthConfig = field(default_factory=LengthConfig)
    """How long rollouts are."""
    loop: LoopConfig = field(default_factory=LoopConfig)
    """Batches, groups, staleness."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    """The other side."""
    sync: SyncConfig = field(default_factory=SyncConfig)
    """Weight updates."""
    search: SearchConfig = field(default_factory=SearchConfig)
    """Simulation and search."""
