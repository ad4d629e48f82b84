"""Supervised training on documents: the warm start of a run, or all of python -m rl_jax.sft. Knows no environment."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from rl_jax.config import refuse
from rl_jax.envs.registry import EnvConfig
from rl_jax.optim import OptimConfig
from rl_jax.packing import PackingConfig, pack_documents
from rl_jax.types import Batch

Pair = tuple[np.ndarray, np.ndarray]
"""(tokens_T int32, trained_T bool)"""


@dataclass(frozen=True, kw_only=True)
class SftConfig:
    """Cross entropy on the answers of documents."""

    steps: int = 0
    """Supervised steps before RL; 0 = no warm start."""
    batch_size: int = 64
    """Documents of a step."""
    max_documents: int = 16384
    """Documents that environments make at most; they are seen again in a new order when all were seen."""
    envs: tuple[EnvConfig, ...] = ()
    """Environments that know their solutions, mixed by weight; each needs a name of its own."""
    data: str = ""
    """JSONL file with {"prompt", "completion"} or {"messages"} on each line; instead of envs."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """Optimizer of the supervised steps; RL begins with a fresh one."""

    def __post_init__(self) -> None:
        num_sources = bool(self.envs) + bool(self.data)
        advice = "give either envs or data, not both" if num_sources else "give envs or data"
        refuse(
            [
                None if self.steps >= 0 else f"steps={self.steps}: must be at least 0",
                None if self.batch_size >= 1 else f"batch_size={self.batch_size}: must be at least 1",
                None if self.max_documents >= 1 else f"max_documents={self.max_documents}: must be at least 1",
                None if num_sources == 1 or not self.steps else f"steps={self.steps}: needs documents; {advice}",
            ]
        )


def supervised_batches(
    documents: Sequence[Pair], config: SftConfig, packing: PackingConfig, seed: int, step: int
) -> list[Batch]:
    """Return the micro-batches of one step: a pure function of seed and step, so a resumed run sees the same."""
    positions = np.arange(step * config.batch_size, (step + 1) * config.batch_size)
    epochs, offsets = np.divmod(positions, len(documents))
    orders = {epoch: np.random.default_rng((seed, epoch)).permutation(len(documents)) for epoch in set(epochs.tolist())}
    chosen = [
        documents[int(orders[epoch][offset])] for epoch, offset in zip(epochs.tolist(), offsets.tolist(), strict=True)
    ]
    return pack_documents(chosen, packing)
