"""POST /inference/v1/generate: token ids in, token ids out, with log-probabilities and policy versions.

The route that rollouts use. The reply is vLLM's of 0.32; each log-probability has the key `token` beside `token_id`, which
the `renderers` package reads. What cannot be done here is refused, where vLLM ignores it.
"""

import base64
import dataclasses
import io
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

import numpy as np
from aiohttp import web

from rl_jax.http.fields import Fields, is_integer, read_body
from rl_jax.http.in_flight import Piece, collect, joined
from rl_jax.http.order import Order, read_order, requests_of
from rl_jax.http.replies import Body, json_reply, send_events, usage, version_spans
from rl_jax.http.service import SERVICE, Service
from rl_jax.http.text import TextStream
from rl_jax.sampler import Completion
from rl_jax.types import FinishReason

ID_PREFIX = "generate-tokens-"


@dataclass(frozen=True, kw_only=True)
class _Reply:
    """What to answer: an order, and what the reply holds beside token ids."""

    service: Service
    order: Order
    request_id: str
    num_logprobs: int | None
    first_expert_row: int
    """Token of the prompt from which routed experts are returned."""

    def head(self) -> Body:
        return {"request_id": self.request_id, "model": self.service.config.model_name, "created": int(time.time())}

    def whole(self, completions: Sequence[Completion]) -> Body:
        """Return the whole reply."""
        return {
            **self.head(),
            "usage": usage(self.order, completions),
            "prompt_token_ids": None,
            "mm_placeholders": None,
            "output_mode": "tokens",
            "choices": [self._choice(index, completion) for index, completion in enumerate(completions)],
        }

    async def chunks(self, pieces: AsyncGenerator[Piece, None]) -> AsyncGenerator[Body, None]:
        """Yield a part of the reply for each piece; what is known at the end of a choice comes with its last one."""
        head = self.head()
        parts: list[list[Piece]] = [[] for _ in range(self.order.num_requests)]
        async with aclosing(pieces):
            async for piece in pieces:
                parts[piece.index].append(piece)
                new = {"token_ids": piece.tokens_T.tolist(), "logprobs": self._logprobs(piece)}
                end = self._choice(piece.index, joined(parts[piece.index])) if piece.finish else {"finish_reason": None}
                yield {**head, "choices": [{"index": piece.index, **end, **new}]}
        if self.order.wants_usage:
            yield {
                **head,
                "choices": [],
                "usage": usage(self.order, [joined(pieces_of_one) for pieces_of_one in parts]),
            }

    def _choice(self, index: int, completion: Completion) -> Body:
        return {
            "index": index,
            "finish_reason": str(completion.finish),
            "stop_reason": self._stop_reason(completion),
            "token_ids": completion.tokens_T.tolist(),
            "routed_experts": _npy_base64(completion.routed_experts_TLA, self.first_expert_row),
            "sampling_mask": None,
            "weight_versions": version_spans(completion.versions_T),
            "logprobs": self._logprobs(completion),
        }

    def _logprobs(self, part: Piece | Completion) -> Body | None:
        if self.num_logprobs is None:
            return None
        return _token_logprobs(part.tokens_T, part.logprobs_T, with_top=self.num_logprobs > 0)

    def _stop_reason(self, completion: Completion) -> str | int | None:
        """Return the stop string, or the stop token that the request asked for; None for the model's own end."""
        if completion.finish != FinishReason.STOP:
            return None
        text = TextStream(self.service.tokenizer, self.order.params)
        text.push((completion.tokens_T if self.order.params.stop else completion.tokens_T[-1:]).tolist())
        return text.stop_reason


async def generate(request: web.Request) -> web.StreamResponse:
    """Answer the route."""
    reply = _read(Fields(await read_body(request)), request)
    service, order = reply.service, reply.order
    pieces = service.in_flight.sample(reply.request_id, requests_of(service, order, reply.request_id))
    if order.is_streamed:
        return await send_events(request, reply.chunks(pieces))
    async with aclosing(pieces):
        return json_reply(reply.whole(await collect(pieces, order.num_requests)))


def _read(fields: Fields, request: web.Request) -> _Reply:
    """Read the body.

    Raises:
        Refused: with every fault of it.
    """
    service = request.app[SERVICE]
    fields.require("token_ids", "sampling_params")
    prompt_T = np.array(fields.integers("token_ids", service.vocab_size - 1), np.int32)
    sampling = fields.table("sampling_params")
    order = read_order(fields, sampling, service, request)
    given_id = fields.text("request_id", secrets.token_hex(16), max_length=256)
    fields.neutral("output_mode", "tokens")
    fields.flag("return_token_ids")
    for not_of_this_model in ("features", "content_parts", "kv_transfer_params"):
        fields.neutral(not_of_this_model)
    sampling.flag("detokenize")
    first_row = sampling.integer("routed_experts_prompt_start", 0, 0, max(0, len(prompt_T) - 1))
    num_logprobs: int | None = sampling.take(
        "logprobs",
        None,
        "0 or 1: only the sampled token's own log-probability is known",
        lambda v: is_integer(v, 0, 1),
    )
    sampling.close()
    fields.check()
    return _Reply(
        service=service,
        order=dataclasses.replace(order, prompts_P_T=[prompt_T]),
        request_id=ID_PREFIX + given_id,
        num_logprobs=num_logprobs,
        first_expert_row=first_row,
    )


def _token_logprobs(tokens_T: np.ndarray, logprobs_T: np.ndarray, *, with_top: bool) -> Body:
    """Return log-probabilities by token id, under both names that clients look for."""
    content = []
    for token_id, logprob in zip(tokens_T.tolist(), logprobs_T.tolist(), strict=True):
        entry = {"token": f"token_id:{token_id}", "token_id": token_id, "logprob": logprob}
        content.append({**entry, "top_logprobs": [entry] if with_top else []})
    return {"content": content}


def _npy_base64(experts_TLA: np.ndarray | None, first_row: int) -> str | None:
    """Return the rows from `first_row` on as a .npy file in base64."""
    if experts_TLA is None:
        return None
    file = io.BytesIO()
    np.save(file, experts_TLA[first_row:])
    return base64.b64encode(file.getvalue()).decode()
