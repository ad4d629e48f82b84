"""The Sampler protocol: all that the orchestrator knows of whatever writes tokens (step 5 of docs/walk.md).

Implementations: the embedded JAX engine (rl_jax/engine) and, in the fleet, vLLM over HTTP. The caller never learns
which one runs. No JAX here.

    caller                         sampler
      | generate(request) ---------> waiting -> running -> Completion (tokens, logprobs, version of each token)
      | publish(weights, v+1) -----> swapped between two decode steps; running requests go on and their later
      |      <--- returns ---------  tokens carry v+1; prefixes cached under v are never used for v+1
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from rl_jax.types import FinishReason


class SamplerLost(RuntimeError):
    """The sampler cannot finish a request: its process, thread or connection is gone. Dispatch the work again."""


class SamplerGone(SamplerLost):
    """It is lost for good, as by a number that is not finite: dispatching again would only hide the cause."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to sample one completion. Log-probabilities returned are those of the distribution that these settings make."""

    max_tokens: int
    temperature: float = 1.0
    """0 = greedy; then log-probabilities are those of temperature 1."""
    top_p: float = 1.0
    top_k: int = 0
    """0 = off."""
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    """Sampling one of these ends the completion; the token is part of it."""
    stop: tuple[str, ...] = ()
    """Text that ends the completion when it appears in the decoded completion; tokens sampled so far are kept."""
    seed: int = 0
    """The token at position i is drawn with a key made of (seed, i): not of what else is in the batch."""
    return_routed_experts: bool = False


@dataclass(frozen=True, kw_only=True)
class Request:
    """One completion to write."""

    request_id: str
    tokens_T: np.ndarray
    """int32 prompt."""
    params: SamplingParams
    prefix_key: str = ""
    """Requests of one group share it: their prompt is computed once, and a router keeps them on one replica."""


@dataclass(frozen=True, kw_only=True)
class Completion:
    """What a sampler wrote for one Request; arrays cover the sampled tokens only."""

    tokens_T: np.ndarray
    """int32"""
    logprobs_T: np.ndarray
    """float32, processed log-probability of each token."""
    versions_T: np.ndarray
    """int32, policy version that made each token."""
    finish: FinishReason
    num_cached_tokens: int = 0
    """Prompt tokens whose KV came from the prefix cache."""
    routed_experts_TLA: np.ndarray | None = None
    """uint16, rows for every input token that went through the model: prompt + completion - 1."""


@dataclass(frozen=True, kw_only=True)
class SamplerHealth:
    """State of a sampler now, and its counters since it started."""

    version: int
    num_running: int
    num_waiting: int
    max_running: int
    kv_used_frac: float
    num_sampled_tokens: int
    num_prompt_tokens: int
    num_cached_tokens: int
    busy_s: float
    """Seconds in which the sampler was computing."""
    num_preemptions: int = 0


@runtime_checkable
class Sampler(Protocol):
    """See the module. Every method may raise SamplerLost."""

    async def generate(self, request: Request) -> Completion:
        """Write one completion. Cancelling the call aborts the request."""
        ...

    async def generate_many(self, requests: Sequence[Request]) -> list[Completion]:
        """Write the completions of one wave, in the order of its requests. Cancelling the call aborts all of them.

        The wave is submitted whole: nothing of it starts before all of it is there, so that in a synchronous run the
        batches, and with them every bit of the result, depend on the order of the requests only.
        """
        ...

    async def publish(self, weights: object, version: int) -> None:
        """Sample from `weights` as policy `version` from the next decode step on; returns when that holds."""
        ...

    async def score(self, tokens_T: np.ndarray) -> np.ndarray:
        """Return float32 [T]: log-probability of each token given those before it (temperature 1); 0 at index 0."""
        ...

    async def pause(self) -> None:
        """Stop decoding; running requests keep their KV."""
        ...

    async def resume(self) -> None:
        """Go on decoding."""
        ...

    async def health(self) -> SamplerHealth:
        """Return the state now."""
        ...

    async def close(self) -> None:
        """Abort everything and free the sampler."""
        ...
