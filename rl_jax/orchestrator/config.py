"""The numbers of the asynchronous loop; each rule stands where it is applied, in this room."""

from dataclasses import dataclass, field

from rl_jax.config import refuse
from rl_jax.orchestrator.concurrency import ConcurrencyConfig


@dataclass(frozen=True, kw_only=True)
class OrchestratorConfig:
    """How batches are made, and how far sampling may run ahead of training."""

    batch_size: int = 64
    """Rollouts of one training step; whole groups. Failed members leave it smaller."""
    group_size: int = 8
    """Rollouts of one prompt, compared with each other."""
    max_staleness: int = 1
    """Policy versions that a trained token may be behind the policy that trains on it. 0 = synchronous: each batch is
    sampled by exactly the policy that trains on it, bitwise repeatable."""
    filter_zero_variance: bool = True
    """Replace groups whose members all got the same reward: they teach nothing. Counted."""
    max_fruitless_batches: int = 20
    """Batches' worth of groups in a row that may be dropped as useless before the run stops."""
    max_fruitless_tasks: int = 100
    """Tasks of one environment in a row that may give no usable rollout before the run stops."""
    max_retries: int = 3
    """Times that a group is dispatched again because its sampler was lost, before the run stops."""
    retry_delay_s: float = 1.0
    """Seconds without dispatch after a sampler was lost; doubles with each retry of a group."""
    publish_timeout_s: float = 600.0
    """Seconds that samplers may take to acknowledge weights."""
    concurrency: ConcurrencyConfig = field(default_factory=ConcurrencyConfig)
    """How many episodes run at once."""

    def __post_init__(self) -> None:
        refuse(
            [
                None if self.batch_size >= 1 else f"batch_size={self.batch_size}: must be at least 1",
                None if self.group_size >= 1 else f"group_size={self.group_size}: must be at least 1",
                self._refuse_split(),
                None
                if 0 <= self.max_staleness <= 1000
                else f"max_staleness={self.max_staleness}: must be between 0 (synchronous) and 1000; with another bound "
                "no batch could be made, or none would be fresh",
                None
                if self.max_fruitless_batches >= 1
                else f"max_fruitless_batches={self.max_fruitless_batches}: must be at least 1",
                None
                if self.max_fruitless_tasks >= 1
                else f"max_fruitless_tasks={self.max_fruitless_tasks}: must be at least 1",
                None if self.max_retries >= 0 else f"max_retries={self.max_retries}: must be at least 0",
                None
                if 0 <= self.retry_delay_s <= 3600
                else f"retry_delay_s={self.retry_delay_s}: must be in [0, 3600]",
                None
                if 0 < self.publish_timeout_s <= 86400
                else f"publish_timeout_s={self.publish_timeout_s}: must be in (0, 86400]",
            ]
        )

    def _refuse_split(self) -> str | None:
        if self.batch_size < 1 or self.group_size < 1 or self.batch_size % self.group_size == 0:
            return None
        below = self.batch_size // self.group_size * self.group_size
        near = " or ".join(str(size) for size in (below, below + self.group_size) if size)
        return f"batch_size={self.batch_size}: must be a multiple of group_size={self.group_size}; try {near}"

    @property
    def groups_per_batch(self) -> int:
        """Groups of one training step."""
        return self.batch_size // self.group_size
