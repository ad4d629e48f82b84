"""How many rollouts may be in flight: grows while the sampler has room, shrinks when it has not (step 2 of docs/walk.md).

Additive work, multiplicative cuts, on the pressure of the sampler's KV cache. Knows numbers only; polls nobody itself.
"""

from dataclasses import dataclass

from rl_jax.config import refuse
from rl_jax.sampler import SamplerHealth

GROW, GROW_BELOW = 1.25, 0.6  # KV use; numbers of this file: Prime-RL 0.8, but that nothing in flight is cancelled
TRIM_ABOVE, TRIM_TO = 0.8, 0.7
PREEMPTED, CROWDED = 0.8, 0.9
CROWDED_FRAC, CROWDED_POLLS = 0.5, 6


@dataclass(frozen=True, kw_only=True)
class ConcurrencyConfig:
    """Bounds of the rollouts in flight. Without effect at max_staleness = 0: there a whole batch is dispatched at once."""

    initial_inflight: int = 0
    """Rollouts in flight at first. 0 = 1.5 x what the sampler runs at once, so that its slots are refilled at once."""
    min_inflight: int = 1
    """Never fewer; one group is always let through."""
    max_inflight: int = 1024
    """Never more."""
    poll_s: float = 1.0
    """Seconds between two looks at the sampler's health."""

    def __post_init__(self) -> None:
        refuse(
            [
                None if self.min_inflight >= 1 else f"min_inflight={self.min_inflight}: must be at least 1",
                None
                if self.max_inflight >= self.min_inflight
                else f"max_inflight={self.max_inflight}: must be at least min_inflight={self.min_inflight}",
                None
                if self.initial_inflight == 0 or self.min_inflight <= self.initial_inflight <= self.max_inflight
                else f"initial_inflight={self.initial_inflight}: must be 0 (by the sampler) or between "
                f"min_inflight={self.min_inflight} and max_inflight={self.max_inflight}",
                None if 0 < self.poll_s <= 3600 else f"poll_s={self.poll_s}: must be in (0, 3600]",
            ]
        )


class Concurrency:
    """The cap. Example: cap 20, KV use 0.4, 20 landed since the last change, the cap held work back: cap 25."""

    def __init__(self, config: ConcurrencyConfig, health: SamplerHealth):
        self._config = config
        self._cap = 0.0
        self._set(config.initial_inflight or 1.5 * health.max_running)
        self._num_landed = 0
        self._num_crowded = 0
        self._num_preemptions = health.num_preemptions

    @property
    def cap(self) -> int:
        """Rollouts that may be in flight."""
        return int(self._cap)

    def count_landed(self, num_rollouts: int) -> None:
        """Note finished rollouts: the cap grows at most once in the time in which all in flight were replaced."""
        self._num_landed += num_rollouts

    def update(self, health: SamplerHealth, num_inflight: int, is_limiting: bool) -> None:
        """Move the cap. `is_limiting`: the cap, and nothing else, held work back since the last update."""
        is_preempting = health.num_preemptions > self._num_preemptions
        self._num_preemptions = health.num_preemptions
        is_crowded = health.num_waiting > CROWDED_FRAC * health.num_running
        self._num_crowded = self._num_crowded + 1 if is_crowded else 0
        if num_inflight > self.cap:
            return  # the last cut has not taken effect yet
        if is_preempting:
            self._set(self._cap * PREEMPTED)
        elif health.kv_used_frac > TRIM_ABOVE:
            self._set(self._cap * TRIM_TO / health.kv_used_frac)
        elif self._num_crowded >= CROWDED_POLLS:
            self._set(self._cap * CROWDED)
        elif is_limiting and not is_crowded and health.kv_used_frac < GROW_BELOW and self._num_landed >= self.cap:
            self._set(self._cap * GROW)

    def _set(self, cap: float) -> None:
        self._cap = float(min(max(cap, self._config.min_inflight), self._config.max_inflight))
        self._num_landed = 0
        self._num_crowded = 0
