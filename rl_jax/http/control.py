"""The routes around sampling: what is served, is it well, how much does it do, hold on, go on, stop that one."""

from aiohttp import web

from rl_jax.http.errors import Refused
from rl_jax.http.fields import Fields, is_text, read_body
from rl_jax.http.generate import ID_PREFIX
from rl_jax.http.in_flight import PauseMode
from rl_jax.http.order import read_model
from rl_jax.http.prompts import encode, read_chat_settings, read_messages, render
from rl_jax.http.replies import json_reply
from rl_jax.http.service import SERVICE

PAUSE_MODES: dict[str, PauseMode] = {"abort": "abort", "wait": "wait", "keep": "keep"}


async def models(request: web.Request) -> web.Response:
    """GET /v1/models: the one policy, and how long its sequences may be."""
    service = request.app[SERVICE]
    entry = {
        "id": service.config.model_name,
        "object": "model",
        "created": service.started_s,
        "owned_by": "rl_jax",
        "max_model_len": service.max_len,
    }
    return json_reply({"object": "list", "data": [entry]})


async def health(request: web.Request) -> web.Response:
    """GET /health: 200, or 503 if the sampler is lost."""
    state = await request.app[SERVICE].sampler.health()
    return json_reply({"status": "ok", "weight_version": str(state.version)})


async def metrics(request: web.Request) -> web.Response:
    """GET /metrics: the state of the sampler as Prometheus reads it."""
    state = await request.app[SERVICE].sampler.health()
    values = (
        ("requests_running", "gauge", "Requests being decoded.", state.num_running),
        ("requests_waiting", "gauge", "Requests that wait for a slot or for pages.", state.num_waiting),
        ("requests_running_max", "gauge", "Requests that can be decoded at a time.", state.max_running),
        ("kv_used_frac", "gauge", "Share of the KV cache that is held.", state.kv_used_frac),
        ("weight_version", "gauge", "Policy version that is sampled from.", state.version),
        ("prompt_tokens_total", "counter", "Prompt tokens read.", state.num_prompt_tokens),
        ("cached_tokens_total", "counter", "Prompt tokens found in the prefix cache.", state.num_cached_tokens),
        ("sampled_tokens_total", "counter", "Tokens sampled.", state.num_sampled_tokens),
        ("preemptions_total", "counter", "Requests that lost their KV.", state.num_preemptions),
        ("busy_seconds_total", "counter", "Time in which the sampler was computing.", state.busy_s),
    )
    lines = [
        f"# HELP rl_jax_{name} {about}\n# TYPE rl_jax_{name} {kind}\nrl_jax_{name} {value}\n"
        for name, kind, about, value in values
    ]
    return web.Response(text="".join(lines), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})


async def tokenize(request: web.Request) -> web.Response:
    """POST /tokenize: a prompt, or the messages of a chat, as token ids."""
    service, fields = request.app[SERVICE], Fields(await read_body(request))
    read_model(fields, service)
    add_special = fields.flag("add_special_tokens", True)
    has_chat = fields.has("messages")
    fields.ignore("messages")
    messages = read_messages(fields) if has_chat else []
    add_generation_prompt = read_chat_settings(fields)
    text = fields.text("prompt", min_length=0, max_length=service.config.max_body_bytes)
    if has_chat == fields.has("prompt"):
        fields.fault("prompt: expected this or messages, one of them")
    fields.check()
    tokens_T = render(service, messages, add_generation_prompt) if has_chat else encode(service, text, add_special)
    return json_reply({"count": len(tokens_T), "max_model_len": service.max_len, "tokens": tokens_T.tolist()})


async def detokenize(request: web.Request) -> web.Response:
    """POST /detokenize: token ids as text, special tokens spelled out."""
    service, fields = request.app[SERVICE], Fields(await read_body(request))
    read_model(fields, service)
    fields.require("tokens")
    token_ids = fields.integers("tokens", service.vocab_size - 1)
    fields.check()
    return json_reply({"prompt": service.tokenizer.decode(token_ids, skip_special=False)})


async def pause(request: web.Request) -> web.Response:
    """POST /pause?mode=abort|wait|keep: hold back new requests; end running ones, let them finish, or freeze them."""
    unknown = sorted(set(request.query) - {"mode"})
    mode = PAUSE_MODES.get(request.query.get("mode", "abort"))
    if unknown or mode is None:
        raise Refused(
            f"query {request.query_string!r:.80}: expected mode=abort, mode=wait or mode=keep and nothing else"
        )
    await request.app[SERVICE].in_flight.pause(mode)
    return json_reply({"status": "paused"})


async def resume(request: web.Request) -> web.Response:
    """POST /resume: go on."""
    await request.app[SERVICE].in_flight.resume()
    return json_reply({"status": "resumed"})


async def is_paused(request: web.Request) -> web.Response:
    """GET /is_paused."""
    return json_reply({"is_paused": request.app[SERVICE].in_flight.is_paused})


async def abort_requests(request: web.Request) -> web.Response:
    """POST /inference/v1/abort_requests: end requests with what they have, by the ids of their replies or their own."""
    fields = Fields(await read_body(request))
    fields.require("request_ids")
    ids: list[str] = fields.take(
        "request_ids", [], "a list of strings", lambda v: isinstance(v, list) and all(is_text(item) for item in v)
    )
    fields.check()
    num_aborted = request.app[SERVICE].in_flight.abort([*ids, *(ID_PREFIX + given_id for given_id in ids)])
    return json_reply({"status": "aborted", "aborted": num_aborted})
