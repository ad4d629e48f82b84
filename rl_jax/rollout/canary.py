"""The start-up canary: fixed prompts scored by trainer and sampler, before step 0 and after every weight update.

A gap means that the sampler does not run the policy that is trained, and every number after it would be wrong. Knows
neither trainer nor sampler: it compares what they say.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rl_jax.config import refuse

Scorer = Callable[[Sequence[np.ndarray], float], list[np.ndarray]]
"""(sequences, temperature) -> log-probability of each token given those before it, 0 at index 0."""

TEMPERATURES = (0.5, 0.6, 0.7, 0.8, 0.9, 1.1, 1.2, 1.5, 2.0)
"""What a wrong temperature is looked for among."""


class CanaryFailed(RuntimeError):
    """Trainer and sampler disagree on the fixed prompts."""


@dataclass(frozen=True, kw_only=True)
class CanaryConfig:
    """When the run refuses to go on because trainer and sampler disagree."""

    num_prompts: int = 4
    """Prompts that are scored: the first tasks of the environments; 0 = no canary."""
    max_gap: float = 0.02
    """Largest mean absolute difference of log-probabilities in nats. float32 on one machine gives about 1e-6, bfloat16
    0.005, an FP8 sampler 0.02; a mixture of experts in bfloat16 flips some routes and needs more."""

    def __post_init__(self) -> None:
        refuse(
            [
                None if self.num_prompts >= 0 else f"num_prompts={self.num_prompts}: must be at least 0",
                None if self.max_gap > 0 else f"max_gap={self.max_gap}: must be positive",
            ]
        )


class Canary:
    """Compares the two sides; remembers the scores of the last version to recognise a sampler that was not updated."""

    def __init__(self, config: CanaryConfig, sequences: Sequence[np.ndarray]):
        """`sequences`: int32 token ids of at least two tokens each."""
        self.sequences = [tokens_T for tokens_T in sequences if len(tokens_T) > 1]
        self._config = config
        self._last: list[np.ndarray] | None = None

    def check(self, trainer: Scorer, scores: Mapping[str, Sequence[np.ndarray]], version: int) -> float:
        """Return the largest mean absolute gap in nats; `scores` are those of `sequences` by each sampler's name.

        Raises:
            CanaryFailed: a gap is above the limit; the message names the sampler and the likely cause.
        """
        ours = trainer(self.sequences, 1.0)
        gaps = {name: _gap(ours, theirs) for name, theirs in scores.items()}
        name, gap = max(gaps.items(), key=lambda item: item[1] if item[1] == item[1] else float("inf"))
        if gap <= self._config.max_gap:
            self._last = ours
            return gap
        raise CanaryFailed(
            f"canary at version {version}: trainer and {name} differ by {gap:.4g} nats a token on "
            f"{len(self.sequences)} fixed prompts, allowed is canary.max_gap={self._config.max_gap}. "
            f"Suspect: {self._suspect(trainer, scores[name], gap)}"
        )

    def _suspect(self, trainer: Scorer, theirs: Sequence[np.ndarray], gap: float) -> str:
        if any(len(a) != len(b) for a, b in zip(self.sequences, theirs, strict=True)):
            return "tokenizer: the sampler scored another number of tokens than it was given"
        if not np.isfinite(gap):
            return "precision or weights: a log-probability is not finite; look for NaN scales or an overflow"
        if self._last is not None and _gap(self._last, theirs) < gap / 4:
            return "weights: the sampler still runs the version before; the update did not arrive"
        others = {t: _gap(trainer(self.sequences, t), theirs) for t in TEMPERATURES}
        best = min(others, key=lambda t: others[t])
        if others[best] < gap / 4:
            return f"temperature: the sampler's scores fit temperature {best}, not 1; ask it for processed log-probs"
        if gap < 0.2:
            return "precision: the gap is of the size that a narrower dtype makes; compare in float32, or raise max_gap"
        return (
            "weights or tokenizer: the gap is too large for rounding; compare single tensors on both sides, "
            "and the ids of one prompt"
        )


def _gap(ours: Sequence[np.ndarray], theirs: Sequence[np.ndarray]) -> float:
    if any(len(a) != len(b) for a, b in zip(ours, theirs, strict=True)):
        return float("inf")
    differences = [np.abs(a[1:].astype(np.float64) - b[1:]) for a, b in zip(ours, theirs, strict=True)]
    return float(np.mean(np.concatenate(differences)))
