"""rl_jax/rollout/fleet.py against servers that die, hang, lie and come back (fleet_fakes.py)."""

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from fleet_fakes import FakeServer, FakeSource, make_choice, make_request

from rl_jax.config import ConfigError
from rl_jax.rollout.fleet import VllmFleet
from rl_jax.rollout.fleet_config import FleetConfig
from rl_jax.rollout.server_check import check_servers
from rl_jax.sampler import Completion, Request, Sampler, SamplerLost

# A fake server that "dies" leaves connections that were accepted as it did, as the dead do.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

# Deadlines that no busy machine meets by accident; a test of one sets its own.
SETTINGS = {
    **{"max_len": 64, "max_running": 8, "format": "float32", "poll_s": 0.05, "control_timeout_s": 20.0},
    **{"update_timeout_s": 20.0, "request_timeout_s": 20.0, "lost_after_s": 20.0},
}
PATIENCE_S = 30.0


@contextmanager
def fleet_of(*servers: FakeServer, source: FakeSource | None = None, **settings: object) -> Iterator[VllmFleet]:
    """Start servers and a fleet that is attached to them, at version 0."""
    try:
        urls = tuple(server.start().url for server in servers)
        config = FleetConfig(**{**SETTINGS, "urls": urls, **settings})
        fleet = VllmFleet(config, source or FakeSource(), launch=None, logs=Path("unused"), say=lambda text: None)
        try:
            fleet.start()
            asyncio.run(fleet.publish(None, 0))
            yield fleet
        finally:
            asyncio.run(fleet.close())
    finally:
        for server in servers:
            server.close()


def check_tokens(requests: Sequence[Request], completions: Sequence[Completion]) -> None:
    """Every completion is whole, and the one that its request's seed gives on any server."""
    for request, completion in zip(requests, completions, strict=True):
        expected = make_choice(request.params.seed, ["0"] * request.params.max_tokens)
        np.testing.assert_array_equal(completion.tokens_T, expected["token_ids"])
        logprobs = [entry["logprob"] for entry in expected["logprobs"]["content"]]
        np.testing.assert_array_equal(completion.logprobs_T, np.float32(logprobs))


def until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end_s, "it never came"
        time.sleep(0.01)


def num_live(fleet: VllmFleet) -> float:
    return fleet.sync_metrics()["fleet/num_live"]


async def reached(condition: Callable[[], bool]) -> None:
    await asyncio.to_thread(until, condition)


GROUPS = [make_request(8 * group + member, group=group) for group in range(6) for member in range(4)]


