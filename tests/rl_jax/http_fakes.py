"""What the tests of the HTTP server share: a sampler that writes what it is told to, a client, a reader of events."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

import aiohttp
import numpy as np

from rl_jax.http.config import ServeConfig
from rl_jax.http.server import listening
from rl_jax.sampler import Completion, Request, SamplerHealth, SamplerLost
from rl_jax.tokenizer import StreamDecoder, Tokenizer
from rl_jax.types import FinishReason

TOKENIZER = Tokenizer.byte_level()
END = 259
MAX_LEN = 211
Json = dict[str, object]


@dataclass(frozen=True, kw_only=True)
class FakeProgress:
    tokens_T: np.ndarray
    logprobs_T: np.ndarray
    versions_T: np.ndarray
    completion: Completion | None


@dataclass
class FakeSampler:
    """Writes `ids` (or `text` and the end token) in pieces of `chunk`; token i has log-probability -(i + 1) / 8."""

    text: str = "ba"
    ids: Sequence[int] | None = None
    chunk: int = 1
    versions: Sequence[int] = (4,)
    """Of the first tokens; the last one holds for all that follow."""
    is_slow: bool = False
    """Wait for `go` before every piece but the first."""
    fails_after: int | None = None
    """Tokens until SamplerLost."""
    requests: list[Request] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    go: asyncio.Event = field(default_factory=asyncio.Event)
    calls: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.running = asyncio.Event()
        self.running.set()

    async def stream(self, request: Request) -> AsyncIterator[FakeProgress]:
        """Yield the script, as far as the request lets it go."""
        if request.params.temperature == 99:
            raise ValueError("temperature=99: this sampler refuses it")
        self.requests.append(request)
        whole = self._completion(request)
        is_told = False
        try:
            for start in range(0, len(whole.tokens_T), self.chunk):
                end = min(start + self.chunk, len(whole.tokens_T))
                await asyncio.sleep(0)
                await self.running.wait()
                if self.is_slow and start:
                    await self.go.wait()
                if self.fails_after is not None and end > self.fails_after:
                    raise SamplerLost("its thread died")
                is_told = end == len(whole.tokens_T)
                yield FakeProgress(
                    tokens_T=whole.tokens_T[start:end],
                    logprobs_T=whole.logprobs_T[start:end],
                    versions_T=whole.versions_T[start:end],
                    completion=whole if is_told else None,
                )
        finally:
            if not is_told:
                self.aborted.append(request.request_id)

    def _completion(self, request: Request) -> Completion:
        params, prompt_T = request.params, request.tokens_T
        script = [*TOKENIZER.encode(self.text).tolist(), END] if self.ids is None else list(self.ids)
        ids: list[int] = []
        finish, text, decoder = FinishReason.LENGTH, "", StreamDecoder(TOKENIZER)
        for token_id in script[: params.max_tokens]:
            ids.append(token_id)
            text += decoder.push(token_id) if params.stop else ""
            if token_id in params.stop_token_ids or any(stop in text for stop in params.stop):
                finish = FinishReason.STOP
                break
        versions = [*self.versions[:-1], *[self.versions[-1]] * len(ids)]
        shape = (len(prompt_T) + len(ids) - 1, 2, 3)
        experts_TLA = np.arange(np.prod(shape), dtype=np.uint16).reshape(shape)
        return Completion(
            tokens_T=np.array(ids, np.int32),
            logprobs_T=-np.arange(1, len(ids) + 1, dtype=np.float32) / 8,
            versions_T=np.array(versions[: len(ids)], np.int32),
            finish=finish,
            num_cached_tokens=len(prompt_T) // 2,
            routed_experts_TLA=experts_TLA if params.return_routed_experts else None,
        )

    async def generate(self, request: Request) -> Completion:
        """Write one completion."""
        return self._completion(request)

    async def publish(self, weights: object, version: int) -> None:
        """Change the version."""
        self.versions = (version,)

    async def score(self, tokens_T: np.ndarray) -> np.ndarray:
        """Score nothing."""
        return np.zeros(len(tokens_T), np.float32)

    async def pause(self) -> None:
        """Freeze."""
        self.calls.append("pause")
        self.running.clear()

    async def resume(self) -> None:
        """Go on."""
        self.calls.append("resume")
        self.running.set()

    async def health(self) -> SamplerHealth:
        """Tell numbers that differ pairwise."""
        if self.fails_after == 0:
            raise SamplerLost("its thread died")
        return SamplerHealth(
            version=4,
            num_running=2,
            num_waiting=3,
            max_running=7,
            kv_used_frac=0.25,
            num_sampled_tokens=101,
            num_prompt_tokens=53,
            num_cached_tokens=29,
            busy_s=1.5,
        )

    async def close(self) -> None:
        """Do nothing."""


@dataclass(frozen=True)
class Client:
    """Talks to a server under test."""

    session: aiohttp.ClientSession
    sampler: FakeSampler

    async def post(self, path: str, body: object = None, status: int = 200, **headers: str) -> Json:
        """POST JSON (or raw bytes), check the status, return the JSON of the reply."""
        data = body if isinstance(body, bytes) else json.dumps(body)
        async with self.session.post(path, data=data, headers=headers) as response:
            text = await response.text()
            assert response.status == status, text
            return json.loads(text)

    async def get(self, path: str, status: int = 200) -> Json:
        """GET, check the status, return the JSON of the reply."""
        async with self.session.get(path) as response:
            assert response.status == status
            return await response.json()

    async def events(self, path: str, body: object) -> list[Json]:
        """POST, and return the streamed events before [DONE], which must be the last one."""
        async with self.session.post(path, json=body) as response:
            assert response.status == 200, await response.text()
            assert response.content_type == "text/event-stream"
            *events, done, rest = (await response.text()).split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        return [json.loads(event.removeprefix("data: ")) for event in events]

    async def until(self, is_true: Callable[[], bool]) -> None:
        """Wait until something holds."""
        async with asyncio.timeout(2):
            while not is_true():
                await asyncio.sleep(0.005)


def play(
    body: Callable[[Client], Awaitable[None]],
    script: Mapping[str, object] | None = None,
    vocab_size: int = 265,
    **settings: object,
) -> None:
    """Run `body` against a server with a FakeSampler of `script`."""

    async def main() -> None:
        sampler = FakeSampler(**(script or {}))
        config = ServeConfig(**{"port": 0, "model_name": "toy", "shutdown_s": 1.0, **settings})
        async with (
            listening(sampler, TOKENIZER, config, max_len=MAX_LEN, vocab_size=vocab_size) as url,
            aiohttp.ClientSession(url) as session,
        ):
            await body(Client(session, sampler))

    asyncio.run(main())


def without(body: Json, *keys: str) -> Json:
    """Return a body without keys that differ from run to run."""
    return {key: value for key, value in body.items() if key not in keys}
