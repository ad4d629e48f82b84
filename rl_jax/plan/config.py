"""The config of a plan: a run's config, and which machine to compile its step for."""

from dataclasses import dataclass, field, fields, replace

from rl_jax.cli import RunConfig
from rl_jax.config import refuse
from rl_jax.mesh import MeshConfig
from rl_jax.plan.chips import ChipName, chip_of, num_devices
from rl_jax.plan.sampler_config import SamplerPlanConfig


@dataclass(frozen=True, kw_only=True)
class PlanSection:
    """Which machine, how large a step, and how many mesh shapes to compile."""

    chip: ChipName = "v5p"
    """Kind of device; see rl_jax/plan/chips.py."""
    topology: str = "4x4x4"
    """Of TPUs the shape of a slice, in chips; of GPUs <hosts>x<GPUs of a host>."""
    num_slices: int = 1
    """TPU slices joined by a network; mesh.data spans them."""
    batch: int = 0
    """Rows of packing.seq_len tokens in one optimizer step; 0 = one micro-batch."""
    rows_per_shard: int = 1
    """Rows of a micro-batch that one batch shard holds: packing.rows is this times data * fsdp * expert."""
    max_shapes: int = 8
    """Mesh shapes that a sweep compiles, those first that promise the least traffic; a sweep starts where the mesh has
    another number of devices than the topology, or with --sweep."""
    jobs: int = 1
    """Compiles at once; each takes a core or two and 2 to 3 GB of memory."""
    timeout_s: float = 1800.0
    """Longest time of one compile."""
    compiler_options: dict[str, object] = field(default_factory=dict, hash=False)
    """Options of the compiler, xla_*: a run on the machine needs them too (LIBTPU_INIT_ARGS)."""

    def __post_init__(self) -> None:
        positive = ("num_slices", "rows_per_shard", "max_shapes", "jobs")
        refuse(
            [
                *(f"{k}={getattr(self, k)}: must be at least 1" for k in positive if getattr(self, k) < 1),
                None if self.batch >= 0 else f"batch={self.batch}: must be at least 0 (one micro-batch)",
                None if self.timeout_s > 0 else f"timeout_s={self.timeout_s}: must be positive",
            ]
        )

    @property
    def num_devices(self) -> int:
        """Devices of all slices. Raises ConfigError where the topology is none of the chip's."""
        return num_devices(chip_of(self.chip), self.topology, self.num_slices)


@dataclass(frozen=True, kw_only=True)
class PlanConfig(RunConfig):
    """A run's config with the section [plan]."""

    plan: PlanSection = field(default_factory=PlanSection)
    """Machine and sweep."""
    sampler_plan: SamplerPlanConfig | None = None
    """The sampler side, planned with the step time that was found."""


ACCELERATOR = (
    'forward.compute_dtype="bfloat16"',
    'forward.attention="blockwise"',
    'forward.grouped_matmul="blocks"',
    "forward.expert_block_rows=1024",
    'forward.dispatch="all_to_all"',
    'forward.remat="full"',
)
"""Overrides where there is no config file: the defaults of ForwardConfig are for a CPU."""


def with_mesh(config: PlanConfig, mesh: MeshConfig) -> PlanConfig:
    """Return the config on another mesh, with the rows that it needs."""
    rows = mesh.num_batch_shards * config.plan.rows_per_shard
    return replace(config, mesh=mesh, packing=replace(config.packing, rows=rows))


def num_micro_batches(config: PlanConfig) -> int:
    """Return the micro-batches of a step."""
    return max(1, config.plan.batch // config.packing.rows)


def run_of(config: PlanConfig) -> RunConfig:
    """Return the run's part: what rl_jax.train takes."""
    return RunConfig(**{f.name: getattr(config, f.name) for f in fields(RunConfig)})
