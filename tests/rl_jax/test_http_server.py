"""The server around sampling: control routes, callers that leave, pauses, aborts, lost samplers, the end."""

import asyncio
import re
import socket

import aiohttp
import pytest
from http_fakes import END, MAX_LEN, TOKENIZER, Client, FakeSampler, play

from rl_jax.config import ConfigError
from rl_jax.http.config import ServeConfig
from rl_jax.http.server import serve

GENERATE = "/inference/v1/generate"
CHAT = "/v1/chat/completions"
ASKED = {"token_ids": [5, 6, 7], "sampling_params": {}}
USER = [{"role": "user", "content": "ab"}]


def test_models_tell_the_name_and_the_longest_sequence():
    async def body(client: Client) -> None:
        (entry,) = (await client.get("/v1/models"))["data"]
        assert (entry["id"], entry["object"], entry["max_model_len"]) == ("toy", "model", MAX_LEN)
        reply = await client.post(GENERATE, {**ASKED, "model": "gpt"}, status=404)
        assert reply["error"] == {
            "message": "model='gpt': not served here; expected 'toy'",
            "type": "invalid_request_error",
            "param": None,
            "code": "model_not_found",
        }

    play(body)


def test_health_and_metrics_tell_what_the_sampler_tells():
    async def body(client: Client) -> None:
        assert await client.get("/health") == {"status": "ok", "weight_version": "4"}
        async with client.session.get("/metrics") as response:
            text = await response.text()
        values = dict(re.findall(r"^rl_jax_(\w+) (\S+)$", text, re.MULTILINE))
        assert values == {
            "requests_running": "2",
            "requests_waiting": "3",
            "requests_running_max": "7",
            "kv_used_frac": "0.25",
            "weight_version": "4",
            "prompt_tokens_total": "53",
            "cached_tokens_total": "29",
            "sampled_tokens_total": "101",
            "preemptions_total": "0",
            "busy_seconds_total": "1.5",
        }
        assert text.count("# TYPE") == len(values)

    play(body)


def test_text_and_chats_become_ids_and_back():
    async def body(client: Client) -> None:
        reply = await client.post("/tokenize", {"prompt": "ab<|end|>"})
        assert reply == {"count": 3, "max_model_len": MAX_LEN, "tokens": [97, 98, END]}
        assert (await client.post("/tokenize", {"messages": USER}))["tokens"] == [257, 97, 98, 258]
        bare = await client.post("/tokenize", {"messages": USER, "add_generation_prompt": False, "model": "toy"})
        assert bare["tokens"] == [257, 97, 98]
        assert await client.post("/detokenize", {"tokens": [97, 98, END]}) == {"prompt": "ab<|end|>"}
        for wrong in ({}, {"prompt": "a", "messages": USER}):
            assert "this or messages" in (await client.post("/tokenize", wrong, status=400))["error"]["message"]
        reply = await client.post("/detokenize", {"tokens": [900]}, status=400)
        assert "tokens[0]=900: expected an integer from 0 to 264" in reply["error"]["message"]

    play(body)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "the body is no JSON: Expecting value"),
        (b'{"token_ids": [1', "the body is no JSON"),
        (b'{"token_ids": NaN}', "the body is no JSON: NaN is no JSON number"),
        (b'{"x": ' + b"9" * 5000 + b"}", "the body is no JSON"),
        (b"\xff\xfe{", "the body is no JSON"),
        (b"[" * 100_000, "the body is no JSON"),
        (b"[1, 2]", "the body is a JSON list; expected an object"),
        (b'{"token_ids": [1], "sampling_params": {"temperature": 1e999}}', "temperature=inf: expected a number"),
    ],
)
def test_what_is_no_json_object_is_refused(raw: bytes, message: str):
    async def body(client: Client) -> None:
        reply = await client.post(GENERATE, raw, status=400)
        assert message in reply["error"]["message"]

    play(body)


