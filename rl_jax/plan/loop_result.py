"""What a simulated loop is given in hardware, and what comes of it."""

from dataclasses import dataclass

from rl_jax.plan.replica import SpeedModel


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """Hardware of one simulation."""

    speed: SpeedModel
    num_replicas: int
    slots: int
    """Sequences that a replica runs at once."""
    kv_tokens: int
    """Tokens that its cache holds."""
    num_prefill_servers: int = 0
    """Of the whole fleet; 0 = replicas prefill between their decode steps."""
    train_s: float
    """Of one batch."""
    transfer_s: float = 0.0
    """Of an update, while the replicas go on and the trainer waits."""
    pause_s: float = 0.0
    """In which no replica decodes, at the end of an update."""


@dataclass(frozen=True, kw_only=True)
class LoopResult:
    """What the measured steps were like.

    Example: step_s=300.0, trainer_idle_frac=0.26, staleness={1: 4000, 2: 3680} says that the trainer waited 78 s of each
    step, and 3680 of the trained rollouts held a token two versions old.
    """

    step_s: float
    """Mean seconds from batch to batch."""
    trainer_idle_frac: float
    """Share of the time in which the trainer waits for a batch."""
    sampler_idle_frac: float
    """Share of the replicas' time in which they decode nothing, pauses included."""
    paused_frac: float
    """Share of the time in which they are paused."""
    occupancy: float
    """Running sequences over slots, mean over time."""
    running: float
    """Sequences that decode at once in the whole fleet, mean over time."""
    inflight: float
    """Rollouts in flight, mean over time."""
    flight_s: float
    """Mean seconds from dispatch to end of a rollout."""
    landed_per_s: float
    """Rollouts that end in a second."""
    sampled_tokens_per_s: float
    """Decoded by the fleet."""
    trained_tokens: float
    """Mean tokens of a batch, prompts and replies included."""
    staleness: dict[int, int]
    """Rollouts trained by policy versions between their oldest token and the policy."""
    drops: dict[str, int]
    """Rollouts dropped by reason, over the whole simulation."""
    totals: dict[str, int]
    """Whole simulation: dispatched = trained + dropped + ready + in_flight."""

    @property
    def staleness_mean(self) -> float:
        """Mean over trained rollouts."""
        num = sum(self.staleness.values())
        return sum(age * count for age, count in self.staleness.items()) / num if num else 0.0

    @property
    def staleness_max(self) -> int:
        """Oldest of any trained rollout."""
        return max(self.staleness, default=0)
