"""Finished groups wait here until a batch is cut (step 7 of docs/walk.md).

Oldest first, and never at the price of a slow group: a batch is not cut while that would leave behind a group that
could then no longer be trained within the staleness bound. So no task is trained less often for being slow.

    groups that may live = batches that can still take them x groups of a batch        (admission, dispatch.py)
    a batch is cut       = when the oldest ready ones leave no one behind too late     (here)

The bound itself is enforced here: what is older is dropped. Knows no ledger, no sampler, no clock.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rl_jax.types import Rollout


@dataclass(frozen=True, kw_only=True)
class Group:
    """The usable members of one prompt. Example: four members were dispatched, one failed: len(rollouts) == 3."""

    rollouts: tuple[Rollout, ...]
    """At least one, by member."""
    landed_version: int
    """Policy version of the samplers when the last member was finished."""
    advantages: tuple[float, ...] | None = None
    """One for each rollout; set when the group is put into a batch."""

    @property
    def group_id(self) -> int:
        """Id of its prompt."""
        return self.rollouts[0].group_id

    @property
    def env(self) -> str:
        """Its environment."""
        return self.rollouts[0].env

    @property
    def oldest_version(self) -> int:
        """Policy version of its oldest sampled token."""
        return min(rollout.oldest_version for rollout in self.rollouts)


class Buffer:
    """The ready groups."""

    def __init__(self, *, groups_per_batch: int, max_staleness: int):
        self._groups_per_batch = groups_per_batch
        self._max_staleness = max_staleness
        self._groups: list[Group] = []

    def __len__(self) -> int:
        """Return the number of ready groups."""
        return len(self._groups)

    @property
    def groups(self) -> tuple[Group, ...]:
        """The ready groups, oldest first."""
        return tuple(sorted(self._groups, key=lambda group: (group.oldest_version, group.group_id)))

    def add(self, group: Group) -> None:
        """Take in a finished group."""
        self._groups.append(group)

    def drop_stale(self, version: int) -> list[Group]:
        """Remove and return the groups that are too old for the batch that a policy of `version` trains on next."""
        oldest = version - self._max_staleness
        stale = [group for group in self.groups if group.oldest_version < oldest]
        self._groups = [group for group in self.groups if group.oldest_version >= oldest]
        return stale

    def cut(self, version: int, in_flight: Sequence[int]) -> list[Group] | None:
        """Remove and return the batch that a policy of `version` trains on next, by group id; None = not yet.

        Args:
            in_flight: policy version at dispatch of each group that is being played.
        """
        ready = self.groups
        batch, rest = ready[: self._groups_per_batch], ready[self._groups_per_batch :]
        if len(batch) < self._groups_per_batch or self._leaves_behind(version, in_flight, rest):
            return None
        self._groups = list(rest)
        return sorted(batch, key=lambda group: group.group_id)

    def _leaves_behind(self, version: int, in_flight: Sequence[int], rest: Sequence[Group]) -> bool:
        """Say whether some group in flight must be waited for: later batches could not take all that are as old."""
        for oldest in set(in_flight):
            num_left = sum(v <= oldest for v in in_flight) + sum(group.oldest_version <= oldest for group in rest)
            num_later_batches = oldest + self._max_staleness - version
            if num_left > num_later_batches * self._groups_per_batch:
                return True
        return False
