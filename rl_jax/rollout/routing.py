"""Which replica a request goes to: all members of a group to one, so that their prompt is computed once.

Rendezvous hashing: each replica has a rank of its own for each key, so when one leaves or returns only its keys move.
Bounded by load: a group that has not begun passes over a replica with more than its share. Knows names and numbers.
"""

import hashlib
import math
from collections import OrderedDict
from collections.abc import Mapping

IMBALANCE = 1.25
"""A replica is passed over when it has more than this times the mean load."""
MAX_REMEMBERED = 8192
"""Groups whose replica is remembered; older ones are ranked again."""


def ranked(key: str, names: Mapping[str, int]) -> list[str]:
    """Return the names by their rank for `key`, best first."""
    return sorted(names, key=lambda name: hashlib.sha256(f"{key}\0{name}".encode()).digest(), reverse=True)


class Router:
    """Chooses, and remembers the choice of each group.

    Example: loads {"a": 9, "b": 1}, a new key that ranks a first: a has more than 1.25 x 5.5, so b; the key stays on b.
    """

    def __init__(self) -> None:
        self._chosen: OrderedDict[str, str] = OrderedDict()

    def choose(self, key: str, loads: Mapping[str, int]) -> str:
        """Return one of the routable replicas, given as name -> requests in flight; there must be one."""
        chosen = self._chosen.get(key)
        if chosen is None or chosen not in loads:
            chosen = self._first(key, loads)
        if key:
            self._chosen[key] = chosen
            self._chosen.move_to_end(key)
            while len(self._chosen) > MAX_REMEMBERED:
                self._chosen.popitem(last=False)
        return chosen

    def _first(self, key: str, loads: Mapping[str, int]) -> str:
        if not key:
            return min(loads, key=lambda name: loads[name])
        bound = math.ceil(IMBALANCE * (sum(loads.values()) + 1) / len(loads))
        return next(name for name in ranked(key, loads) if loads[name] < bound)
