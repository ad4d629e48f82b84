"""Which task comes next: environments mixed by weight, each through its tasks epoch by epoch (step 3 of docs/walk.md).

Knows task indices only. The same seed gives the same sequence, and `state` is all that it takes to go on.
"""

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np


class Curriculum:
    """Smooth weighted round robin over environments; in each, a seeded permutation of its tasks per epoch, or 0, 1, 2, ...

    Example: weights {"a": 2, "b": 1} give a b a a b a a b a ...: after n draws each has its share to within one.
    """

    def __init__(
        self, weights: Mapping[str, float], sizes: Mapping[str, int | None], seed: int, max_fruitless: int = 100
    ):
        """`sizes`: tasks of each environment, None = endless. `max_fruitless`: see `count_fruitless`."""
        empty = [env for env in weights if sizes[env] == 0]
        if empty:
            raise ValueError(f"environment {empty[0]} has size 0: it has no task; check its settings")
        self._weights = dict(weights)
        self._sizes = dict(sizes)
        self._seed = seed
        self._max_fruitless = max_fruitless
        self._credits = dict.fromkeys(weights, 0.0)
        self._positions = dict.fromkeys(weights, 0)
        self._fruitless = dict.fromkeys(weights, 0)
        self._permutations: dict[str, tuple[int, Sequence[int]]] = {}

    @property
    def envs(self) -> tuple[str, ...]:
        """The environments."""
        return tuple(self._weights)

    def next(self) -> tuple[str, int]:
        """Return (environment, task index)."""
        for env, weight in self._weights.items():
            self._credits[env] += weight
        env = max(self._credits, key=lambda name: self._credits[name])  # of equals the first
        self._credits[env] -= sum(self._weights.values())
        position = self._positions[env]
        self._positions[env] = position + 1
        return env, self._task(env, position)

    def count_fruitless(self, env: str, why: str) -> None:
        """Note that a task gave no usable rollout.

        Raises:
            ValueError: so did every one of the last `max_fruitless` tasks of this environment.
        """
        self._fruitless[env] += 1
        if self._fruitless[env] >= self._max_fruitless:
            raise ValueError(
                f"environment {env}: {self._fruitless[env]} tasks in a row gave no usable rollout; the last: {why}; "
                "correct the environment, raise the context length or choose shorter tasks"
            )

    def count_fruitful(self, env: str) -> None:
        """Note that a task gave a usable rollout."""
        self._fruitless[env] = 0

    def progress(self) -> dict[str, float]:
        """Return epochs begun so far (tasks, if endless) of each environment."""
        return {env: position / (self._sizes[env] or 1) for env, position in self._positions.items()}

    def state(self) -> dict[str, dict[str, float]]:
        """Return what `restore` takes; fit for JSON."""
        return {"credits": dict(self._credits), "positions": dict(self._positions)}

    def restore(self, state: Mapping[str, Mapping[str, float]]) -> None:
        """Go on from `state`. An environment that was not there begins at its first task; one that is gone is forgotten."""
        for env in self._weights:
            self._credits[env] = float(state["credits"].get(env, 0.0))
            self._positions[env] = int(state["positions"].get(env, 0))

    def _task(self, env: str, position: int) -> int:
        size = self._sizes[env]
        if size is None:
            return position
        epoch, index = divmod(position, size)
        if self._permutations.get(env, (-1,))[0] != epoch:
            self._permutations[env] = (epoch, _permutation(self._seed, env, epoch, size))
        return int(self._permutations[env][1][index])


def _permutation(seed: int, env: str, epoch: int, size: int) -> Sequence[int]:
    name = int.from_bytes(hashlib.blake2b(env.encode(), digest_size=8).digest(), "big")
    return np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, name, epoch)))).permutation(size).tolist()
