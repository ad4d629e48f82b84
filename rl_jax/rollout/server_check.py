"""What a vLLM server must be before it samples for a run: version, routes, modes, lengths; each fault says the cure.

Asks the server, changes nothing on it but that its side of weight transfer is initialised. Knows no weights.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator

import aiohttp

from rl_jax.config import ConfigError, refuse
from rl_jax.rollout.client import ServerClient, ServerFailed, ServerLost
from rl_jax.rollout.fleet_config import FleetConfig
from rl_jax.rollout.generate_api import BadReply

SUPPORTED = "0.32."
"""Releases whose routes this client was tested against."""
INFO_S = 180.0
"""Seconds for vLLM's settings: it looks at its whole environment before it tells them."""
FLAGS = "see the command in docs/bridge.md"


async def check_servers(config: FleetConfig) -> None:
    """Refuse the servers of `urls` that cannot sample for this run.

    Raises:
        ConfigError: with every fault of each; one that does not answer is a fault.
    """
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session:
        clients = [ServerClient(url, config, session) for url in config.urls]
        results = await asyncio.gather(
            *(check_server(c, config, is_ours=False) for c in clients), return_exceptions=True
        )
    faults: list[str] = []
    for result in results:
        if isinstance(result, ConfigError):
            faults += result.faults
        elif isinstance(result, ServerLost):
            faults.append(f"sampler.urls: {result}; start the server first ({FLAGS})")
        elif isinstance(result, ServerFailed | BadReply):
            faults.append(f"sampler.urls: {result}; is it a vLLM server?")
        elif result is not None:
            raise result
    refuse(faults)


async def check_server(client: ServerClient, config: FleetConfig, *, is_ours: bool) -> None:
    """Refuse a server that cannot sample for this run.

    Args:
        is_ours: the run gave it its settings; then only what the environment brings is asked for.
    Raises:
        ConfigError: with every fault found. ServerLost: it does not answer.
    """
    version = await _version(client)
    if not version.startswith(SUPPORTED):
        raise ConfigError(
            [f"{client.url}: runs vLLM {version or 'of no version'}: expected {SUPPORTED}x; make fleet installs it"]
        )
    faults = [fault async for fault in _route_faults(client)]
    if not faults and not is_ours:
        faults = list(_mode_faults(client.url, await _server_info(client), config))
    if faults:
        raise ConfigError(faults)


async def _version(client: ServerClient) -> str:
    try:
        reply = await client.get("/version")
    except ServerFailed:
        return ""
    return str(reply.get("version", "")) if isinstance(reply, dict) else ""


async def _route_faults(client: ServerClient) -> AsyncIterator[str]:
    """Yield a fault for each route that is closed."""
    if await _status(client, "/inference/v1/generate", {}) in (403, 404, 405):
        yield f"{client.url}: does not answer /inference/v1/generate: start it with --enable-scale-out"
    if not await _has(client, "/weight_info"):
        yield f"{client.url}: has no routes for weight updates: start it with VLLM_SERVER_DEV_MODE=1 in its environment"
        return
    try:
        await client.post("/init_weight_transfer_engine", {"init_info": {}})
        await client.stage_status()
    except (ServerFailed, BadReply) as error:
        yield (
            f"{client.url}: cannot receive weights: start it with --weight-transfer-config "
            '\'{"backend":"rl_jax"}\' --worker-extension-cls bridge.vllm_plugin.worker.WorkerExtension and install '
            f"this project beside vLLM ({FLAGS}); it says: {error}"
        )


async def _status(client: ServerClient, path: str, body: dict[str, object]) -> int:
    try:
        await client.post(path, body)
    except ServerFailed as error:
        return error.status
    return 200


async def _has(client: ServerClient, path: str) -> bool:
    try:
        await client.get(path)
    except ServerFailed:
        return False
    return True


async def _server_info(client: ServerClient) -> dict[str, object]:
    try:
        reply = await client.get("/server_info", {"config_format": "json"}, timeout_s=INFO_S)
    except ServerFailed as error:
        raise ServerLost(f"{client.url}/server_info: {error}") from error
    found = reply.get("vllm_config") if isinstance(reply, dict) else None
    return found if isinstance(found, dict) else {}


def _mode_faults(url: str, info: dict[str, object], config: FleetConfig) -> Iterator[str]:
    """Yield a fault for each setting of the server that would make wrong numbers."""
    mode = _setting(info, "model_config", "logprobs_mode")
    if mode != "processed_logprobs":
        yield (
            f"{url}: logprobs_mode={mode!r}: start it with --logprobs-mode processed_logprobs; others are not those of "
            "the distribution that was sampled from"
        )
    length = _setting(info, "model_config", "max_model_len")
    if not isinstance(length, int) or length < config.max_len:
        yield f"{url}: max_model_len={length!r}: must be at least sampler.max_len={config.max_len}"
    dtype = str(_setting(info, "model_config", "dtype")).removeprefix("torch.")
    if dtype != config.compute_dtype:
        yield f"{url}: dtype={dtype}: start it with --dtype {config.compute_dtype}, as sampler.format and dtype ask"
    running = _setting(info, "scheduler_config", "max_num_seqs")
    if running != config.max_running:
        yield f"{url}: max_num_seqs={running!r}: differs from sampler.max_running={config.max_running}; make them equal"


def _setting(info: dict[str, object], table: str, key: str) -> object:
    found = info.get(table)
    return found.get(key) if isinstance(found, dict) else None
