"""One vLLM server over HTTP: sampling, control calls, weight updates, health (step 5 of docs/walk.md).

Each call is one request with a deadline of its own; nothing is tried again here, for an update is not idempotent and a
completion may have to go elsewhere. Knows no other server and no policy.
"""

import asyncio
import contextlib
import json
from collections.abc import Container, Mapping
from dataclasses import dataclass

import aiohttp
import numpy as np

from rl_jax.rollout.fleet_config import FleetConfig
from rl_jax.rollout.generate_api import (
    ID_PREFIX,
    BadReply,
    Json,
    generate_body,
    read_completion,
    read_scores,
    score_body,
)
from rl_jax.sampler import Completion, Request

MAX_SHOWN = 600
CALLERS_FAULT = (400, 413, 422)
"""Statuses that say that a request can never be served."""


class ServerLost(RuntimeError):
    """A server did not answer: its process, its connection or its time is gone."""


class ServerSilent(ServerLost):
    """A server did not answer in time; it may hang."""


class ServerFailed(RuntimeError):
    """A server answered with an error. `status` is HTTP's."""

    def __init__(self, status: int, message: str):
        self.status = status
        super().__init__(message)


@dataclass(frozen=True, kw_only=True)
class Gauges:
    """What a server says of itself in its metrics."""

    num_running: int
    num_waiting: int
    kv_used_frac: float
    num_preemptions: int


