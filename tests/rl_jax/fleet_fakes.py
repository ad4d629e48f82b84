"""A vLLM server in miniature, and a source of weights: what a fleet talks to, with every way to go wrong as a switch.

Runs on a loop of its own, as a server in another process would: the fleet's loop may hang without it.
"""

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from aiohttp import web

from rl_jax.loop_thread import LoopThread
from rl_jax.sampler import Request, SamplingParams

VOCAB = 97
STINT = 9
INFO = {
    "model_config": {"logprobs_mode": "processed_logprobs", "max_model_len": 64, "dtype": "torch.float32"},
    "scheduler_config": {"max_num_seqs": 8},
}


@dataclass(frozen=True)
class FakeUpdate:
    """An update that nobody wrote."""

    path: Path
    version: int
    base_version: int | None
    kind: str
    num_bytes: int
    changed_frac: float = 0.25
    seconds: float = 0.5
    reason: str = ""

    @property
    def digest(self) -> str:
        return f"digest-{self.version}"


class FakeSource:
    """Lays down numbered paths: v7-delta holds what changed since version 6, v7-full everything."""

    def __init__(self) -> None:
        self.version = -1
        self.is_broken = False

    def write(self, weights: object, version: int) -> FakeUpdate:
        if self.is_broken:
            raise OSError(28, "No space left on device")
        self.version = version
        return self.update_for(version - 1)

    def update_for(self, held_version: int | None) -> FakeUpdate:
        v = self.version
        if held_version is not None and held_version == v - 1:
            return FakeUpdate(Path(f"/updates/v{v}-delta"), v, v - 1, "delta", 100)
        return FakeUpdate(Path(f"/updates/v{v}-full"), v, None, "full", 1000)


