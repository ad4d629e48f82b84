"""POST /inference/v1/generate: token ids in, token ids out, with log-probabilities and policy versions.

The route that rollouts use. Reply as vLLM 0.32 writes it; each log-probability has the key `token` as well, which the
`renderers` package reads. What nobody here can do is refused, where vLLM ignores it.
"""

import base64
import io
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

import numpy as np
from aiohttp import web

from rl_jax.http.fields import Fields, read_body
from rl_jax.http.in_flight import Piece, collect, joined
from rl_jax.http.replies import Body, json_reply, send_events, token_logprobs, usage, version_spans
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
from rl_jax.sampler import Completion, SamplingParams
from rl_jax.types import FinishReason

ID_PREFIX = "generate-tokens-"
ONLY_SAMPLED = "0 or 1: only the sampled token's own log-probability is known"


@dataclass(frozen=True, kw_only=True)
class _Form:
    """What the reply should hold."""

    request_id: str
    num_logprobs: int | None
    first_expert_row: int
    """Token of the prompt from which routed experts are returned."""


async def generate(request: web.Request) -> web.StreamResponse:
    """Answer the route."""
    service = request.app[SERVICE]
    order, form = _read(Fields(await read_body(request)), service, request)
    pieces = service.in_flight.sample(form.request_id, requests_of(service, order, form.request_id))
    if order.is_streamed:
        return await send_events(request, _chunks(service, order, form, pieces))
    async with aclosing(pieces):
        completions = await collect(pieces, order.num_requests)
    num_sampled = sum(len(completion.tokens_T) for completion in completions)
    body = {
        "request_id": form.request_id,
        "model": service.config.model_name,
        "created": int(time.time()),
        "usage": usage(order.num_prompt_tokens, num_sampled, completions[0].num_cached_tokens),
        "prompt_token_ids": None,
        "mm_placeholders": None,
        "output_mode": "tokens",
        "choices": [_choice(service, order, form, i, completion) for i, completion in enumerate(completions)],
    }
    return json_reply(body)


def _read(fields: Fields, service: Service, request: web.Request) -> tuple[Order, _Form]:
    """Read the body.

    Raises:
        Refused: with every fault of it.
    """
    fields.require("token_ids", "sampling_params")
    prompt_T = np.array(fields.integers("token_ids", service.vocab_size - 1), np.int32)
    read_model(fields, service)
    is_streamed, wants_usage = read_stream(fields)
    given_id = fields.text("request_id", secrets.token_hex(16), max_length=256)
    prefix_key = read_prefix_key(fields, request)
    fields.neutral("output_mode", "tokens")
    fields.flag("return_token_ids")
    for images_or_transfer in ("features", "content_parts", "kv_transfer_params"):
        fields.neutral(images_or_transfer)
    sampling = fields.table("sampling_params")
    sampling.flag("skip_special_tokens")
    sampling.flag("detokenize")
    num_logprobs = sampling.take("logprobs", None, ONLY_SAMPLED, lambda v: type(v) is int and v in (0, 1))
    first_row = sampling.integer("routed_experts_prompt_start", 0, 0, max(0, len(prompt_T) - 1))
    params, num_choices = read_sampling(sampling, service), read_num_choices(sampling)
    sampling.close()
    fields.check()
    order = Order(
        prompts_P_T=[prompt_T],
        params=params,
        num_choices=num_choices,
        prefix_key=prefix_key,
        is_streamed=is_streamed,
        wants_usage=wants_usage,
    )
    return order, _Form(request_id=ID_PREFIX + given_id, num_logprobs=num_logprobs, first_expert_row=first_row)


async def _chunks(
    service: Service, order: Order, form: _Form, pieces: AsyncGenerator[Piece, None]
) -> AsyncGenerator[Body, None]:
    """Yield a body for each piece, the last one of a choice with what is known at its end, then the token counts."""
    head = {"request_id": form.request_id, "model": service.config.model_name, "created": int(time.time())}
    parts: list[list[Piece]] = [[] for _ in range(order.num_requests)]
    async with aclosing(pieces):
        async for piece in pieces:
            so_far = parts[piece.index]
            so_far.append(piece)
            yield {**head, "choices": [_delta(service, order, form, so_far)]}
    if order.wants_usage:
        num_sampled = sum(len(piece.tokens_T) for so_far in parts for piece in so_far)
        yield {**head, "choices": [], "usage": usage(order.num_prompt_tokens, num_sampled, parts[0][-1].num_cached_tokens)}


def _delta(service: Service, order: Order, form: _Form, so_far: Sequence[Piece]) -> Body:
    piece = so_far[-1]
    if piece.finish:
        whole = joined(so_far)
        delta = {"token_ids": piece.tokens_T.tolist(), "logprobs": _logprobs(form, piece)}
        return {**_choice(service, order, form, piece.index, whole), **delta}
    return {
        "index": piece.index,
        "finish_reason": None,
        "token_ids": piece.tokens_T.tolist(),
        "logprobs": _logprobs(form, piece),
    }


def _choice(service: Service, order: Order, form: _Form, index: int, completion: Completion) -> Body:
    return {
        "index": index,
        "finish_reason": str(completion.finish),
        "stop_reason": _stop_reason(service, order.params, completion),
        "token_ids": completion.tokens_T.tolist(),
        "routed_experts": _npy_base64(completion.routed_experts_TLA, form.first_expert_row),
        "sampling_mask": None,
        "weight_versions": version_spans(completion.versions_T),
        "logprobs": _logprobs(form, completion),
    }


def _logprobs(form: _Form, part: Piece | Completion) -> Body | None:
    if form.num_logprobs is None:
        return None
    return token_logprobs(part.tokens_T, part.logprobs_T, with_top=form.num_logprobs > 0)


def _stop_reason(service: Service, params: SamplingParams, completion: Completion) -> str | int | None:
    """Return the stop string, or the stop token that the request asked for; None for the model's own end."""
    if completion.finish != FinishReason.STOP:
        return None
    text = TextStream(service.tokenizer, params)
    text.push(completion.tokens_T.tolist() if params.stop else completion.tokens_T[-1:].tolist())
    return text.stop_reason


def _npy_base64(experts_TLA: np.ndarray | None, first_row: int) -> str | None:
    """Return the rows from `first_row` on as a .npy file in base64."""
    if experts_TLA is None:
        return None
    file = io.BytesIO()
    np.save(file, experts_TLA[first_row:])
    return base64.b64encode(file.getvalue()).decode()