class ServerClient:
    """See the module. All methods raise ServerLost or ServerFailed."""

    def __init__(self, url: str, config: FleetConfig, session: aiohttp.ClientSession):
        self.url = url
        self._config = config
        self._session = session
        self._aborting: set[asyncio.Task[object]] = set()

    def close(self) -> None:
        """Give up what is left to tell the server."""
        for task in self._aborting:
            task.cancel()

    # ---- sampling

    async def generate(
        self, request: Request, request_id: str, version: int, known_versions: Container[int]
    ) -> Completion:
        """Write one completion at `version` or later. Cancelling the call aborts the request on the server.

        Raises:
            ValueError: the request can never be served. BadReply: the answer cannot be true.
        """
        body = generate_body(request, request_id, version)
        reply = await self._sample(body, f"request {request.request_id}", request_id)
        return read_completion(reply, request, known_versions, version)

    async def score(self, tokens_T: np.ndarray, request_id: str, version: int) -> np.ndarray:
        """Return float32 [T]: log-probability of each token given those before it; 0 at index 0."""
        if len(tokens_T) < 2:
            return np.zeros(len(tokens_T), np.float32)
        reply = await self._sample(score_body(tokens_T, request_id, version), f"score {request_id}", request_id)
        return read_scores(reply, tokens_T, f"{self.url}: score")

    async def _sample(self, body: Mapping[str, object], where: str, request_id: str) -> object:
        try:
            return await self.post("/inference/v1/generate", body, timeout_s=self._config.request_timeout_s)
        except asyncio.CancelledError:
            self._abort_later(request_id)
            raise
        except ServerFailed as error:
            if error.status in CALLERS_FAULT:
                raise ValueError(f"{where}: {error}") from error
            if error.status < 500:  # the route is gone, or closed to us: this is another server
                raise BadReply(f"{where}: {error}") from error
            raise ServerLost(str(error)) from error

    def _abort_later(self, request_id: str) -> None:
        """Tell the server; the closed connection says it too, but a proxy in between may keep that to itself."""

        async def abort() -> None:
            with contextlib.suppress(ServerLost, ServerFailed):  # then the closed connection ends the request
                await self.post("/inference/v1/abort_requests", {"request_ids": [ID_PREFIX + request_id]})

        task: asyncio.Task[object] = asyncio.get_running_loop().create_task(abort())
        self._aborting.add(task)
        task.add_done_callback(self._aborting.discard)

    # ---- weight updates, in this order

    async def begin_stage(self, path: str) -> None:
        """Let every worker begin to read and check an update beside the weights that it serves; requests go on."""
        await self._workers("rl_jax_stage", path=path)

    async def stage_status(self) -> list[Json]:
        """Return what each worker says of its stage, and of the version that it holds."""
        return await self._workers("rl_jax_status")

    async def pause(self, *, keep_kv: bool) -> None:
        """Freeze running requests and hold back later ones."""
        await self.post("/pause", params={"mode": "keep", "clear_cache": "false" if keep_kv else "true"})

    async def commit(self, path: str, version: int, timeout_s: float) -> None:
        """Load the staged update into the model; what is sampled from here on is of `version`."""
        await self.post("/start_weight_update", {})
        await self.post("/update_weights", {"update_info": {"path": path, "phase": "commit"}}, timeout_s=timeout_s)
        await self.post("/finish_weight_update", {"weight_version": str(version)})

    async def resume(self) -> None:
        """Go on."""
        await self.post("/resume")

    async def weight_version(self) -> str:
        """Return the label of the weights that are served; vLLM starts with "default"."""
        reply = await self.get("/weight_info")
        if not isinstance(reply, dict) or not isinstance(reply.get("weight_version"), str):
            raise BadReply(f"{self.url}/weight_info: {reply!r:.200}: expected weight_version")
        return reply["weight_version"]

    async def _workers(self, method: str, **kwargs: str) -> list[Json]:
        """Call a method of bridge/vllm_plugin/worker.py on every worker."""
        reply = await self.post("/collective_rpc", {"method": method, "kwargs": kwargs})
        results = reply.get("results") if isinstance(reply, dict) else None
        if not isinstance(results, list) or not results or not all(isinstance(r, dict) for r in results):
            raise BadReply(f"{self.url}: {method}: {reply!r:.200}: expected one table for each worker")
        return results

    # ---- health

    async def check_health(self) -> None:
        """Return if the server says that it is well."""
        await self.get("/health")

    async def gauges(self) -> Gauges:
        """Return the server's own numbers."""
        text = await self.get("/metrics")
        try:
            return read_gauges(text if isinstance(text, str) else "")
        except (ValueError, OverflowError) as error:
            raise BadReply(f"{self.url}/metrics: {error}") from error

    # ---- transport

    async def get(
        self, path: str, params: Mapping[str, str] | None = None, *, timeout_s: float | None = None
    ) -> object:
        """GET; returns parsed JSON, or text where it is none."""
        return await self._call("GET", path, None, params, timeout_s or self._config.control_timeout_s)

    async def post(
        self,
        path: str,
        body: Mapping[str, object] | None = None,
        *,
        params: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> object:
        """POST; as `get`."""
        return await self._call("POST", path, body, params, timeout_s or self._config.control_timeout_s)

    async def _call(
        self,
        method: str,
        path: str,
        body: Mapping[str, object] | None,
        params: Mapping[str, str] | None,
        timeout_s: float,
    ) -> object:
        where = f"{self.url}{path}"
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._session.request(method, where, json=body, params=params, timeout=timeout) as response:
                text = (await response.read()).decode(errors="replace")
        except TimeoutError as error:
            raise ServerSilent(f"{where}: no answer within {timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise ServerLost(f"{where}: {error or type(error).__name__}") from error
        if response.status >= 400:
            raise ServerFailed(response.status, f"{where}: HTTP {response.status}: {_message(text)}")
        try:
            return json.loads(text)
        except ValueError:
            return text


def read_gauges(text: str) -> Gauges:
    """Read what matters here of a page of Prometheus metrics; several engines of one server are added up."""
    sums = {"num_requests_running": 0.0, "num_requests_waiting": 0.0, "num_preemptions_total": 0.0}
    kv_used_frac = 0.0
    for line in text.splitlines():
        name, _, value = line.rpartition(" ")
        name = name.partition("{")[0].removeprefix("vllm:")
        if name in sums:
            sums[name] += float(value)
        elif name == "kv_cache_usage_perc":  # a fraction, whatever its name says
            kv_used_frac = max(kv_used_frac, float(value))
    running, waiting, preemptions = (int(value) for value in sums.values())
    return Gauges(num_running=running, num_waiting=waiting, kv_used_frac=kv_used_frac, num_preemptions=preemptions)


def _message(text: str) -> str:
    """Return the words of an error body."""
    try:
        body = json.loads(text)
    except ValueError:
        return text.strip()[:MAX_SHOWN] or "no text"
    for key in ("error", "message", "detail"):
        if isinstance(body, dict) and key in body:
            body = body[key]
    return str(body)[:MAX_SHOWN]