@dataclass
class FakeServer:
    """One server. Change a switch at any time; `calls` has every request, in order."""

    token_s: float = 0.0
    """Seconds that one token takes."""
    vllm_version: str = "0.32.0+cpu"
    info: dict = field(default_factory=lambda: {table: dict(values) for table, values in INFO.items()})
    closed: set[str] = field(default_factory=set)
    """Paths that answer 404."""
    hangs: set[str] = field(default_factory=set)
    """Paths that never answer."""
    fails: set[str] = field(default_factory=set)
    """Paths that answer 500."""
    refuses: set[str] = field(default_factory=set)
    """Kinds of updates that the stage refuses."""
    lie: Callable[[dict], None] = lambda choice: None
    """Changes a choice of a reply before it is sent."""
    loses_bytes: bool = False
    """A commit leaves something else than what was staged."""
    commit_s: float = 0.0
    """Seconds that a commit takes."""
    ends_at: str = ""
    """Label of the weights without which a completion gets STINT tokens and waits; "" = none."""
    written: dict[str, list[str]] = field(default_factory=dict)
    """Request id -> label of each token so far."""
    pauses: list[tuple[float, float]] = field(default_factory=list)
    """Begin and end of each pause."""
    label: str = "default"
    held: tuple[int | None, str] = (None, "")
    staged: int | None = None
    num_running: int = 0
    calls: list[tuple[str, dict]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._thread = LoopThread("fake-vllm")
        self._runner: web.AppRunner | None = None
        self._port = 0
        self._going = self._thread.call(asyncio.Event)
        self._thread.call(self._going.set)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> "FakeServer":
        """Listen, on the port of the time before."""
        self._thread.run(self._start)
        return self

    def die(self) -> None:
        """Close every connection and the port."""
        runner, self._runner = self._runner, None
        if runner:
            self._thread.run(lambda: _end(runner))

    def restart(self) -> None:
        """Come back as a fresh process does: without updates."""
        self.die()
        self.label, self.held, self.staged = "default", (None, ""), None
        self._thread.call(self._going.set)
        self.start()

    def close(self) -> None:
        self.die()
        self._thread.close()

    def paths(self) -> list[str]:
        return [path for path, _ in self.calls]

    def bodies(self, path: str) -> list[dict]:
        return [body for called, body in self.calls if called == path]

    async def _start(self) -> None:
        app = web.Application(middlewares=[self._switch])
        routes = {
            "/inference/v1/generate": self._generate,
            "/collective_rpc": self._rpc,
            "/pause": self._pause,
            "/resume": self._resume,
            "/update_weights": self._commit,
            "/finish_weight_update": self._finish,
            "/start_weight_update": _ok,
            "/init_weight_transfer_engine": _ok,
            "/inference/v1/abort_requests": _ok,
        }
        app.add_routes([web.post(path, handler) for path, handler in routes.items()])
        pages: dict[str, Callable[[], object]] = {
            "/health": lambda: {},
            "/version": lambda: {"version": self.vllm_version},
            "/server_info": lambda: {"vllm_config": self.info},
            "/weight_info": lambda: {"weight_version": self.label},
        }
        app.add_routes([web.get(path, _page(content)) for path, content in pages.items()])
        app.add_routes([web.get("/metrics", self._metrics)])
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self._port).start()
        self._port = self._runner.addresses[0][1]

    @web.middleware
    async def _switch(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        path = request.path
        body = await request.json() if request.can_read_body else dict(request.query)
        self.calls.append((path, body))
        if path in self.closed:
            raise web.HTTPNotFound
        if path in self.fails:
            return web.json_response({"error": {"message": f"broken {path}"}}, status=500)
        if path in self.hangs:
            await asyncio.sleep(3600)
        return await handler(request)

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        if not body:
            return web.json_response({"error": {"message": "token_ids: field required"}}, status=400)
        params = body["sampling_params"]
        if "prompt_logprobs" in params:
            return web.json_response(score_reply(body["token_ids"], self.label))
        if len(body["token_ids"]) + params["max_tokens"] > self.info["model_config"]["max_model_len"]:
            return web.json_response({"error": {"message": "the prompt is too long"}}, status=400)
        self.num_running += 1
        try:
            versions = self.written[body["request_id"]] = []
            while len(versions) < params["max_tokens"]:
                await asyncio.sleep(self.token_s)
                await self._going.wait()
                if self.ends_at in ("", self.label) or versions.count(self.label) < STINT:
                    versions.append(self.label)
        finally:
            self.num_running -= 1
        choice = make_choice(params["seed"], versions)
        self.lie(choice)
        usage = {"prompt_tokens_details": {"cached_tokens": len(body["token_ids"]) - 1}}
        return web.json_response({"request_id": body["request_id"], "choices": [choice], "usage": usage})

    async def _rpc(self, request: web.Request) -> web.Response:
        body = await request.json()
        if body["method"] == "rl_jax_stage":
            name = Path(body["kwargs"]["path"]).name
            version, _, kind = name[1:].partition("-")
            is_wrong_base = kind == "delta" and self.held[0] != int(version) - 1
            self.staged = None if kind in self.refuses or is_wrong_base else int(version)
            state = "refused" if self.staged is None else "staged"
            self._status = {"state": state, "fault": f"{name}: checksum of w differs"}
        status = getattr(self, "_status", {"state": "idle"})
        served = {"served_version": self.held[0], "served_digest": self.held[1]}
        return web.json_response({"results": [{**status, **served}]})

    async def _pause(self, request: web.Request) -> web.Response:
        assert request.query["mode"] == "keep"
        self._going.clear()
        self.pauses.append((time.monotonic(), float("inf")))
        return web.json_response({})

    async def _resume(self, request: web.Request) -> web.Response:
        self._going.set()
        self.pauses[-1] = (self.pauses[-1][0], time.monotonic())
        return web.json_response({})

    async def _commit(self, request: web.Request) -> web.Response:
        assert not self._going.is_set(), "committed without a pause"
        assert self.staged is not None, "committed what was not staged"
        await asyncio.sleep(self.commit_s)
        self.held = (self.staged, "digest-of-mixed-weights" if self.loses_bytes else f"digest-{self.staged}")
        return web.json_response({})

    async def _finish(self, request: web.Request) -> web.Response:
        self.label = (await request.json())["weight_version"]
        return web.json_response({})

    async def _metrics(self, request: web.Request) -> web.Response:
        labels = '{engine="0",model_name="policy"}'
        lines = [
            "# HELP vllm:num_requests_running Number of requests.",
            f"vllm:num_requests_running{labels} {self.num_running}.0",
            f"vllm:num_requests_waiting{labels} 2.0",
            f"vllm:kv_cache_usage_perc{labels} 0.125",
            f"vllm:num_preemptions_total{labels} 3.0",
        ]
        return web.Response(text="\n".join(lines) + "\n")


async def _end(runner: web.AppRunner) -> None:
    for site in list(runner.sites):
        await site.stop()
    await asyncio.sleep(0.02)  # who was accepted just now is known to the runner before it closes everybody
    await runner.cleanup()
    await asyncio.sleep(0.01)  # transports close in the next turn of the loop


async def _ok(request: web.Request) -> web.Response:
    return web.json_response({})


def _page(content: Callable[[], object]) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def handler(request: web.Request) -> web.Response:
        return web.json_response(content())

    return handler


def make_choice(seed: int, versions: list[str]) -> dict:
    """Return a choice whose tokens and log-probabilities follow from the seed."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(VOCAB, size=len(versions)).tolist()
    logprobs = (-rng.random(len(versions))).tolist()
    spans: list[dict] = []
    for i, version in enumerate(versions):
        if spans and spans[-1]["version"] == version:
            spans[-1]["end"] = i + 1
        else:
            spans.append({"version": version, "start": i, "end": i + 1})
    content = [{"token_id": t, "logprob": p, "rank": 2} for t, p in zip(ids, logprobs, strict=True)]
    return {
        "index": 0,
        "finish_reason": "length",
        "token_ids": ids,
        "logprobs": {"content": content},
        "weight_versions": spans,
    }


def score_reply(token_ids: list[int], label: str) -> dict:
    """Return a reply whose prompt log-probabilities are -(id + version) / 1000."""
    version = int(label) if label.isdecimal() else 0
    entries = [{str(t): {"logprob": -(t + version) / 1000, "rank": 1}} for t in token_ids]
    return {"prompt_logprobs": [None, *entries[1:]], "choices": []}


def make_request(seed: int, *, group: int = 0, max_tokens: int = 5, prompt: int = 4) -> Request:
    return Request(
        request_id=f"train.{seed}.0",
        tokens_T=np.arange(1, prompt + 1, dtype=np.int32),
        params=SamplingParams(max_tokens=max_tokens, seed=seed, stop_token_ids=(VOCAB,), stop=("\n",)),
        prefix_key=f"train.{group}",
    )


def main() -> None:
    """Serve as vLLM's command does: the port is in the arguments; ends with the process."""
    model = Path(sys.argv[sys.argv.index("serve") + 1])
    if not (model / "config.json").is_file():
        raise SystemExit(f"{model}: no model there, seen from {Path.cwd()}")
    server = FakeServer()
    server._port = int(sys.argv[sys.argv.index("--port") + 1])
    server.start()
    print("fake server listens", flush=True)
    time.sleep(3600)


if __name__ == "__main__":
    main()