def test_wrong_routes_methods_and_sizes_have_their_own_status():
    async def body(client: Client) -> None:
        reply = await client.post("/v1/embeddings", {}, status=404)
        assert "POST /v1/embeddings" in reply["error"]["message"]
        await client.get(GENERATE, status=405)
        reply = await client.post(GENERATE, b" " * 1001, status=413)
        assert "1000" in reply["error"]["message"]

    play(body, max_body_bytes=1000)


@pytest.mark.parametrize("path", [GENERATE, CHAT])
@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_client_that_leaves_frees_its_slots(path: str, is_streamed: bool):
    async def body(client: Client) -> None:
        asked = {**ASKED, "sampling_params": {"n": 2}} if path == GENERATE else {"messages": USER, "n": 2}
        call = asyncio.create_task(client.session.post(path, json={**asked, "stream": is_streamed}))
        await client.until(lambda: len(client.sampler.requests) == 2)
        if is_streamed:
            (await call).close()
        call.cancel()
        await client.until(lambda: len(client.sampler.aborted) == 2)
        assert await client.post("/inference/v1/abort_requests", {"request_ids": []}) == {
            "status": "aborted",
            "aborted": 0,
        }

    play(body, {"is_slow": True})


@pytest.mark.parametrize("given_id", ["r1", "generate-tokens-r1"])
def test_aborted_requests_end_with_what_they_have(given_id: str):
    async def body(client: Client) -> None:
        call = asyncio.create_task(client.post(GENERATE, {**ASKED, "request_id": "r1"}))
        await client.until(lambda: len(client.sampler.requests) == 1)
        twin = await client.post(GENERATE, {**ASKED, "request_id": "r1"}, status=409)
        assert "request_id='generate-tokens-r1': is being sampled" in twin["error"]["message"]
        reply = await client.post("/inference/v1/abort_requests", {"request_ids": [given_id, "other"]})
        assert reply == {"status": "aborted", "aborted": 1}
        choice = (await call)["choices"][0]
        assert (choice["token_ids"], choice["finish_reason"]) == ([98], "abort")
        await client.until(lambda: client.sampler.aborted == ["generate-tokens-r1-0"])
        await client.post("/inference/v1/abort_requests", {"request_ids": "r1"}, status=400)

    play(body, {"is_slow": True})


def test_pause_keep_freezes_and_resume_goes_on():
    async def body(client: Client) -> None:
        call = asyncio.create_task(client.post(GENERATE, ASKED))
        await client.until(lambda: len(client.sampler.requests) == 1)
        assert await client.post("/pause?mode=keep") == {"status": "paused"}
        later = asyncio.create_task(client.post(GENERATE, ASKED))
        assert await client.get("/is_paused") == {"is_paused": True}
        client.sampler.go.set()
        refused = await client.post("/pause?mode=wait", status=409)
        assert "1 frozen requests cannot finish" in refused["error"]["message"]
        assert (call.done(), len(client.sampler.requests)) == (False, 1)  # the later one waits before the sampler
        assert await client.post("/resume") == {"status": "resumed"}
        assert [(await c)["choices"][0]["finish_reason"] for c in (call, later)] == ["stop", "stop"]
        assert await client.get("/is_paused") == {"is_paused": False}

    play(body, {"is_slow": True})


def test_pause_aborts_by_default():
    async def body(client: Client) -> None:
        call = asyncio.create_task(client.post(GENERATE, ASKED))
        await client.until(lambda: len(client.sampler.requests) == 1)
        await client.post("/pause")
        assert (await call)["choices"][0]["finish_reason"] == "abort"
        assert client.sampler.calls == ["pause"]

    play(body, {"is_slow": True})


