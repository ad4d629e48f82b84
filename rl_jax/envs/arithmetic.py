"""Problems of reasoning-gym, sums at first (a built-in environment; needs the extra "arithmetic").

Only the worker process imports reasoning-gym: it takes seconds.
"""

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from typing import cast

from rl_jax.config import ConfigError, refuse
from rl_jax.envs.answer import answer_of, tagged
from rl_jax.envs.base import Task


class Arithmetic:
    """Task `index` is entry `index` of a reasoning-gym data set: the same for the same dataset, seed and knobs.

    Args:
        dataset: name in reasoning-gym, for example chain_sum, products, gcd, countdown.
        seed: of the data set. Train and evaluation differ by seed.
        size: number of tasks.
        knobs: difficulty, handed to the data set, for example {min_terms = 2, max_terms = 2, max_digits = 1}.
        instruction: put on a line of its own before the question.
        tag: when set, the answer stands between <tag> and </tag>; without them the reward is 0.
    """

    def __init__(
        self,
        dataset: str = "chain_sum",
        seed: int = 0,
        size: int = 100_000,
        knobs: Mapping[str, object] | None = None,
        instruction: str = "",
        tag: str = "",
    ):
        from reasoning_gym.factory import DATASETS, create_dataset  # optional extra  # pyright: ignore[reportMissingImports]

        knobs = knobs or {}
        near = ", ".join(difflib.get_close_matches(dataset, DATASETS, n=5))
        refuse(
            [
                None
                if dataset in DATASETS
                else f"dataset={dataset!r}: not in reasoning-gym; near: {near or ', '.join(sorted(DATASETS))}",
                None if size >= 1 else f"size={size}: expected at least 1",
            ]
        )
        allowed = {f.name for f in dataclasses.fields(cast(type, DATASETS[dataset][1]))} - {"seed", "size"}
        refuse(
            f"knobs.{knob}: unknown knob of {dataset}; allowed: {', '.join(sorted(allowed))}"
            for knob in knobs
            if knob not in allowed
        )
        try:
            self._dataset = create_dataset(dataset, seed=seed, size=size, **knobs)
        except (AssertionError, TypeError, ValueError) as error:  # how its data sets refuse a value
            raise ConfigError([f"knobs={dict(knobs)!r}: refused by {dataset}: {error}"]) from error
        self._instruction = f"{instruction}\n" if instruction else ""
        self._tag = tag
        self.size = size

    def task(self, index: int) -> Task:
        """Return entry `index` of the data set."""
        if not 0 <= index < self.size:
            raise IndexError(f"task {index}: expected 0 <= index < size={self.size}")
        entry = self._dataset[index]
        return Task(prompt=self._instruction + entry["question"], answer=entry["answer"], info=entry)

    def reward(self, task: Task, completions: Sequence[str]) -> Mapping[str, float]:
        """Return the data set's own score (0 to 1), and whether the answer could not be read.

        Some scorers raise ValueError on an answer that is not of the expected form (prime_factorization on "zzz"): that
        answer is wrong, reward 0 and unreadable 1. Any other exception is a failure of the environment.
        """
        answer = answer_of(completions[0], self._tag)
        if answer is None:
            return {"reward": 0.0, "unreadable": 1.0}
        try:
            return {
                "reward": float(self._dataset.score_answer(answer=answer, entry=dict(task.info))),
                "unreadable": 0.0,
            }
        except ValueError:
            return {"reward": 0.0, "unreadable": 1.0}

    def solution(self, task: Task) -> str:
        """Return the data set's own answer, between tags if they are asked for."""
        return tagged(str(task.answer), self._tag)
