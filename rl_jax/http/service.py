"""What every route works with, and what all sampling routes do with a body: defaults, limits, Requests.

Knows the Sampler protocol and the Tokenizer; which sampler runs it does not know.
"""

import dataclasses
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from aiohttp import web

from rl_jax.http.config import ServeConfig
from rl_jax.http.errors import Refused
from rl_jax.http.fields import Fields, is_number
from rl_jax.http.in_flight import InFlight, StreamingSampler
from rl_jax.sampler import Request, SamplingParams
from rl_jax.tokenizer import Tokenizer

MAX_CHOICES = 128  # of one prompt
MAX_REQUESTS = 1024  # of one call: prompts times choices
_MAX_INT = 2**31 - 1


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


@dataclass(frozen=True, kw_only=True)
class Order:
    """What a sampling route was asked for, whatever its form."""

    prompts_P_T: Sequence[np.ndarray]
    params: SamplingParams
    """max_tokens as asked for, or as the config says; 0 = what the context has room for. Seed of the first choice."""
    num_choices: int
    """Of each prompt."""
    prefix_key: str
    is_streamed: bool
    wants_usage: bool
    """A streamed reply ends with a chunk of token counts."""
    skip_special: bool = True

    @property
    def num_requests(self) -> int:
        """Completions to write."""
        return len(self.prompts_P_T) * self.num_choices

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts, each counted once."""
        return sum(map(len, self.prompts_P_T))


def read_model(fields: Fields, service: Service) -> None:
    """Read the name of the policy; no name is the right one.

    Raises:
        Refused: 404, there is no such policy.
    """
    name = service.config.model_name
    asked = fields.text("model", name)
    if asked != name:
        raise Refused(f"model={asked!r:.80}: not served here; expected {name!r}", status=404, code="model_not_found")


def read_stream(fields: Fields) -> tuple[bool, bool]:
    """Return whether the reply is streamed, and whether it then ends with token counts."""
    options = fields.table("stream_options")
    wants_usage = options.flag("include_usage")
    options.neutral("continuous_usage_stats", False)
    options.close()
    return fields.flag("stream"), wants_usage


def read_prefix_key(fields: Fields, request: web.Request) -> str:
    """Return what requests with a common prompt share: the session's header, or a name of their own.

    The salt cannot change what is sampled: cached prefixes are bound to the version of the weights that made them.
    """
    fields.neutral("priority", 0)
    salt = fields.text("cache_salt")
    return f"{salt}/{request.headers.get('X-Session-ID') or secrets.token_hex(8)}"


def read_sampling(fields: Fields, service: Service, max_tokens_keys: Sequence[str] = ("max_tokens",)) -> SamplingParams:
    """Read how to sample; keys that are absent come from the config."""
    config, tokenizer = service.config, service.tokenizer
    max_tokens = [fields.integer(key, 0, 1, _MAX_INT) for key in max_tokens_keys]
    if len({value for value in max_tokens if value}) > 1:
        fields.fault(f"{' and '.join(max_tokens_keys)} differ: {max_tokens}; give one")
    stop_token_ids = fields.integers("stop_token_ids", service.vocab_size - 1)
    ends = () if fields.flag("ignore_eos") else tokenizer.stop_token_ids
    _read_neutral(fields)
    return SamplingParams(
        max_tokens=max(max_tokens) or config.max_tokens,
        temperature=fields.number("temperature", config.temperature, 0.0),
        top_p=fields.take("top_p", config.top_p, "a number in (0, 1]", _is_top_p),
        top_k=max(0, fields.integer("top_k", config.top_k, -1, _MAX_INT)),
        min_p=fields.number("min_p", config.min_p, 0.0, 1.0),
        stop_token_ids=tuple(dict.fromkeys([*stop_token_ids, *ends])),
        stop=fields.texts("stop"),
        seed=fields.integer("seed", secrets.randbits(62), 0, 2**63 - 1),
        return_routed_experts=fields.flag("return_routed_experts", config.return_routed_experts),
    )


def _is_top_p(value: object) -> bool:
    return is_number(value) and 0 < value <= 1


def _read_neutral(fields: Fields) -> None:
    """Allow what other servers can do to the distribution, where it is switched off."""
    fields.neutral("frequency_penalty", 0)
    fields.neutral("presence_penalty", 0)
    fields.neutral("repetition_penalty", 1)
    fields.neutral("min_tokens", 0)
    fields.neutral("logit_bias", {})
    fields.neutral("include_stop_str_in_output", False)
    fields.neutral("prompt_logprobs")


def read_num_choices(fields: Fields) -> int:
    """Return how many completions each prompt gets."""
    return fields.integer("n", 1, 1, MAX_CHOICES)


def requests_of(service: Service, order: Order, request_id: str) -> list[Request]:
    """Return the Requests of an order: all choices of the first prompt, then of the second ...

    Raises:
        Refused: a prompt is empty, or leaves no room in the context.
    """
    if order.num_requests > MAX_REQUESTS:
        raise Refused(
            f"{len(order.prompts_P_T)} prompts with n={order.num_choices}: {order.num_requests} completions in one "
            f"request; expected at most {MAX_REQUESTS}"
        )
    requests = []
    for prompt_T in order.prompts_P_T:
        room = _room(service, prompt_T)
        for choice in range(order.num_choices):
            params = dataclasses.replace(
                order.params, max_tokens=min(order.params.max_tokens or room, room), seed=order.params.seed + choice
            )
            name = f"{request_id}-{len(requests)}"
            requests.append(Request(request_id=name, tokens_T=prompt_T, params=params, prefix_key=order.prefix_key))
    return requests


def _room(service: Service, prompt_T: np.ndarray) -> int:
    """Return how many tokens may follow a prompt."""
    if not len(prompt_T):
        raise Refused("the prompt has 0 tokens; expected at least 1")
    if len(prompt_T) >= service.max_len:
        raise Refused(
            f"the prompt has {len(prompt_T)} tokens; the context holds max_len={service.max_len}, prompt and completion "
            f"together; shorten the prompt to {service.max_len - 1} tokens or fewer",
            code="context_length_exceeded",
        )
    return service.max_len - len(prompt_T)
