"""Decode speed of an engine at a given batch size; experiments print it beside vLLM's."""

import time

import numpy as np

from rl_jax.engine.engine import Engine
from rl_jax.sampler import Request, SamplingParams


def decode_tokens_per_s(engine: Engine, batch: int, prompt_tokens: int, max_tokens: int) -> float:
    """Return sampled tokens per second of `batch` requests that all run to max_tokens; the first round, which compiles,
    is not timed."""
    _sample(engine, batch, prompt_tokens, max_tokens)
    started = time.perf_counter()
    _sample(engine, batch, prompt_tokens, max_tokens)
    return batch * max_tokens / (time.perf_counter() - started)


def _sample(engine: Engine, batch: int, prompt_tokens: int, max_tokens: int) -> None:
    tokens_T = np.arange(prompt_tokens, dtype=np.int32)
    for ticket in range(batch):
        params = SamplingParams(max_tokens=max_tokens, seed=ticket)
        engine.add(ticket, Request(request_id=str(ticket), tokens_T=tokens_T, params=params))
    while engine.has_work:
        engine.step()