def test_pause_wait_lets_running_requests_finish():
    async def body(client: Client) -> None:
        call = asyncio.create_task(client.post(GENERATE, ASKED))
        await client.until(lambda: len(client.sampler.requests) == 1)
        pause = asyncio.create_task(client.post("/pause?mode=wait"))
        while not (await client.get("/is_paused"))["is_paused"]:
            await asyncio.sleep(0)
        later = asyncio.create_task(client.post(GENERATE, ASKED))
        await client.get("/health")
        assert (pause.done(), client.sampler.calls) == (False, [])
        client.sampler.go.set()
        assert await pause == {"status": "paused"}
        assert (await call)["choices"][0]["finish_reason"] == "stop"
        assert (len(client.sampler.requests), later.done()) == (1, False)
        await client.post("/resume")
        assert (await later)["choices"][0]["finish_reason"] == "stop"

    play(body, {"is_slow": True})


@pytest.mark.parametrize("query", ["mode=sleep", "mode=keep&clear_cache=true"])
def test_unknown_ways_to_pause_are_refused(query: str):
    async def body(client: Client) -> None:
        reply = await client.post(f"/pause?{query}", status=400)
        assert "expected mode=abort, mode=wait or mode=keep" in reply["error"]["message"]
        assert await client.get("/is_paused") == {"is_paused": False}

    play(body)


def test_a_lost_sampler_is_a_503():
    async def body(client: Client) -> None:
        for asked, path in ((ASKED, GENERATE), ({"messages": USER, "stream": True}, CHAT)):
            reply = await client.post(path, asked, status=503)
            assert reply["error"]["message"] == "the sampler is lost: its thread died; try again"
        await client.get("/health", status=503)

    play(body, {"fails_after": 0})


def test_a_sampler_lost_in_mid_stream_is_an_event():
    async def body(client: Client) -> None:
        async with client.session.post(CHAT, json={"messages": USER, "stream": True}) as response:
            first, last = (await response.text()).split("\n\n")[:-1]
        assert '"content": "b"' in first
        assert '"message": "the sampler is lost: its thread died; try again"' in last

    play(body, {"fails_after": 1})


def run_until_ready(config: ServeConfig, sampler: FakeSampler, body) -> list[str]:
    """Serve, run `body` with the URL, cancel; return the lines that were said."""
    lines: list[str] = []

    async def main() -> None:
        task = asyncio.create_task(serve(sampler, TOKENIZER, config, max_len=MAX_LEN, vocab_size=265, say=lines.append))
        async with asyncio.timeout(2):
            while not lines:
                await asyncio.sleep(0.005)
        await body(lines[0].split()[3], task)
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    return lines


def test_the_end_hands_out_what_there_is():
    sampler = FakeSampler(is_slow=True)

    async def body(url: str, task: asyncio.Task) -> None:
        async with aiohttp.ClientSession(url) as session:
            client = Client(session, sampler)
            call = asyncio.create_task(client.post(GENERATE, ASKED))
            await client.until(lambda: len(sampler.requests) == 1)
            task.cancel()
            choice = (await call)["choices"][0]
            assert (choice["token_ids"], choice["finish_reason"]) == ([98], "abort")

    (line,) = run_until_ready(ServeConfig(port=0, model_name="toy", shutdown_s=1.0), sampler, body)
    assert re.fullmatch(r"serving toy at http://127\.0\.0\.1:\d+ \(Ctrl-C stops it\)", line)
    assert len(sampler.aborted) == 1


def test_a_port_in_use_is_refused_before_anything_is_said():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        run = serve(FakeSampler(), TOKENIZER, ServeConfig(port=port), max_len=MAX_LEN, vocab_size=265)
        with pytest.raises(ConfigError, match=rf"serve\.port={port}: cannot listen on 127\.0\.0\.1:{port} .*free port"):
            asyncio.run(run)


def test_bad_settings_are_refused_together():
    with pytest.raises(ConfigError) as caught:
        ServeConfig(host="", port=70000, model_name="", temperature=-1.0, top_p=0.0, min_p=1.5, max_body_bytes=0)
    assert [fault.split("=")[0] for fault in caught.value.faults] == [
        "host",
        "port",
        "model_name",
        "temperature",
        "top_p",
        "min_p",
        "max_body_bytes",
    ]
