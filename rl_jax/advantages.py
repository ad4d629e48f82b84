"""Rewards of one group -> one advantage for each member (step 8 of docs/walk.md).

Knows neither tokens nor the policy: an advantage is broadcast to all sampled tokens of its rollout by packing. NumPy only.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Float, Float32, Int

from rl_jax.config import refuse


@dataclass(frozen=True, kw_only=True)
class LengthPenaltyConfig:
    """Takes reward from members that are long for their group, before the advantage is computed.

    r'_i = r_i - mean(r) * (w_out * out_i / max(out) + w_in * in_i / max(in) + w_turns * turns_i / max(turns)), maxima
    over the group and at least 1. The factor mean(r) keeps a failing group from being pushed to be short.
    """

    num_output_tokens_weight: float = 0.25
    """Weight of the sampled tokens; >= 0. Source of the three defaults: Prime-RL 0.8."""
    num_input_tokens_weight: float = 0.1
    """Weight of the tokens that were not sampled (prompt and environment replies); >= 0."""
    num_turns_weight: float = 0.1
    """Weight of the turns; >= 0."""

    def __post_init__(self) -> None:
        refuse(
            f"{name}={weight}: must be a finite number >= 0"
            for name, weight in vars(self).items()
            if not 0 <= weight < math.inf
        )


@dataclass(frozen=True, kw_only=True)
class AdvantageConfig:
    """Which baseline a reward is compared with."""

    type: Literal["grpo", "dr_grpo", "rloo", "max_rl", "reinforce_ema"] = "grpo"
    """Formulas over the rewards r_1..r_G of a group, m = mean(r):
    grpo: (r_i - m) / (std(r) + std_eps), std over G - 1 (arXiv 2402.03300; std as in TRL and verl).
    dr_grpo: r_i - m (arXiv 2503.20783; Prime-RL calls this "grpo").
    rloo: r_i - mean of the others = (r_i - m) * G / (G - 1) (arXiv 2402.14740).
    max_rl: (r_i - m) / m, all 0 when m <= 0; for rewards >= 0 (arXiv 2602.02710).
    reinforce_ema: r_i - b, then b <- ema_decay * b + (1 - ema_decay) * r_i, member after member; one b for each
    environment, 0 at first; the only one that works with group size 1 (arXiv 2506.24119, there "rae")."""
    std_eps: float = 1e-4
    """Only grpo: keeps tiny spreads from being blown up; > 0. Default of TRL."""
    ema_decay: float = 0.95
    """Only reinforce_ema: share of the old baseline kept at each reward; 0 <= ema_decay < 1. Default of Prime-RL."""
    length_penalty: LengthPenaltyConfig | None = None
    """None = off. Needs a group, so not with reinforce_ema."""

    def __post_init__(self) -> None:
        refuse(
            [
                None if 0 < self.std_eps < math.inf else f"std_eps={self.std_eps}: must be a finite number > 0",
                None if 0 <= self.ema_decay < 1 else f"ema_decay={self.ema_decay}: must be in [0, 1)",
                "length_penalty: compares members of a group, reinforce_ema does not; drop it or choose another type"
                if self.length_penalty and not self.needs_group
                else None,
            ]
        )

    @property
    def needs_group(self) -> bool:
        """True if a group of one gives no advantage: the group size must then be at least 2."""
        return self.type != "reinforce_ema"


class Advantages:
    """Turns the rewards of one group into advantages; holds the moving baselines, which belong in the checkpoint."""

    def __init__(self, config: AdvantageConfig):
        self.config = config
        self._baselines: dict[str, float] = {}

    def __call__(
        self,
        rewards_G: Float[np.ndarray, " G"],
        num_output_tokens_G: Int[np.ndarray, " G"],
        num_input_tokens_G: Int[np.ndarray, " G"],
        num_turns_G: Int[np.ndarray, " G"],
        env: str,
    ) -> Float32[np.ndarray, " G"]:
        """Return one advantage for each usable member of a group; computed in float64.

        Members that failed are left out by the caller: the statistics are over those given, so a lost member changes
        nothing for the others but the baseline.

        Raises:
            ValueError: a reward is not finite, or the type needs a group and there is one member.
        """
        if not np.isfinite(rewards_G).all():
            raise ValueError(f"rewards of {env}: {rewards_G} must be finite; drop members whose reward failed")
        rewards_G = rewards_G.astype(np.float64)
        if not self.config.needs_group:
            return self._against_baseline(rewards_G, env).astype(np.float32)
        if len(rewards_G) < 2:
            raise ValueError(
                f"group of {env} has {len(rewards_G)} usable member: {self.config.type} compares members, so it needs "
                "at least 2; drop the group or use reinforce_ema"
            )
        if self.config.length_penalty:
            rewards_G = rewards_G - _length_penalty(
                self.config.length_penalty, rewards_G, num_output_tokens_G, num_input_tokens_G, num_turns_G
            )
        if is_degenerate(rewards_G):
            return np.zeros(len(rewards_G), np.float32)  # exactly: r - mean(r) of equal floats need not be 0
        return _GROUP_BASELINES[self.config.type](rewards_G, self.config).astype(np.float32)

    def _against_baseline(self, rewards_G: np.ndarray, env: str) -> np.ndarray:
        adv_G = np.empty_like(rewards_G)
        baseline, decay = self._baselines.get(env, 0.0), self.config.ema_decay
        for i, reward in enumerate(rewards_G):
            adv_G[i] = reward - baseline  # read before the update: its own reward must not be part of its baseline
            baseline = decay * baseline + (1 - decay) * float(reward)
        self._baselines[env] = baseline
        return adv_G

    def state(self) -> dict[str, float]:
        """Return the baseline of each environment, for the checkpoint. Empty but for reinforce_ema."""
        return dict(self._baselines)

    def restore(self, state: Mapping[str, float]) -> None:
        """Continue from what `state` returned."""
        self._baselines = dict(state)


def is_degenerate(rewards_G: Float[np.ndarray, " G"]) -> bool:
    """Say whether all rewards are equal: such a group teaches nothing to a group baseline without length penalty."""
    return bool(rewards_G.min() == rewards_G.max())


def _length_penalty(
    config: LengthPenaltyConfig,
    rewards_G: np.ndarray,
    num_output_tokens_G: np.ndarray,
    num_input_tokens_G: np.ndarray,
    num_turns_G: np.ndarray,
) -> np.ndarray:
    length_G = (
        config.num_output_tokens_weight * num_output_tokens_G / max(num_output_tokens_G.max(), 1)
        + config.num_input_tokens_weight * num_input_tokens_G / max(num_input_tokens_G.max(), 1)
        + config.num_turns_weight * num_turns_G / max(num_turns_G.max(), 1)
    )
    return rewards_G.mean() * length_G


def _grpo(rewards_G: np.ndarray, config: AdvantageConfig) -> np.ndarray:
    return (rewards_G - rewards_G.mean()) / (rewards_G.std(ddof=1) + config.std_eps)


def _dr_grpo(rewards_G: np.ndarray, config: AdvantageConfig) -> np.ndarray:
    return rewards_G - rewards_G.mean()


def _rloo(rewards_G: np.ndarray, config: AdvantageConfig) -> np.ndarray:
    return rewards_G - (rewards_G.sum() - rewards_G) / (len(rewards_G) - 1)


def _max_rl(rewards_G: np.ndarray, config: AdvantageConfig) -> np.ndarray:
    mean = rewards_G.mean()
    return (rewards_G - mean) / mean if mean > 0 else np.zeros_like(rewards_G)


_GROUP_BASELINES: dict[str, Callable[[np.ndarray, AdvantageConfig], np.ndarray]] = {
    "grpo": _grpo,
    "dr_grpo": _dr_grpo,
    "rloo": _rloo,
    "max_rl": _max_rl,
}
