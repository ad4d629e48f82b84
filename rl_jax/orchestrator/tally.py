"""The orchestrator's metrics of one batch, under the names that Prime-RL gave them (docs/walk.md, step 7).

`all` is every arrival since the last batch, failures included; `effective` is what is trained. Keep both: a filter
moves one and not the other. Knows numbers only.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from rl_jax.orchestrator.buffer import Group
from rl_jax.types import DropReason, FinishReason, Rollout

FULL = ("mean", "max", "min", "p10", "p90")


class Tally:
    """Counts since the last batch."""

    def __init__(self, envs: Iterable[str]):
        self._envs = tuple(envs)
        self._clear()

    def _clear(self) -> None:
        self._arrived: list[Rollout] = []
        self._num_failed: Counter[str] = Counter()
        self._solved: list[Sequence[float]] = []
        self._dropped: Counter[DropReason] = Counter()

    def count_group(self, env: str, rollouts: Sequence[Rollout], num_failed: int) -> None:
        """Note the arrival of a group: its usable members, and how many failed."""
        self._arrived.extend(rollouts)
        self._num_failed[env] += num_failed
        if rollouts:
            self._solved.append([rollout.reward for rollout in rollouts])

    def count_drop(self, reason: DropReason) -> None:
        """Note one dropped rollout."""
        self._dropped[reason] += 1

    def report(self, groups: Sequence[Group], version: int) -> dict[str, float]:
        """Return the metrics of a batch that a policy of `version` trains on, and start counting anew."""
        batch = [rollout for group in groups for rollout in group.rollouts]
        metrics = {"batch/groups": float(len(groups)), "batch/rollouts": float(len(batch))}
        for env in self._envs:
            metrics[f"batch/{env}"] = sum(rollout.env == env for rollout in batch) / len(batch)
        metrics |= _staleness(groups, version)
        metrics["off_policy/dropped"] = float(self._dropped[DropReason.STALE])
        metrics |= {f"drops/{reason.value}": float(self._dropped[reason]) for reason in DropReason}
        metrics |= self._rewards(batch)
        metrics |= _solved(self._solved)
        advantages = [advantage for group in groups for advantage in group.advantages or ()]
        metrics |= _statistics("train/agg/effective/advantage", advantages)
        self._clear()
        return metrics

    def _rewards(self, batch: Sequence[Rollout]) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for name, env in [("agg", None), *((env, env) for env in self._envs)]:
            arrived, effective = _of(self._arrived, env), _of(batch, env)
            num_failed = self._num_failed[env] if env else self._num_failed.total()
            metrics |= _describe(f"train/{name}/all", arrived)
            metrics |= _describe(f"train/{name}/effective", effective)
            metrics |= _statistics(f"reward/{env or 'all'}", [rollout.reward for rollout in arrived])
            if arrived or num_failed:
                metrics[f"train/{name}/all/has_error/mean"] = num_failed / (len(arrived) + num_failed)
        return metrics


def _of(rollouts: Sequence[Rollout], env: str | None) -> list[Rollout]:
    return [rollout for rollout in rollouts if env is None or rollout.env == env]


def _describe(prefix: str, rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return the statistics of some rollouts; nothing for none."""
    columns: dict[str, list[float]] = {
        "reward": [r.reward for r in rollouts],
        "num_output_tokens": [float(r.num_sampled) for r in rollouts],
        "num_input_tokens": [float(len(r.tokens_T) - r.num_sampled) for r in rollouts],
        "num_total_tokens": [float(len(r.tokens_T)) for r in rollouts],
        "num_turns": [float(r.num_turns) for r in rollouts],
    }
    metrics: dict[str, float] = {}
    for name, values in columns.items():
        metrics |= _statistics(f"{prefix}/{name}", values)
    is_truncated = [float(r.finish is FinishReason.LENGTH) for r in rollouts]
    metrics |= _statistics(f"{prefix}/is_truncated", is_truncated, ("mean",))
    for part in sorted({part for r in rollouts for part in r.reward_parts}):
        values = [r.reward_parts[part] for r in rollouts if part in r.reward_parts]
        metrics |= _statistics(f"{prefix}/{part}", values, ("mean",))
    return metrics


def _staleness(groups: Sequence[Group], version: int) -> dict[str, float]:
    """Versions between the oldest token and the step: the part until the group landed, and the part in the queue."""
    total = [version - r.oldest_version for group in groups for r in group.rollouts]
    in_queue = [version - group.landed_version for group in groups for _ in group.rollouts]
    in_flight = [t - q for t, q in zip(total, in_queue, strict=True)]
    named = {"off_policy": total, "off_policy/in_flight": in_flight, "off_policy/in_queue": in_queue}
    metrics: dict[str, float] = {}
    for name, values in named.items():
        metrics |= _statistics(name, values, ("mean", "max"))
    return metrics


def _solved(groups: Sequence[Sequence[float]]) -> dict[str, float]:
    """Shares of groups in which every member got at most 0, or every member at least 1."""
    if not groups:
        return {}
    none = sum(max(rewards) <= 0 for rewards in groups) / len(groups)
    every = sum(min(rewards) >= 1 for rewards in groups) / len(groups)
    prefix = "train/agg/all/solved"
    return {f"{prefix}_none": none, f"{prefix}_all": every, f"{prefix}_some": 1 - none - every}


def _statistics(prefix: str, values: Sequence[float], names: Sequence[str] = FULL) -> dict[str, float]:
    if not values:
        return {}
    numbers_N = np.asarray(values, np.float64)
    p10, p90 = np.percentile(numbers_N, [10, 90])
    known: Mapping[str, float] = {
        "mean": numbers_N.mean(),
        "max": numbers_N.max(),
        "min": numbers_N.min(),
        "p10": p10,
        "p90": p90,
    }
    return {f"{prefix}/{name}": float(known[name]) for name in names}
