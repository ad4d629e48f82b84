"""Guess a number in several turns: the smallest environment whose `reply` answers the policy (a built-in environment)."""

import random
import re
from collections.abc import Mapping, Sequence

from rl_jax.config import refuse
from rl_jax.envs.base import Task


class GuessNumber:
    """The policy writes a number each turn and hears "higher" or "lower". Endless: any index is a task.

    Reward 1 for a hit in the first turn, falling by 1/max_turns with each further turn; 0 without a hit.
    """

    def __init__(self, high: int = 20, max_turns: int = 6):
        refuse(
            [
                None if high >= 1 else f"high={high}: expected at least 1",
                None if max_turns >= 1 else f"max_turns={max_turns}: expected at least 1",
            ]
        )
        self._high = high
        self._max_turns = max_turns

    def task(self, index: int) -> Task:
        """Return the task with secret number `random.Random(index)`."""
        prompt = f"I think of a number from 1 to {self._high}. Guess it: write one number."
        return Task(prompt=prompt, answer=random.Random(index).randint(1, self._high))

    def reply(self, task: Task, completions: Sequence[str]) -> str | None:
        """Return the hint for the last guess; None at a hit or after the last turn."""
        guess = _guess(completions[-1])
        if guess == task.answer or len(completions) >= self._max_turns:
            return None
        if guess is None:
            return "write one number"
        return "higher" if guess < int(str(task.answer)) else "lower"

    def reward(self, task: Task, completions: Sequence[str]) -> Mapping[str, float]:
        """Judge the last guess and the number of turns."""
        is_hit = _guess(completions[-1]) == task.answer
        return {"reward": is_hit * (1 - (len(completions) - 1) / self._max_turns), "hit": float(is_hit)}


def _guess(completion: str) -> int | None:
    found = re.search(r"\d{1,9}", completion)
    return int(found.group()) if found else None
