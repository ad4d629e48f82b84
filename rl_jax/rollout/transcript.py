"""The tokens of one episode while it is played: it grows at its end only (step 4 of docs/walk.md).

The mask marks exactly the sampled tokens. Knows no text beyond what it is given, no environment, no sampler.
"""

import numpy as np

from rl_jax.sampler import Completion
from rl_jax.types import FinishReason


class Transcript:
    """Prompt, completions and replies in order.

    Example: prompt [5, 6], turn [7, 8], reply [9], turn [4]:
        tokens_T  = [5, 6, 7, 8, 9, 4]
        sampled_T = [0, 0, 1, 1, 0, 1]
    """

    def __init__(self, prompt_T: np.ndarray):
        self.tokens_T = prompt_T.astype(np.int32)
        self.sampled_T = np.zeros(len(prompt_T), np.bool_)
        self.logprobs_T = np.zeros(len(prompt_T), np.float32)
        self.versions_T = np.full(len(prompt_T), -1, np.int32)
        self.routed_experts_TLA: np.ndarray | None = None
        self.finish = FinishReason.STOP
        self.texts: list[str] = []
        """What the policy said in each turn."""

    @property
    def num_turns(self) -> int:
        """Turns that the policy has taken."""
        return len(self.texts)

    def add_turn(self, completion: Completion, text: str) -> None:
        """Append what the sampler wrote."""
        lengths = {len(completion.tokens_T), len(completion.logprobs_T), len(completion.versions_T)}
        if len(lengths) != 1:
            raise ValueError(
                f"completion has {len(completion.tokens_T)} tokens, {len(completion.logprobs_T)} log-probabilities and "
                f"{len(completion.versions_T)} versions: expected equally many; the sampler breaks its protocol"
            )
        self._append(completion.tokens_T, True, completion.logprobs_T, completion.versions_T)
        self._add_routes(completion.routed_experts_TLA)
        self.finish = completion.finish
        self.texts.append(text)

    def add_reply(self, ids_T: np.ndarray) -> None:
        """Append the environment's tokens: context, never trained."""
        length = len(ids_T)
        self._append(ids_T, False, np.zeros(length, np.float32), np.full(length, -1, np.int32))

    def _append(self, tokens_T: np.ndarray, is_sampled: bool, logprobs_T: np.ndarray, versions_T: np.ndarray) -> None:
        self.tokens_T = np.concatenate([self.tokens_T, tokens_T.astype(np.int32)])
        self.sampled_T = np.concatenate([self.sampled_T, np.full(len(tokens_T), is_sampled)])
        self.logprobs_T = np.concatenate([self.logprobs_T, logprobs_T.astype(np.float32)])
        self.versions_T = np.concatenate([self.versions_T, versions_T.astype(np.int32)])

    def _add_routes(self, routes_TLA: np.ndarray | None) -> None:
        """Keep the routes under which each token was made: a later turn computes earlier tokens again, maybe otherwise."""
        if routes_TLA is None or self.routed_experts_TLA is None:
            self.routed_experts_TLA = routes_TLA
            return
        fresh_TLA = routes_TLA[len(self.routed_experts_TLA) :]
        self.routed_experts_TLA = np.concatenate([self.routed_experts_TLA, fresh_TLA])
