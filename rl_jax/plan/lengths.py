"""How long rollouts are: a distribution of sizes, and from it the turns of every rollout, by a seed.

A rollout of size x (mean 1 over the distribution) samples x times the mean number of tokens in x times the mean number
of turns (one turn stays one), and reads x times the environment's replies; its prompt does not grow. What would pass
the context is cut there, as a server does. NumPy only; knows no hardware and no time but the environment's.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from rl_jax.config import ConfigError, refuse

_P90 = 1.2815515655446004
"""Standard deviations from the median to the 90th percentile of a normal distribution."""
_RUN_METRIC = "train/agg/all/num_output_tokens"


@dataclass(frozen=True, kw_only=True)
class LengthConfig:
    """Tokens, turns and environment time of one rollout."""

    kind: Literal["fixed", "lognormal", "empirical", "run"] = "lognormal"
    """All alike; lognormal; sizes from `file`; or lognormal as a finished run's metrics have it."""
    file: str = ""
    """empirical: a text file, one number of sampled tokens a line. run: a run folder (its metrics.jsonl)."""
    sampled_tokens: float = 4096.0
    """Mean tokens that the policy samples in a rollout, before any cut; empirical and run take it from `file`."""
    sigma: float = 1.0
    """Standard deviation of the logarithm of the size; 1 puts p90 at 3.6 medians. lognormal only."""
    group_frac: float = 0.0
    """Share of the log-variance that the members of a group have in common: hard tasks are long for all of them."""
    prompt_tokens: int = 512
    """Tokens of the prompt; computed once for a group."""
    reply_tokens: float = 0.0
    """Mean tokens that the environment adds in a rollout: tool results, next questions."""
    turns: float = 1.0
    """Mean requests of a rollout. Several real ones may be lumped into one, with env_cv smaller by the root of their number."""
    env_s: float = 0.0
    """Mean seconds of the environment after each turn, the last one's reward too."""
    env_cv: float = 1.0
    """Standard deviation of these seconds over their mean: 1 = exponential, 0 = always the mean, else a gamma distribution."""

    def __post_init__(self) -> None:
        needs_file = self.kind in ("empirical", "run")
        refuse(
            [
                None
                if needs_file == bool(self.file)
                else f"file={self.file!r}: kind={self.kind!r} {'needs' if needs_file else 'takes no'} file",
                None if self.sampled_tokens >= 1 else f"sampled_tokens={self.sampled_tokens}: must be at least 1",
                None if 0 <= self.sigma <= 4 else f"sigma={self.sigma}: must be in [0, 4]",
                None if 0 <= self.group_frac <= 1 else f"group_frac={self.group_frac}: must be in [0, 1]",
                None if self.prompt_tokens >= 1 else f"prompt_tokens={self.prompt_tokens}: must be at least 1",
                None if self.reply_tokens >= 0 else f"reply_tokens={self.reply_tokens}: must not be negative",
                None if 1 <= self.turns <= 10_000 else f"turns={self.turns}: must be in [1, 10000]",
                None if self.env_s >= 0 else f"env_s={self.env_s}: must not be negative",
                None if 0 <= self.env_cv <= 10 else f"env_cv={self.env_cv}: must be in [0, 10]",
            ]
        )

    @property
    def mean_context(self) -> float:
        """Mean tokens of a finished rollout, if nothing is cut."""
        return self.prompt_tokens + self.reply_tokens + self.sampled_tokens


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One request of a rollout. Example: Turn(new_tokens=512, sampled_tokens=90, env_s=4.0) is the first of most."""

    new_tokens: int
    """Tokens since the last one that was sampled: the prompt, then the environment's replies."""
    sampled_tokens: int
    env_s: float
    """Seconds of the environment after it."""


