"""POST /v1/chat/completions: messages in, an assistant message out, in OpenAI's form."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from aiohttp import web

from rl_jax.http.fields import Fields, read_body
from rl_jax.http.order import read_order
from rl_jax.http.prompts import read_chat_settings, read_messages, render
from rl_jax.http.replies import Body
from rl_jax.http.service import SERVICE
from rl_jax.http.text_routes import NO_ALTERNATIVES, Form, TextOrder, answer, read_has_token_ids


def _message(text: str) -> Body:
    return {"message": {"role": "assistant", "content": text}}


def _delta(text: str, is_first: bool) -> Body:
    return {"delta": {"role": "assistant", "content": text} if is_first else {"content": text}}


def _logprobs(texts: Sequence[str], logprobs_T: np.ndarray, num_chars: int) -> Body:
    """Return log-probabilities."""
    content = [
        {
            "token": text,
            "logprob": logprob,
            "bytes": None if "\ufffd" in text else list(text.encode()),
            "top_logprobs": [],
        }
        for text, logprob in zip(texts, logprobs_T.tolist(), strict=True)
    ]
    return {"content": content}


FORM = Form(
    id_prefix="chatcmpl-",
    object_name="chat.completion",
    chunk_name="chat.completion.chunk",
    whole=_message,
    delta=_delta,
    end={"delta": {}},
    logprobs=_logprobs,
    has_prompt_in_choice=False,
)


async def chat(request: web.Request) -> web.StreamResponse:
    """Answer the route."""
    service, fields = request.app[SERVICE], Fields(await read_body(request))
    messages = read_messages(fields)
    add_generation_prompt = read_chat_settings(fields)
    order = read_order(fields, fields, service, request, max_tokens_keys=("max_tokens", "max_completion_tokens"))
    has_logprobs, has_token_ids = fields.flag("logprobs"), read_has_token_ids(fields)
    fields.neutral("top_logprobs", 0, reason=NO_ALTERNATIVES)
    fields.neutral("tool_choice", "none", "auto")
    fields.neutral("response_format", {"type": "text"})
    fields.neutral("modalities", ["text"])
    fields.neutral("service_tier", "auto", "default")
    fields.flag("parallel_tool_calls")
    fields.check()
    order = dataclasses.replace(order, prompts_P_T=[render(service, messages, add_generation_prompt)])
    return await answer(request, TextOrder(order=order, has_logprobs=has_logprobs, has_token_ids=has_token_ids), FORM)
