"""What a fleet has done since it started, as its clients count it: servers that restart begin at 0. Knows no server."""

import time
from collections.abc import Callable

from rl_jax.sampler import Completion, Request


class FleetTally:
    """See the module."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` gives seconds."""
        self._clock = clock
        self.num_sampled_tokens = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_redispatched = 0
        self.num_preemptions = 0
        self._past_busy_s = 0.0
        self._num_running = 0
        self._since_s = 0.0
        self._seen: dict[str, tuple[int, int]] = {}

    def count(self, request: Request, completion: Completion) -> None:
        """Add a completion."""
        self.num_sampled_tokens += len(completion.tokens_T)
        self.num_prompt_tokens += len(request.tokens_T)
        self.num_cached_tokens += completion.num_cached_tokens

    def busy(self) -> "FleetTally":
        """Return a context in which a request is out."""
        return self

    def __enter__(self) -> None:
        self._since_s = self._since_s if self._num_running else self._clock()
        self._num_running += 1

    def __exit__(self, *error: object) -> None:
        self._num_running -= 1
        if not self._num_running:
            self._past_busy_s += self._clock() - self._since_s

    @property
    def busy_s(self) -> float:
        """Seconds in which at least one request was out."""
        return self._past_busy_s + (self._clock() - self._since_s if self._num_running else 0.0)

    def see_preemptions(self, name: str, num_syncs: int, num_preemptions: int) -> None:
        """Count preemptions of a replica since the last look, but for those of a pause: they say nothing of a full cache."""
        syncs_before, before = self._seen.get(name, (-1, 0))
        if syncs_before == num_syncs:
            self.num_preemptions += max(0, num_preemptions - before)
        self._seen[name] = (num_syncs, num_preemptions)
