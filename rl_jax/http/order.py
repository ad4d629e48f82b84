"""What a sampling route is asked for: defaults, limits, and the Requests that come of it. Knows no form of reply."""

import dataclasses
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from aiohttp import web

from rl_jax.http.errors import Refused
from rl_jax.http.fields import Fields, is_number
from rl_jax.http.service import Service
from rl_jax.sampler import Request, SamplingParams

MAX_CHOICES = 128  # of one prompt
MAX_REQUESTS = 1024  # of one call: prompts times choices
MAX_TEMPERATURE = 1000.0  # beyond it nothing changes any more
_MAX_INT = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class Order:
    """What to sample, and how to tell it."""

    prompts_P_T: Sequence[np.ndarray] = ()
    params: SamplingParams
    """With the seed of the first choice, and max_tokens as asked for: 0 = what the context has room for."""
    num_choices: int
    """Of each prompt."""
    prefix_key: str
    skip_special: bool
    """Leave special tokens out of texts."""
    is_streamed: bool
    wants_usage: bool
    """A streamed reply ends with a chunk of token counts."""

    @property
    def num_requests(self) -> int:
        """Completions to write."""
        return len(self.prompts_P_T) * self.num_choices


def read_order(
    fields: Fields,
    sampling: Fields,
    service: Service,
    request: web.Request,
    max_tokens_keys: Sequence[str] = ("max_tokens",),
) -> Order:
    """Read what all sampling routes know, but the prompts.

    Args:
        fields: the body.
        sampling: where sampling keys stand: the body, or a table in it.

    Raises:
        Refused: 404, there is no such policy.
    """
    read_model(fields, service)
    options = fields.table("stream_options")
    wants_usage = options.flag("include_usage")
    options.neutral("continuous_usage_stats", False)
    options.close()
    return Order(
        params=_read_params(sampling, service, max_tokens_keys),
        num_choices=sampling.integer("n", 1, 1, MAX_CHOICES),
        prefix_key=_read_prefix_key(fields, request),
        skip_special=sampling.flag("skip_special_tokens", True),
        is_streamed=fields.flag("stream"),
        wants_usage=wants_usage,
    )


def read_model(fields: Fields, service: Service) -> None:
    """Read the name of the policy; no name is the right one.

    Raises:
        Refused: 404, there is no such policy.
    """
    name = service.config.model_name
    asked = fields.text("model", name)
    if asked != name:
        raise Refused(f"model={asked!r:.80}: not served here; expected {name!r}", status=404, code="model_not_found")


def requests_of(service: Service, order: Order, request_id: str) -> list[Request]:
    """Return the Requests of an order: all choices of the first prompt, then of the second ...

    Raises:
        Refused: a prompt is empty, or leaves no room in the context.
    """
    if order.num_requests > MAX_REQUESTS:
        raise Refused(
            f"{len(order.prompts_P_T)} prompts with n={order.num_choices} are {order.num_requests} completions; "
            f"expected at most {MAX_REQUESTS} in one request"
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


def _read_prefix_key(fields: Fields, request: web.Request) -> str:
    """Return what the turns of one session share.

    The salt cannot change what is sampled: cached prefixes are bound to the version of the weights that made them.
    """
    fields.neutral("priority", 0)
    salt = fields.text("cache_salt")
    return f"{salt}/{request.headers.get('X-Session-ID') or secrets.token_hex(8)}"


def _read_params(fields: Fields, service: Service, max_tokens_keys: Sequence[str]) -> SamplingParams:
    config, tokenizer = service.config, service.tokenizer
    max_tokens = [fields.integer(key, 0, 1, _MAX_INT) for key in max_tokens_keys]
    if len({value for value in max_tokens if value}) > 1:
        fields.fault(f"{' and '.join(max_tokens_keys)} are {' and '.join(map(str, max_tokens))}; give one")
    stop_token_ids = fields.integers("stop_token_ids", service.vocab_size - 1)
    ends = () if fields.flag("ignore_eos") else tokenizer.stop_token_ids
    _refuse_other_distributions(fields)
    return SamplingParams(
        max_tokens=max(max_tokens) or config.max_tokens,
        temperature=fields.number("temperature", config.temperature, 0.0, MAX_TEMPERATURE),
        top_p=fields.take("top_p", config.top_p, "a number in (0, 1]", lambda v: is_number(v) and 0 < v <= 1),
        top_k=max(0, fields.integer("top_k", config.top_k, -1, _MAX_INT)),
        min_p=fields.number("min_p", config.min_p, 0.0, 1.0),
        stop_token_ids=tuple(dict.fromkeys([*stop_token_ids, *ends])),
        stop=fields.texts("stop"),
        seed=fields.integer("seed", secrets.randbits(62), 0, 2**63 - 1),
        return_routed_experts=fields.flag("return_routed_experts", config.return_routed_experts),
    )


def _refuse_other_distributions(fields: Fields) -> None:
    """Allow what other servers can do to the distribution, but only where it is switched off."""
    fields.neutral("frequency_penalty", 0)
    fields.neutral("presence_penalty", 0)
    fields.neutral("repetition_penalty", 1)
    fields.neutral("min_tokens", 0)
    fields.neutral("logit_bias", {})
    fields.neutral("include_stop_str_in_output", False)
    fields.neutral("prompt_logprobs")