class Lengths:
    """Draws the rollouts of group after group; the same config, context and seed give the same ones."""

    def __init__(self, config: LengthConfig, max_len: int, seed: int):
        """`max_len`: tokens of the context, prompt included.

        Raises:
            ConfigError: no rollout fits the context, or `file` cannot be used.
        """
        refuse(
            [
                f"prompt_tokens={config.prompt_tokens}: leaves no room in a context of {max_len} tokens"
                if config.prompt_tokens >= max_len
                else None
            ]
        )
        self.config, sizes = _resolved(config)
        self._sizes = sizes
        self._max_len = max_len
        self._rng = np.random.default_rng(seed)

    def group(self, group_size: int) -> list[list[Turn]]:
        """Return the turns of each member of the next group."""
        return [self._turns(size) for size in self._draw_sizes(group_size)]

    def _draw_sizes(self, group_size: int) -> np.ndarray:
        config = self.config
        if config.kind == "fixed":
            return np.ones(group_size)
        shared, own = math.sqrt(config.group_frac), math.sqrt(1 - config.group_frac)
        normal_G = shared * self._rng.standard_normal() + own * self._rng.standard_normal(group_size)
        if self._sizes is None:
            return np.exp(config.sigma * normal_G - config.sigma**2 / 2)
        # The share in common orders the draws, the file says how large they are: a Gaussian copula.
        ranks_G = np.array([0.5 * (1 + math.erf(z / math.sqrt(2))) for z in normal_G])
        return np.quantile(self._sizes, ranks_G, method="inverted_cdf")

    def _turns(self, size: float) -> list[Turn]:
        """Return a rollout of this size, cut where it fills the context."""
        config = self.config
        num_turns = max(1, round(config.turns * size)) if config.turns > 1 else 1
        sampled = _split(max(num_turns, round(config.sampled_tokens * size)), num_turns)
        # Nothing is read after the last turn.
        replies = [config.prompt_tokens, *_split(round(config.reply_tokens * size), num_turns - 1)]
        waits = self._waits(num_turns)
        turns, room = [], self._max_len
        for new, own, wait in zip(replies, sampled, waits.tolist(), strict=True):
            if new >= room:
                break
            own = min(own, room - new)
            room -= new + own
            turns.append(Turn(new_tokens=new, sampled_tokens=own, env_s=wait))
        return turns

    def _waits(self, num_turns: int) -> np.ndarray:
        mean_s, cv = self.config.env_s, self.config.env_cv
        if not mean_s or not cv:
            return np.full(num_turns, mean_s)
        if cv == 1:
            return self._rng.exponential(mean_s, num_turns)
        return self._rng.gamma(1 / cv**2, mean_s * cv**2, num_turns)


def _split(total: int, parts: int) -> list[int]:
    """Return `parts` whole numbers that differ by one at most and add up to `total`."""
    return [total * (i + 1) // parts - total * i // parts for i in range(parts)]


def _resolved(config: LengthConfig) -> tuple[LengthConfig, np.ndarray | None]:
    """Return the config with its file's mean (and sigma), and the file's sizes (mean 1) if they are to be drawn from."""
    fields = dict(vars(config))
    if config.kind == "empirical":
        tokens = _read_tokens(Path(config.file))
        return LengthConfig(**{**fields, "sampled_tokens": float(tokens.mean())}), np.sort(tokens / tokens.mean())
    if config.kind == "run":
        mean, sigma = _read_run(Path(config.file))
        return LengthConfig(**{**fields, "sampled_tokens": mean, "sigma": sigma}), None
    return config, None


def _read_tokens(file: Path) -> np.ndarray:
    try:
        lines = [line.strip() for line in file.read_text().splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"file={str(file)!r}: cannot be read ({error}); give a text file of numbers"]) from error
    numbers = []
    for i, line in enumerate(lines):
        try:
            numbers.append(float(line))
        except ValueError as error:
            raise ConfigError(
                [f"file={str(file)!r}: entry {i + 1} is {line!r}, expected a number of tokens"]
            ) from error
        if not (math.isfinite(numbers[-1]) and numbers[-1] >= 1):
            raise ConfigError([f"file={str(file)!r}: entry {i + 1} is {line!r}, expected at least 1 token"])
    if not numbers:
        raise ConfigError([f"file={str(file)!r}: is empty, expected one number of sampled tokens a line"])
    return np.array(numbers)


def _read_run(folder: Path) -> tuple[float, float]:
    """Return mean and log-deviation of the sampled tokens of a run's rollouts, over all its steps.

    A run keeps p10 and p90 of each step: half of their log-distance is 1.28 deviations.
    """
    file = folder / "metrics.jsonl"
    try:
        lines = [json.loads(line) for line in file.read_text().splitlines()]
    except (OSError, ValueError) as error:
        raise ConfigError([f"file={str(folder)!r}: no metrics of a run there ({error}); give a run folder"]) from error
    rows = [[line.get(f"{_RUN_METRIC}/{stat}") for stat in ("mean", "p10", "p90")] for line in lines]
    known = np.array([row for row in rows if None not in row and row[1] > 0], dtype=float)
    if not len(known):
        raise ConfigError([f"file={str(file)!r}: holds no {_RUN_METRIC}; give the folder of a run that trained"])
    spread = float(np.log(known[:, 2] / known[:, 1]).mean())
    return float(known[:, 0].mean()), spread / (2 * _P90)
