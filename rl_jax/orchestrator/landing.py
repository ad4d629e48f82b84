"""What becomes of a finished group: it waits for a batch, or is dropped with a reason (step 7 of docs/walk.md).

    failed members   -> dropped, each with its own reason
    survivors        -> ready, if at least two (one, for an advantage that needs no group) and their rewards differ
                     -> else dropped together: GROUP_INCOMPLETE or ZERO_VARIANCE

A run that only ever drops is stopped here. Knows no sampler and no time.
"""

import logging
from collections.abc import Sequence

import numpy as np

from rl_jax.advantages import Advantages, is_degenerate
from rl_jax.orchestrator.buffer import Buffer, Group
from rl_jax.orchestrator.config import OrchestratorConfig
from rl_jax.orchestrator.curriculum import Curriculum
from rl_jax.orchestrator.ledger import Ledger
from rl_jax.orchestrator.tally import Tally
from rl_jax.rollout.episode import Failure, Outcome
from rl_jax.types import DropReason, Rollout

logger = logging.getLogger(__name__)


class Landing:
    """See the module. The one place where rollouts are dropped, so that ledger and metrics agree."""

    def __init__(
        self,
        config: OrchestratorConfig,
        *,
        curriculum: Curriculum,
        advantages: Advantages,
        ledger: Ledger,
        tally: Tally,
        buffer: Buffer,
    ):
        self._config = config
        self._curriculum = curriculum
        self._advantages = advantages
        self._ledger = ledger
        self._tally = tally
        self._buffer = buffer
        self._num_fruitless = 0
        self._fruitless_rewards: list[float] = []
        self._logged: set[DropReason] = set()

    def land(self, env: str, outcomes: Sequence[Outcome], version: int) -> None:
        """Sort the members of a group that finished while the samplers were at `version`.

        Raises:
            ValueError: too many groups in a row had nothing to train on.
        """
        failures = [outcome for outcome in outcomes if isinstance(outcome, Failure)]
        rollouts = tuple(outcome for outcome in outcomes if isinstance(outcome, Rollout))
        for failure in failures:
            self.drop(failure.rollout_id, failure.reason, failure.detail)
        self._tally.count_group(env, rollouts, len(failures))
        verdict = self._verdict(rollouts)
        for rollout in rollouts:
            if verdict:
                self.drop(rollout.rollout_id, verdict, reward=rollout.reward)
            else:
                self._ledger.ready(rollout.rollout_id, rollout.reward)
        if rollouts:
            self._curriculum.count_fruitful(env)
        else:
            self._curriculum.count_fruitless(env, failures[0].detail)
        if verdict:
            self._count_fruitless(rollouts)
        else:
            self._buffer.add(Group(rollouts=rollouts, landed_version=version))
            self._num_fruitless = 0
            self._fruitless_rewards.clear()

    def drop(self, rollout_id: int, reason: DropReason, detail: str = "", reward: float | None = None) -> None:
        """Note in ledger and metrics that a rollout will not be trained."""
        self._ledger.drop(rollout_id, reason, detail, reward)
        self._tally.count_drop(reason)
        if detail and reason not in self._logged:
            self._logged.add(reason)
            logger.warning(
                "rollout %d dropped as %s: %s (later ones are only counted)", rollout_id, reason.value, detail
            )

    def advantages_of(self, rollouts: Sequence[Rollout]) -> tuple[float, ...]:
        """Return the advantage of each survivor of a group. A moving baseline moves: call once for each group."""
        num_output_tokens_G = np.array([r.num_sampled for r in rollouts])
        adv_G = self._advantages(
            np.array([r.reward for r in rollouts], np.float64),
            num_output_tokens_G,
            np.array([len(r.tokens_T) for r in rollouts]) - num_output_tokens_G,
            np.array([r.num_turns for r in rollouts]),
            rollouts[0].env,
        )
        return tuple(adv_G.tolist())

    def _verdict(self, rollouts: Sequence[Rollout]) -> DropReason | None:
        """Say why survivors are useless, or None."""
        needs_group = self._advantages.config.needs_group
        if len(rollouts) < (2 if needs_group else 1):
            return DropReason.GROUP_INCOMPLETE
        if not self._config.filter_zero_variance or not needs_group:  # a moving baseline needs no differences
            return None
        is_equal = is_degenerate(np.array([rollout.reward for rollout in rollouts], np.float64))
        # A length penalty can tell members of equal reward apart.
        return DropReason.ZERO_VARIANCE if is_equal and not any(self.advantages_of(rollouts)) else None

    def _count_fruitless(self, rollouts: Sequence[Rollout]) -> None:
        self._num_fruitless += 1
        self._fruitless_rewards.extend(rollout.reward for rollout in rollouts)
        limit = self._config.max_fruitless_batches * self._config.groups_per_batch
        if self._num_fruitless < limit:
            return
        mean = f"{np.mean(self._fruitless_rewards):.4g}" if self._fruitless_rewards else "unknown (all failed)"
        raise ValueError(
            f"none of the last {limit} groups could be trained: all members of a group got the same reward, or failed; "
            f"mean reward {mean}. Near the lowest reward the tasks are too hard for this policy (warm it up, make them "
            "easier), near the highest they are solved; filter_zero_variance=false trains on such groups all the same"
        )