def test_groups_stay_together_and_every_token_is_labelled():
    servers = [FakeServer(), FakeServer(), FakeServer()]
    with fleet_of(*servers) as fleet:
        assert isinstance(fleet, Sampler)
        completions = asyncio.run(fleet.generate_many(GROUPS))
        check_tokens(GROUPS, completions)
        assert all((completion.versions_T == 0).all() for completion in completions)
        assert [completion.num_cached_tokens for completion in completions] == [3] * len(GROUPS)
        seeds = [{b["sampling_params"]["seed"] // 8 for b in s.bodies("/inference/v1/generate") if b} for s in servers]
        assert sorted(group for found in seeds for group in found) == list(range(6))  # each group on one server
        assert all(seeds)
        health = asyncio.run(fleet.health())
    assert (health.version, health.max_running, health.num_waiting) == (0, 24, 6)
    assert (health.num_sampled_tokens, health.num_prompt_tokens, health.num_cached_tokens) == (120, 96, 72)
    assert health.kv_used_frac == 0.125
    assert health.num_preemptions == 0  # those of a server's life before


def test_weights_change_under_requests_in_flight():
    servers = [FakeServer(token_s=0.01, ends_at="2"), FakeServer(token_s=0.01, ends_at="2")]
    requests = [make_request(i, group=i, max_tokens=50) for i in range(8)]

    async def go(fleet: VllmFleet) -> list[Completion]:
        writing = asyncio.create_task(fleet.generate_many(requests))
        for version in (0, 1):
            await reached(lambda label=str(version): sum(label in w for s in servers for w in s.written.values()) == 8)
            await fleet.publish(None, version + 1)
        return await writing

    with fleet_of(*servers) as fleet:
        completions = asyncio.run(go(fleet))
        later = asyncio.run(fleet.generate(make_request(3)))
        metrics = fleet.sync_metrics()
    check_tokens(requests, completions)
    for completion in completions:
        assert set(completion.versions_T.tolist()) == {0, 1, 2}
        assert (np.diff(completion.versions_T) >= 0).all()
    assert (later.versions_T == 2).all()
    for server in servers:
        salts = [body["cache_salt"] for body in server.bodies("/inference/v1/generate") if body]
        assert set(salts) <= {"0", "2"} and "0" in salts
        staged = [b["kwargs"]["path"] for b in server.bodies("/collective_rpc") if b["method"] == "rl_jax_stage"]
        assert staged == ["/updates/v0-full", "/updates/v1-delta", "/updates/v2-delta"]
        update = ["/start_weight_update", "/update_weights", "/finish_weight_update"]
        control = [p for p in server.paths() if p in {"/pause", "/resume", "/weight_info", *update}]
        assert control[1:] == ["/pause", *update, "/weight_info", "/resume"] * 3  # the first look is the check
        assert {body["clear_cache"] for body in server.bodies("/pause")} == {"true"}
    assert metrics["sync/replica0/num_bytes"] == 100 and metrics["sync/num_bytes"] == 200
    assert (metrics["sync/replica1/version"], metrics["sync/replica1/is_full"]) == (2, 0)
    assert (metrics["sync/changed_frac"], metrics["sync/write_s"]) == (0.25, 0.5)
    assert 0 < metrics["sync/pause_s/max"] < PATIENCE_S


def test_one_by_one_somebody_always_serves():
    servers = [FakeServer(commit_s=0.05) for _ in range(3)]
    with fleet_of(*servers, max_updating=1, kv_on_update="keep", delta=False) as fleet:
        asyncio.run(fleet.publish(None, 1))
        assert {b["clear_cache"] for s in servers for b in s.bodies("/pause")} == {"false"}
        assert fleet.sync_metrics()["sync/replica0/is_full"] == 1
    for update in (0, 1):
        pauses = sorted(server.pauses[update] for server in servers)
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(pauses))


def test_work_of_a_server_that_dies_is_done_elsewhere():
    servers = [FakeServer(token_s=0.01, ends_at="never"), FakeServer(token_s=0.01)]
    requests = [make_request(i, group=i, max_tokens=12) for i in range(10)]

    async def go(fleet: VllmFleet) -> list[Completion]:
        writing = asyncio.create_task(fleet.generate_many(requests))
        await reached(lambda: len(servers[0].written) + len(servers[1].written) == len(requests))
        await asyncio.to_thread(servers[0].die)
        return await writing

    with fleet_of(*servers) as fleet:
        check_tokens(requests, asyncio.run(go(fleet)))
        metrics = fleet.sync_metrics()
        assert (metrics["fleet/num_live"], metrics["fleet/num_evictions"]) == (1, 1)
        assert metrics["fleet/num_redispatched"] == len(servers[0].bodies("/inference/v1/generate")) - 1
        asyncio.run(fleet.publish(None, 1))
        servers[0].calls.clear()
        servers[0].ends_at = ""
        servers[0].restart()
        until(lambda: num_live(fleet) == 2)
        assert servers[0].held == (1, "digest-1")
        assert fleet.sync_metrics()["sync/replica0/is_full"] == 1
        later = [make_request(i, group=100 + i) for i in range(10)]  # the first groups stay where their prompts are
        asyncio.run(fleet.generate_many(later))
        paths = servers[0].paths()
        asked = [i for i, body in enumerate(servers[0].calls) if body[0] == "/inference/v1/generate" and body[1]]
        assert asked and paths.index("/resume") < asked[0]  # nothing is asked of it before it holds version 1
        assert {servers[0].calls[i][1]["cache_salt"] for i in asked} == {"1"}


@pytest.mark.parametrize(
    "path", ["/pause", "/start_weight_update", "/update_weights", "/finish_weight_update", "/weight_info"]
)
@pytest.mark.parametrize("how", ["hangs", "fails"])
def test_a_server_that_fails_in_an_update_is_never_resumed(path: str, how: str):
    for update_timeout_s in (0.6, 3.0, 15.0):  # on a busy machine an update may run out of time before it gets there
        if is_never_resumed(path, how, update_timeout_s):
            return
    pytest.fail(f"no update came as far as {path}, with the other server well")


def is_never_resumed(path: str, how: str, update_timeout_s: float) -> bool:
    """Check it; False if the time was too short to see it."""
    servers = [FakeServer(), FakeServer()]
    timeouts = {"update_timeout_s": update_timeout_s, "control_timeout_s": max(2.0, update_timeout_s)}
    with fleet_of(*servers, **timeouts) as fleet:
        until(lambda: num_live(fleet) == 2)
        num_evictions = fleet.sync_metrics()["fleet/num_evictions"]
        getattr(servers[0], how).add(path)
        num_resumed, num_asked = servers[0].paths().count("/resume"), servers[0].paths().count(path)
        asyncio.run(fleet.publish(None, 1))
        is_there = servers[0].paths().count(path) > num_asked
        if not is_there or fleet.sync_metrics()["fleet/num_evictions"] != num_evictions + 1:
            return False
        assert num_live(fleet) == 1
        completions = asyncio.run(fleet.generate_many(GROUPS))
        check_tokens(GROUPS, completions)
        assert all((completion.versions_T == 1).all() for completion in completions)
        getattr(servers[0], how).clear()
        time.sleep(0.3)  # it answers again, with weights that nobody knows
        assert num_live(fleet) == 1
        assert servers[0].paths().count("/resume") == num_resumed
        servers[0].restart()
        until(lambda: num_live(fleet) == 2)
        assert servers[0].held == (1, "digest-1")
    return True


def test_a_refused_difference_gives_way_to_everything():
    server = FakeServer(refuses={"delta"})
    with fleet_of(server) as fleet:
        asyncio.run(fleet.publish(None, 1))
        assert server.held == (1, "digest-1")
        staged = [b["kwargs"]["path"] for b in server.bodies("/collective_rpc") if b["method"] == "rl_jax_stage"]
        assert staged == ["/updates/v0-full", "/updates/v1-delta", "/updates/v1-full"]
        assert fleet.sync_metrics()["fleet/num_evictions"] == 0


def test_a_server_that_refuses_everything_is_evicted_as_it_was():
    servers = [FakeServer(), FakeServer()]
    with fleet_of(*servers) as fleet:
        servers[0].refuses |= {"delta", "full"}
        asyncio.run(fleet.publish(None, 1))
        assert num_live(fleet) == 1
        assert (servers[0].label, servers[0].paths().count("/pause")) == ("0", 1)  # that of version 0
        servers[0].refuses.clear()
        until(lambda: num_live(fleet) == 2)  # it was never touched, so it may come back as it is
        assert servers[0].held == (1, "digest-1")


def test_a_server_that_holds_something_else_is_not_resumed():
    servers = [FakeServer(), FakeServer()]
    with fleet_of(*servers) as fleet:
        servers[1].loses_bytes = True
        asyncio.run(fleet.publish(None, 1))
        assert num_live(fleet) == 1
        assert servers[1].paths().count("/resume") == 1  # that of version 0


def test_weights_that_cannot_be_written_change_nothing():
    server, source = FakeServer(), FakeSource()
    with fleet_of(server, source=source) as fleet:
        source.is_broken = True
        with pytest.raises(OSError, match="No space left"):
            asyncio.run(fleet.publish(None, 1))
        assert server.label == "0"
        assert (asyncio.run(fleet.generate(make_request(1))).versions_T == 0).all()
        source.is_broken = False
        asyncio.run(fleet.publish(None, 2))
        assert (asyncio.run(fleet.generate(make_request(1))).versions_T == 2).all()


def _nan(choice: dict) -> None:
    choice["logprobs"]["content"][0]["logprob"] = -9999.0


def _wrong_version(choice: dict) -> None:
    choice["weight_versions"] = [{"version": "5", "start": 0, "end": len(choice["token_ids"])}]


@pytest.mark.parametrize("lie", [_nan, _wrong_version])
def test_a_server_that_lies_is_evicted(lie: Callable[[dict], None]):
    servers = [FakeServer(lie=lie), FakeServer()]
    with fleet_of(*servers, poll_s=30.0) as fleet:
        completions = asyncio.run(fleet.generate_many(GROUPS))
        check_tokens(GROUPS, completions)
        metrics = fleet.sync_metrics()
    assert (metrics["fleet/num_live"], metrics["fleet/num_evictions"]) == (1, 1)
    assert metrics["fleet/num_redispatched"] >= 1


def test_a_hung_server_is_evicted_and_its_requests_go_elsewhere():
    servers = [FakeServer(), FakeServer()]
    with fleet_of(*servers, control_timeout_s=2.0) as fleet:
        servers[0].hangs |= {"/inference/v1/generate", "/health"}
        check_tokens(GROUPS, asyncio.run(fleet.generate_many(GROUPS)))
        assert num_live(fleet) == 1


def test_a_request_that_takes_too_long_evicts():
    servers = [FakeServer(), FakeServer()]
    with fleet_of(*servers, request_timeout_s=2.0, poll_s=30.0) as fleet:
        servers[1].hangs |= {"/inference/v1/generate"}
        check_tokens(GROUPS, asyncio.run(fleet.generate_many(GROUPS)))
        assert num_live(fleet) == 1


def test_without_any_server_the_sampler_is_lost_and_says_why():
    server = FakeServer()
    with fleet_of(server, lost_after_s=0.4) as fleet:
        server.die()
        started_s = time.monotonic()
        with pytest.raises(SamplerLost, match=r"lost_after_s=0\.4: replica0 lost: http"):
            asyncio.run(fleet.generate(make_request(1)))
        assert time.monotonic() - started_s < PATIENCE_S
        server.restart()
        until(lambda: num_live(fleet) == 1)
        check_tokens([make_request(1)], [asyncio.run(fleet.generate(make_request(1)))])
    with pytest.raises(SamplerLost, match="closed"):
        asyncio.run(fleet.generate(make_request(1)))


def test_an_abort_of_somebody_else_is_written_again():
    aborted: list[int] = []

    def abort_once(choice: dict) -> None:
        if not aborted:
            aborted.append(1)
            choice.update(finish_reason="abort")

    with fleet_of(FakeServer(lie=abort_once)) as fleet:
        check_tokens([make_request(1)], [asyncio.run(fleet.generate(make_request(1)))])
        assert fleet.sync_metrics()["fleet/num_redispatched"] == 1
        assert fleet.sync_metrics()["fleet/num_evictions"] == 0


def test_cancelling_aborts_on_the_server():
    server = FakeServer(token_s=0.5)

    async def go(fleet: VllmFleet) -> None:
        writing = asyncio.create_task(fleet.generate_many([make_request(i) for i in range(3)]))
        await asyncio.to_thread(until, lambda: server.num_running == 3)
        writing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await writing
        await asyncio.to_thread(until, lambda: server.num_running == 0)

    with fleet_of(server) as fleet:
        asyncio.run(go(fleet))
        until(lambda: len(server.bodies("/inference/v1/abort_requests")) == 3)
        asked = {body["request_id"] for body in server.bodies("/inference/v1/generate") if body}
        aborted = {i for body in server.bodies("/inference/v1/abort_requests") for i in body["request_ids"]}
        assert aborted == {f"generate-tokens-{request_id}" for request_id in asked}
        assert num_live(fleet) == 1


def test_a_request_that_cannot_be_served_is_the_callers_fault():
    server = FakeServer()
    with fleet_of(server) as fleet:
        with pytest.raises(ValueError, match=r"request train\.2\.0: .*HTTP 400: the prompt is too long"):
            asyncio.run(fleet.generate_many([make_request(1), make_request(2, prompt=62)]))
        assert num_live(fleet) == 1


def test_every_replica_is_scored():
    servers = [FakeServer(), FakeServer(), FakeServer()]
    sequences = [np.array([3, 50, 7], np.int32), np.array([9, 8], np.int32)]
    with fleet_of(*servers) as fleet:
        asyncio.run(fleet.publish(None, 4))
        servers[1].closed.add("/inference/v1/generate")
        servers[2].label = "9"
        scores = asyncio.run(fleet.score_each(sequences))
        np.testing.assert_allclose(asyncio.run(fleet.score(sequences[0])), [0, -0.054, -0.011], rtol=1e-6)
    assert set(scores) == {"replica0", "replica2"}
    np.testing.assert_allclose(scores["replica0"][0], [0, -0.054, -0.011], rtol=1e-6)
    np.testing.assert_allclose(scores["replica2"][1], [0, -0.017], rtol=1e-6)  # what it says, for a canary to judge


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        (lambda s: setattr(s, "vllm_version", "0.11.2"), r"runs vLLM 0\.11\.2: expected 0\.32\.x"),
        (lambda s: s.closed.add("/version"), "runs vLLM of no version"),
        (lambda s: s.closed.add("/inference/v1/generate"), "start it with --enable-scale-out"),
        (lambda s: s.closed.add("/weight_info"), "start it with VLLM_SERVER_DEV_MODE=1"),
        (lambda s: s.closed.add("/collective_rpc"), "--worker-extension-cls"),
        (lambda s: s.fails.add("/init_weight_transfer_engine"), "broken /init_weight_transfer_engine"),
        (lambda s: s.info["model_config"].update(logprobs_mode="raw_logprobs"), "--logprobs-mode processed_logprobs"),
        (
            lambda s: s.info["model_config"].update(max_model_len=63),
            "max_model_len=63: must be at least sampler.max_len",
        ),
        (lambda s: s.info["model_config"].update(dtype="torch.bfloat16"), "start it with --dtype float32"),
        (lambda s: s.info["scheduler_config"].update(max_num_seqs=9), r"differs from sampler\.max_running=8"),
    ],
)
def test_a_server_that_cannot_sample_for_a_run_is_refused(wrong: Callable[[FakeServer], object], expected: str):
    servers = [FakeServer(), FakeServer()]
    wrong(servers[1])
    with pytest.raises(ConfigError, match=expected) as caught, fleet_of(*servers):
        pass
    (fault,) = caught.value.faults
    assert fault.startswith(servers[1].url)


@pytest.mark.parametrize(
    ("says", "expected"),
    [
        (b"SSH-2.0-OpenSSH_9.6\r\n", "start the server first"),
        (b"", "start the server first"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n\xff\xfe\xfd\xfc", "runs vLLM of no version"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]", "runs vLLM of no version"),
        (b"HTTP/1.1 500 No\r\nContent-Length: 2\r\n\r\nno", "runs vLLM of no version"),
        (None, "no answer within 0.5 s; start the server first"),
    ],
)
def test_an_address_of_something_else_is_a_fault(says: bytes | None, expected: str):
    """`says`: what is there answers so, whatever it is asked; None: it says nothing."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        if says is None:
            await reader.read()
        else:
            writer.write(says)
            await writer.drain()
        writer.close()

    async def check() -> None:
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            config = FleetConfig(urls=(url,), control_timeout_s=0.5 if says is None else 30.0)
            with pytest.raises(ConfigError) as caught:
                await check_servers(config)
        (fault,) = caught.value.faults
        assert url in fault
        assert expected in fault

    asyncio.run(check())
