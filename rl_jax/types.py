"""The records that cross rooms: Prompt, Rollout, Batch (NumPy and the standard library only).

Every step of docs/walk.md hands one of these to the next. Token text never crosses rooms: token ids do.
"""

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np


class FinishReason(StrEnum):
    """Why a sampler stopped writing."""

    STOP = "stop"  # a stop token or a stop string
    LENGTH = "length"  # max_tokens or the context length
    ABORT = "abort"  # cancelled by the caller or by shutdown


class DropReason(StrEnum):
    """Why a rollout was not trained. Every rollout ends trained or under one of these."""

    STALE = "stale"  # older than max_staleness when its batch was cut
    ZERO_VARIANCE = "zero_variance"  # every member of its group got the same reward
    REWARD_ERROR = "reward_error"  # the environment raised
    REWARD_TIMEOUT = "reward_timeout"  # the environment missed its deadline
    REWARD_INVALID = "reward_invalid"  # the reward was not a finite number
    PROMPT_TOO_LONG = "prompt_too_long"  # the prompt leaves no room in the context
    SAMPLER_LOST = "sampler_lost"  # its sampler failed; the group was dispatched again
    ROLLOUT_TIMEOUT = "rollout_timeout"  # not finished within rollout_timeout_s
    GROUP_INCOMPLETE = "group_incomplete"  # fewer than two usable members were left in its group
    RUN_ENDED = "run_ended"  # finished or in flight when the last step was trained
    REWOUND = "rewound"  # made after the checkpoint that a resumed run went back to


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One task, to be sampled `group_size` times.

    Example: Prompt(group_id=7, env="reverse_text", task_id=1041, tokens_T=np.array([257, 97, 98, 258]), seed=3)
    is the eighth group of a run: task 1041 of reverse_text, "ab" between two special tokens.
    """

    group_id: int
    """Unique in a run, rises in dispatch order."""
    env: str
    """Name of the environment in the config."""
    task_id: int
    """Index of the task in its environment: the environment makes the same task from the same index."""
    tokens_T: np.ndarray
    """int32 token ids of the prompt."""
    seed: int
    """Seed of the run; sampling keys derive from (seed, group_id, member, position)."""


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """One finished episode: exactly the tokens that the sampler saw, and what became of them.

    Example, prompt "ab" -> "ba" in two sampled tokens and a stop token:
        tokens_T   = [257, 97, 98, 258,   98,   97,  259]
        sampled_T  = [  0,  0,  0,   0,    1,    1,    1]
        logprobs_T = [  0,  0,  0,   0, -0.7, -0.2, -0.1]   sampler's, processed (temperature, top-p applied)
        versions_T = [ -1, -1, -1,  -1,    4,    4,    5]   weights swapped before the last token
        reward     = 1.0, reward_parts = {"match": 1.0, "exact": 1.0}
    """

    rollout_id: int
    group_id: int
    member: int
    env: str
    task_id: int
    tokens_T: np.ndarray
    """int32, prompt, completions and environment replies in order."""
    sampled_T: np.ndarray
    """bool, True where the policy sampled the token: only these are trained."""
    logprobs_T: np.ndarray
    """float32, the sampler's log-probability where sampled, 0 elsewhere."""
    versions_T: np.ndarray
    """int32, policy version that made the token where sampled, -1 elsewhere."""
    temperature: float
    finish: FinishReason
    reward: float
    reward_parts: dict[str, float] = field(default_factory=dict)
    num_turns: int = 1
    routed_experts_TLA: np.ndarray | None = None
    """uint16, experts chosen for each input token by the sampler, or None when not asked for."""

    @property
    def num_sampled(self) -> int:
        """Number of sampled tokens."""
        return int(self.sampled_T.sum())

    @property
    def oldest_version(self) -> int:
        """Policy version of its oldest sampled token: staleness counts from here."""
        return int(self.versions_T[self.sampled_T].min())


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One micro-batch of packed sequences: all arrays are [B, T], fixed shape, padded with segment 0.

    Index t describes the prediction of `targets_BT[:, t]` from the tokens up to and including t; targets never
    cross a segment, so no shift is left to do on the device.

    Example, one row with sequences [5, 6, 7] (7 sampled) and [8, 9] (9 sampled), T=6:
        tokens_BT     = [[5, 6, 7, 8, 9, 0]]      positions_BT = [[0, 1, 2, 0, 1, 0]]
        targets_BT    = [[6, 7, 0, 9, 0, 0]]      segments_BT  = [[1, 1, 1, 2, 2, 0]]
        mask_BT       = [[0, 1, 0, 1, 0, 0]]
    """

    tokens_BT: np.ndarray
    """int32"""
    targets_BT: np.ndarray
    """int32, the next token of the same segment, 0 at its end and in padding."""
    positions_BT: np.ndarray
    """int32, restarts at 0 with each segment."""
    segments_BT: np.ndarray
    """int32, 1.. within a row, 0 = padding."""
    mask_BT: np.ndarray
    """bool, True where the target was sampled by the policy and is trained."""
    logprobs_BT: np.ndarray
    """float32, sampler log-probability of the target where mask, 0 elsewhere."""
    advantages_BT: np.ndarray
    """float32, advantage of the target where mask, 0 elsewhere."""
    temperatures_BT: np.ndarray
    """float32, sampling temperature of the target, 1 where not sampled."""
    rollouts_BT: np.ndarray
    """int32, index of the rollout in the step's list, -1 in padding: host-side metrics by environment or rollout."""

    @property
    def num_trained_tokens(self) -> int:
        """Number of trained tokens."""
        return int(self.mask_BT.sum())

    @property
    def num_tokens(self) -> int:
        """Number of tokens that are no padding."""
        return int((self.segments_BT > 0).sum())
