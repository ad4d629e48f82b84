"""What an environment is: a source of tasks that can answer the policy and judge it (step 6 of docs/walk.md).

An environment is a plain class, or a function. It knows text, never tokens, and runs in a worker process.

    class Double:                                       # envs.id = "my_module:Double"
        def __init__(self, digits: int = 1): ...        # [envs.settings] become keyword arguments
        def task(self, index: int) -> Task: ...         # the same task from the same index, always
        def reward(self, task, completions) -> float: ...        # or {"reward": 0.5, "exact": 0.0}
        def reply(self, task, completions) -> str | None: ...    # optional: the next user turn, None ends the episode
        def solution(self, task) -> str: ...                     # optional: what a perfect policy would write

    def double(index: int, digits: int = 1):            # envs.id = "my_module:double"
        return f"Double {index}", lambda completion: float(completion.strip() == str(2 * index))

Methods see the whole episode each time (`completions`: the policy's text of each turn), so a worker can die and be
replaced between any two calls, and the calls of one episode may meet different processes. The task is made anew for
each call: `task(index)` must depend on its index and the settings alone. Python's global random generator is seeded
with the index before it, and sets of strings have the same order in every worker.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable


@dataclass(frozen=True, kw_only=True)
class Task:
    """One problem. `prompt` is a user message, or a list of chat messages {"role", "content"}."""

    prompt: str | Sequence[Mapping[str, str]]
    answer: object = None
    info: Mapping[str, object] = field(default_factory=dict)


@runtime_checkable
class Environment(Protocol):
    """A source of tasks and rewards. `size` (optional attribute): number of tasks; absent or None = endless."""

    def task(self, index: int) -> Task:
        """Return task `index`, the same for the same index in every process."""
        ...

    def reward(self, task: Task, completions: Sequence[str]) -> float | Mapping[str, float]:
        """Judge a finished episode. A mapping must hold "reward"; its other entries are parts, shown in metrics."""
        ...


@runtime_checkable
class MultiTurn(Environment, Protocol):
    """An environment that answers the policy."""

    def reply(self, task: Task, completions: Sequence[str]) -> str | None:
        """Return the next user turn, or None when the episode is over."""
        ...


@runtime_checkable
class Solved(Environment, Protocol):
    """An environment that knows the way: python -m rl_jax.sft trains on it."""

    def solution(self, task: Task) -> str:
        """Return the text that a perfect policy would write in its one turn."""
        ...
