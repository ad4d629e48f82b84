"""What replies of several routes have in common: token counts, versions, texts of tokens, server-sent events."""

import functools
import itertools
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing

import numpy as np
from aiohttp import web

from rl_jax.http.errors import Refused, body_of
from rl_jax.http.order import Order
from rl_jax.sampler import Completion, SamplerLost
from rl_jax.tokenizer import Tokenizer

Body = Mapping[str, object]

# A log-probability that is no number must not leave as one: JSON has none, and a client would train on what it reads.
dumps = functools.partial(json.dumps, allow_nan=False)


def json_reply(body: Body) -> web.Response:
    """Return a JSON response."""
    return web.json_response(body, dumps=dumps)


def usage(order: Order, completions: Sequence[Completion]) -> Body:
    """Return token counts: a prompt counts once, however many completions it has."""
    num_prompt = sum(map(len, order.prompts_P_T))
    num_sampled = sum(len(completion.tokens_T) for completion in completions)
    num_cached = sum(completion.num_cached_tokens for completion in completions[:: order.num_choices])
    return {
        "prompt_tokens": num_prompt,
        "total_tokens": num_prompt + num_sampled,
        "completion_tokens": num_sampled,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }


def version_spans(versions_T: np.ndarray) -> list[Body]:
    """Return which policy version made which tokens: [4, 4, 5] is 4 from 0 to 2, 5 from 2 to 3."""
    if not len(versions_T):
        return []
    cuts = [0, *(np.flatnonzero(np.diff(versions_T)) + 1).tolist(), len(versions_T)]
    return [{"version": str(versions_T[start]), "start": start, "end": end} for start, end in itertools.pairwise(cuts)]


def token_texts(tokenizer: Tokenizer, tokens_T: np.ndarray) -> list[str]:
    """Return the text of each token alone, special tokens spelled out; part of a character is U+FFFD."""
    return [tokenizer.decode([token_id], skip_special=False) for token_id in tokens_T.tolist()]


async def send_events(request: web.Request, chunks: AsyncGenerator[Body, None]) -> web.StreamResponse:
    """Send chunks as server-sent events, then [DONE]. What fails before the first chunk gets a status of its own."""
    response = web.StreamResponse(
        headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
    )
    try:
        async with aclosing(chunks):
            async for chunk in chunks:
                await _send(request, response, dumps(chunk))
        last = "[DONE]"
    except (Refused, SamplerLost) as error:
        if not response.prepared:
            raise
        last = dumps(body_of(error))
    await _send(request, response, last)
    await response.write_eof()
    return response


async def _send(request: web.Request, response: web.StreamResponse, data: str) -> None:
    if not response.prepared:
        await response.prepare(request)
    await response.write(f"data: {data}\n\n".encode())
