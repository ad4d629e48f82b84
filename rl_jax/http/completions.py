"""POST /v1/completions: texts or token ids in, their continuations out, in OpenAI's form."""

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
from aiohttp import web

from rl_jax.http.fields import Fields, is_integer, read_body
from rl_jax.http.order import read_order
from rl_jax.http.prompts import encode, read_prompts
from rl_jax.http.replies import Body
from rl_jax.http.service import SERVICE
from rl_jax.http.text_routes import NO_ALTERNATIVES, Form, TextOrder, answer, read_has_token_ids


def _text(text: str, is_first: bool = True) -> Body:
    return {"text": text}


def _logprobs(texts: Sequence[str], logprobs_T: np.ndarray, num_chars: int) -> Body:
    """Return log-probabilities; the first token begins after `num_chars` characters."""
    offsets = itertools.accumulate(map(len, texts), initial=num_chars)
    return {
        "tokens": list(texts),
        "token_logprobs": logprobs_T.tolist(),
        "top_logprobs": None,
        "text_offset": list(offsets)[:-1],
    }


FORM = Form(
    id_prefix="cmpl-",
    object_name="text_completion",
    chunk_name="text_completion",
    whole=_text,
    delta=_text,
    end={"text": ""},
    logprobs=_logprobs,
    has_prompt_in_choice=True,
)


async def completions(request: web.Request) -> web.StreamResponse:
    """Answer the route."""
    service, fields = request.app[SERVICE], Fields(await read_body(request))
    prompts = read_prompts(fields, service)
    add_special = fields.flag("add_special_tokens", True)
    order = read_order(fields, fields, service, request)
    has_token_ids = read_has_token_ids(fields)
    num_logprobs: int | None = fields.take(
        "logprobs", None, f"0 or 1: {NO_ALTERNATIVES}", lambda v: is_integer(v, 0, 1)
    )
    fields.neutral("best_of", 1)
    fields.neutral("echo", False)
    fields.neutral("suffix", "")
    fields.check()
    order = dataclasses.replace(order, prompts_P_T=[encode(service, prompt, add_special) for prompt in prompts])
    has_logprobs = num_logprobs is not None
    return await answer(request, TextOrder(order=order, has_logprobs=has_logprobs, has_token_ids=has_token_ids), FORM)
