"""What every route works with. Knows the Sampler protocol and the Tokenizer; which sampler runs it does not know."""

from dataclasses import dataclass

from aiohttp import web

from rl_jax.http.config import ServeConfig
from rl_jax.http.in_flight import InFlight, StreamingSampler
from rl_jax.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Service:
    """The one policy that this server serves."""

    sampler: StreamingSampler
    in_flight: InFlight
    tokenizer: Tokenizer
    config: ServeConfig
    max_len: int
    """Longest sequence in tokens, prompt and completion together."""
    vocab_size: int
    """Rows of the embedding: token ids are below it."""
    started_s: int
    """Unix time."""


SERVICE = web.AppKey("service", Service)
