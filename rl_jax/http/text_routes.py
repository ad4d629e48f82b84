"""What chat and text completions have in common: text out, whole or as server-sent events.

A route reads its body into a TextOrder; its Form says what a choice looks like. For evaluation and people: rollouts use
token ids (rl_jax/http/generate.py).
"""

import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

import numpy as np
from aiohttp import web

from rl_jax.http.fields import Fields
from rl_jax.http.in_flight import Piece, collect, joined
from rl_jax.http.order import Order, requests_of
from rl_jax.http.replies import Body, json_reply, send_events, token_texts, usage, version_spans
from rl_jax.http.service import SERVICE, Service
from rl_jax.http.text import TextStream
from rl_jax.sampler import Completion

NO_ALTERNATIVES = "only the sampled token's own log-probability is known"


@dataclass(frozen=True, kw_only=True)
class Form:
    """How a route writes its replies."""

    id_prefix: str
    object_name: str
    chunk_name: str
    whole: Callable[[str], Body]
    """The text of a finished choice."""
    delta: Callable[[str, bool], Body]
    """New text of a choice, and whether it is the first."""
    end: Body
    """What stands for new text at the end of a choice."""
    logprobs: Callable[[Sequence[str], np.ndarray, int], Body]
    """Texts and log-probabilities of tokens, and the number of characters before them."""
    has_prompt_in_choice: bool
    """Where the ids of the prompt stand: in its choices, or beside them."""


@dataclass(frozen=True, kw_only=True)
class TextOrder:
    """An order, and what its reply holds beside text."""

    order: Order
    has_logprobs: bool
    has_token_ids: bool


def read_has_token_ids(fields: Fields) -> bool:
    """Return whether token ids stand beside the text; also let keys pass that change nothing."""
    fields.ignore("user", "metadata", "store", "safety_identifier", "prompt_cache_key")
    return fields.flag("return_token_ids")


async def answer(request: web.Request, text_order: TextOrder, form: Form) -> web.StreamResponse:
    """Sample what was ordered and reply in the form of the route."""
    service, order = request.app[SERVICE], text_order.order
    reply_id = form.id_prefix + secrets.token_hex(16)
    reply = _Reply(service=service, wanted=text_order, form=form, reply_id=reply_id)
    pieces = service.in_flight.sample(reply_id, requests_of(service, order, reply_id))
    if order.is_streamed:
        return await send_events(request, reply.chunks(pieces))
    async with aclosing(pieces):
        return json_reply(reply.whole(await collect(pieces, order.num_requests)))


@dataclass
class _Choice:
    """A choice of a streamed reply, as far as it was told."""

    text: TextStream
    pieces: list[Piece] = field(default_factory=list)
    num_chars: int = 0
    """Of the texts of its tokens."""
    is_begun: bool = False


@dataclass(frozen=True, kw_only=True)
class _Reply:
    service: Service
    wanted: TextOrder
    form: Form
    reply_id: str

    def whole(self, completions: Sequence[Completion]) -> Body:
        """Return the whole reply."""
        choices = [self._whole_choice(index, completion) for index, completion in enumerate(completions)]
        return {
            **self._head(self.form.object_name),
            **({} if self.form.has_prompt_in_choice else self._prompt_ids(0)),
            "choices": choices,
            "usage": usage(self.wanted.order, completions),
        }

    async def chunks(self, pieces: AsyncGenerator[Piece, None]) -> AsyncGenerator[Body, None]:
        """Yield chunks with new text, one without text for the end of each choice, then the token counts."""
        order, head = self.wanted.order, self._head(self.form.chunk_name)
        choices = [_Choice(self._text_stream()) for _ in range(order.num_requests)]
        beside = {} if self.form.has_prompt_in_choice else self._prompt_ids(0)
        async with aclosing(pieces):
            async for piece in pieces:
                for entry in self._entries(choices[piece.index], piece):
                    yield {**head, **beside, "choices": [entry]}
                    beside = {}
        if order.wants_usage:
            yield {**head, "choices": [], "usage": usage(order, [joined(choice.pieces) for choice in choices])}

    def _head(self, object_name: str) -> Body:
        name = self.service.config.model_name
        return {"id": self.reply_id, "object": object_name, "created": int(time.time()), "model": name}

    def _text_stream(self) -> TextStream:
        return TextStream(self.service.tokenizer, self.wanted.order.params, self.wanted.order.skip_special)

    def _whole_choice(self, index: int, completion: Completion) -> Body:
        stream = self._text_stream()
        text = stream.push(completion.tokens_T.tolist()) + stream.finish()
        return {
            "index": index,
            **self.form.whole(text),
            **(self._prompt_ids(index) if self.form.has_prompt_in_choice else {}),
            **self._tokens(completion.tokens_T, completion.logprobs_T, 0),
            **_end(completion, stream),
        }

    def _entries(self, choice: _Choice, piece: Piece) -> Iterator[Body]:
        """Yield what a piece adds to its choice: new text if there is any, and its end."""
        choice.pieces.append(piece)
        text = choice.text.push(piece.tokens_T.tolist()) + (choice.text.finish() if piece.finish else "")
        has_tokens = len(piece.tokens_T) > 0 and (self.wanted.has_logprobs or self.wanted.has_token_ids)
        is_first = not choice.is_begun
        if text or has_tokens or (is_first and piece.finish):
            choice.is_begun = True
            yield {
                "index": piece.index,
                **self.form.delta(text, is_first),
                **(self._prompt_ids(piece.index) if is_first and self.form.has_prompt_in_choice else {}),
                **self._tokens(piece.tokens_T, piece.logprobs_T, choice.num_chars),
                "finish_reason": None,
            }
        if self.wanted.has_logprobs:
            choice.num_chars += sum(map(len, token_texts(self.service.tokenizer, piece.tokens_T)))
        if piece.finish:
            end = _end(joined(choice.pieces), choice.text)
            yield {"index": piece.index, **self.form.end, "logprobs": None, **end}

    def _tokens(self, tokens_T: np.ndarray, logprobs_T: np.ndarray, num_chars: int) -> Body:
        """Return what the reply holds of tokens beside their text."""
        ids = {"token_ids": tokens_T.tolist()} if self.wanted.has_token_ids else {}
        if not self.wanted.has_logprobs:
            return {"logprobs": None, **ids}
        texts = token_texts(self.service.tokenizer, tokens_T)
        return {"logprobs": self.form.logprobs(texts, logprobs_T, num_chars), **ids}

    def _prompt_ids(self, index: int) -> Body:
        if not self.wanted.has_token_ids:
            return {}
        order = self.wanted.order
        return {"prompt_token_ids": order.prompts_P_T[index // order.num_choices].tolist()}


def _end(completion: Completion, text: TextStream) -> Body:
    return {
        "finish_reason": str(completion.finish),
        "stop_reason": text.stop_reason,
        "weight_versions": version_spans(completion.versions_T),
    }
