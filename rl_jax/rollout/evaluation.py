"""Evaluation on named environments: average and best of k samples for each task. Knows no trainer."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rl_jax.config import refuse
from rl_jax.envs.registry import EnvConfig
from rl_jax.rollout.episode import Draw, Failure, Player
from rl_jax.types import Rollout


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """What is evaluated, how often, and on how many samples."""

    envs: tuple[EnvConfig, ...] = ()
    """Environments of held-out tasks; each needs a name of its own beside those that are trained on."""
    interval_steps: int = 50
    """Evaluate before step 0, at the end, and every so many steps; 0 = only before step 0 and at the end."""
    num_tasks: int = 64
    """Tasks of each environment: the first ones, so that all evaluations see the same."""
    samples_per_task: int = 1
    """The k of avg@k and pass@k."""
    temperature: float = 1.0
    """Sampling temperature; 0 = greedy."""
    pass_reward: float = 1.0
    """A sample passes with at least this reward."""

    def __post_init__(self) -> None:
        refuse(
            [
                None if self.interval_steps >= 0 else f"interval_steps={self.interval_steps}: must be at least 0",
                None if self.num_tasks >= 1 else f"num_tasks={self.num_tasks}: must be at least 1",
                None if self.samples_per_task >= 1 else f"samples_per_task={self.samples_per_task}: must be at least 1",
                None if self.temperature >= 0 else f"temperature={self.temperature}: must be at least 0",
            ]
        )


async def evaluate(config: EvaluateConfig, player: Player) -> tuple[dict[str, float], list[Rollout]]:
    """Play the held-out tasks of every environment.

    Returns:
        eval/<env>/{avg@k, pass@k, pass^k, num_failed, <part>} and the rollouts. A sample whose environment failed counts
        in num_failed and in no average.
    """
    metrics: dict[str, float] = {}
    rollouts: list[Rollout] = []
    for env in config.envs:
        outcomes = await player.run_wave(await _draws(config, player, env.label))
        metrics |= _summary(config, env.label, outcomes)
        rollouts += [o for group in outcomes for o in group if isinstance(o, Rollout)]
    return metrics, rollouts


async def _draws(config: EvaluateConfig, player: Player, env: str) -> list[Draw]:
    size = await player.pool.info(env)
    num_tasks = config.num_tasks if size is None else min(size, config.num_tasks)
    k = config.samples_per_task
    return [
        Draw(group_id=task, env=env, task_id=task, rollout_ids=tuple(range(task * k, task * k + k)))
        for task in range(num_tasks)
    ]


def _summary(config: EvaluateConfig, env: str, outcomes: Sequence[Sequence[Rollout | Failure]]) -> dict[str, float]:
    k = config.samples_per_task
    groups = [[o for o in group if isinstance(o, Rollout)] for group in outcomes]
    finished = [group for group in groups if group]
    metrics = {f"eval/{env}/num_failed": float(sum(len(group) for group in outcomes) - sum(map(len, groups)))}
    if not finished:
        return metrics
    passed = [[o.reward >= config.pass_reward for o in group] for group in finished]
    metrics |= {
        f"eval/{env}/avg@{k}": float(np.mean([np.mean([o.reward for o in group]) for group in finished])),
        f"eval/{env}/pass@{k}": float(np.mean([any(group) for group in passed])),
        f"eval/{env}/pass^{k}": float(np.mean([all(group) for group in passed])),
        f"eval/{env}/num_output_tokens": float(np.mean([o.num_sampled for group in finished for o in group])),
    }
    for part in sorted({part for group in finished for o in group for part in o.reward_parts}):
        values = [o.reward_parts[part] for group in finished for o in group if part in o.reward_parts]
        metrics[f"eval/{env}/{part}"] = float(np.mean(values))
    return metrics
