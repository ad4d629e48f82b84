"""POST /v1/chat/completions and /v1/completions: text in, text out, whole or as server-sent events.

For evaluation and people; rollouts use token ids (rl_jax/http/generate.py). Both routes are one procedure in two forms:
a form says how the body is read and what a choice looks like.
"""

import secrets
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from aiohttp import web

from rl_jax.http.fields import Fields, read_body
from rl_jax.http.in_flight import Piece, collect
from rl_jax.http.prompts import encode, read_chat_settings, read_messages, read_prompts, render
from rl_jax.http.replies import (
    Body,
    chat_logprobs,
    completion_logprobs,
    json_reply,
    send_events,
    token_texts,
    usage,
    version_spans,
)
from rl_jax.http.service import (
    SERVICE,
    Order,
    Service,
    read_model,
    read_num_choices,
    read_prefix_key,
    read_sampling,
    read_stream,
    requests_of,
)
from rl_jax.http.text import TextStream
from rl_jax.sampler import Completion
from rl_jax.types import FinishReason

NO_ALTERNATIVES = "only the sampled token's own log-probability is known"
# They say who asks and where replies are kept, not what is sampled.
NO_EFFECT = ("user", "metadata", "store", "safety_identifier", "prompt_cache_key", "parallel_tool_calls")


@dataclass(frozen=True, kw_only=True)
class _Wanted:
    """An order, and what the reply should hold beside text."""

    order: Order
    has_logprobs: bool
    has_token_ids: bool


class _Form(Protocol):
    """How one of the two routes is read and written."""

    id_prefix: str
    object_name: str
    chunk_name: str

    def read(self, fields: Fields, service: Service, request: web.Request) -> _Wanted:
        """Read the body, and refuse it with every fault."""
        ...

    def whole(self, text: str) -> Body:
        """Return the text of a finished choice."""
        ...

    def delta(self, text: str, is_first: bool) -> Body:
        """Return new text of a choice."""
        ...

    def logprobs(self, texts: Sequence[str], logprobs_T: np.ndarray, num_chars: int) -> Body:
        """Return log-probabilities of tokens; the texts of those before them have `num_chars` characters."""
        ...
