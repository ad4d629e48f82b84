"""The HTTP server of a sampler: token-in/token-out for rollouts, OpenAI's routes for evaluation and people.

rl_jax/serve.py builds the sampler and calls `serve`. The routes are those of a vLLM server, so that whoever can talk to
one can talk to the other; what differs is refused with a message, never ignored.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from aiohttp import web

from rl_jax.config import ConfigError
from rl_jax.http import control
from rl_jax.http.chat import chat
from rl_jax.http.completions import completions
from rl_jax.http.config import ServeConfig
from rl_jax.http.errors import answer_errors
from rl_jax.http.generate import generate
from rl_jax.http.in_flight import InFlight, StreamingSampler
from rl_jax.http.service import SERVICE, Service
from rl_jax.tokenizer import Tokenizer

ROUTES = (
    web.post("/inference/v1/generate", generate),
    web.post("/inference/v1/abort_requests", control.abort_requests),
    web.post("/v1/chat/completions", chat),
    web.post("/v1/completions", completions),
    web.get("/v1/models", control.models),
    web.get("/health", control.health),
    web.get("/metrics", control.metrics),
    web.post("/tokenize", control.tokenize),
    web.post("/detokenize", control.detokenize),
    web.post("/pause", control.pause),
    web.post("/resume", control.resume),
    web.get("/is_paused", control.is_paused),
)


def _print(line: str) -> None:
    print(line, flush=True)  # whoever waits for the line may read a pipe


async def serve(
    sampler: StreamingSampler,
    tokenizer: Tokenizer,
    config: ServeConfig,
    *,
    max_len: int,
    vocab_size: int,
    say: Callable[[str], None] = _print,
) -> None:
    """Serve until cancelled; then running requests end with what they have. The sampler stays open.

    Args:
        max_len: longest sequence of the sampler in tokens, prompt and completion together.
        vocab_size: rows of the model's embedding.
        say: told one line with the URL once the server answers.

    Raises:
        ConfigError: nothing can listen on the host and port of the config.
    """
    async with listening(sampler, tokenizer, config, max_len=max_len, vocab_size=vocab_size) as url:
        say(f"serving {config.model_name} at {url} (Ctrl-C stops it)")
        await asyncio.Event().wait()


@asynccontextmanager
async def listening(
    sampler: StreamingSampler, tokenizer: Tokenizer, config: ServeConfig, *, max_len: int, vocab_size: int
) -> AsyncIterator[str]:
    """Serve inside the `async with`, which is given the URL."""
    service = Service(
        sampler=sampler,
        in_flight=InFlight(sampler),
        tokenizer=tokenizer,
        config=config,
        max_len=max_len,
        vocab_size=vocab_size,
        started_s=int(time.time()),
    )
    app = web.Application(middlewares=[answer_errors], client_max_size=config.max_body_bytes)
    app[SERVICE] = service
    app.add_routes(ROUTES)
    # A client that leaves cancels its handler, and with it what it asked the sampler for.
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=config.shutdown_s)
    await runner.setup()
    try:
        port = await _listen(runner, config)
        host = f"[{config.host}]" if ":" in config.host else config.host
        yield f"http://{host}:{port}"
    finally:
        service.in_flight.close()
        await runner.cleanup()


async def _listen(runner: web.AppRunner, config: ServeConfig) -> int:
    """Open the port and return its number."""
    try:
        await web.TCPSite(runner, config.host, config.port).start()
    except OSError as error:
        raise ConfigError(
            [
                f"serve.port={config.port}: cannot listen on {config.host}:{config.port} ({error.strerror or error}); give "
                "a free port, or 0 for any free one, and an address of this machine as serve.host"
            ]
        ) from error
    return runner.addresses[0][1]
