"""The token route against what its consumers send and accept; bodies were captured from verifiers and vLLM 0.32."""

import base64
import io
import math

import numpy as np
import pytest
from http_fakes import MAX_LEN, Client, FakeSampler, Json, play, without

PATH = "/inference/v1/generate"
PROMPT = [1, 4093, 198, 12385, 362, 260, 216, 37, 29, 13435, 2229, 30, 2720, 318, 351, 933, 43435, 2880, 2, 198]
PROMPT += [1, 520, 9531, 198]
TURN_1 = {
    "model": "toy",
    "token_ids": PROMPT,
    "sampling_params": {
        "temperature": 1.0,
        "max_tokens": 64,
        "stop_token_ids": [2],
        "logprobs": 1,
        "skip_special_tokens": False,
    },
}
SMOLLM2 = {"vocab_size": 49152}


def accepted_by_renderers(reply: Json) -> bool:
    """Apply the checks that renderers 0.1.12 makes before it believes a reply."""
    (choice,) = reply["choices"]
    content = choice["logprobs"]["content"]
    return len(content) == len(choice["token_ids"]) and all(
        entry["token"] == f"token_id:{token_id}"
        and type(entry["logprob"]) is float
        and math.isfinite(entry["logprob"])
        and entry["logprob"] != -9999.0
        for entry, token_id in zip(content, choice["token_ids"], strict=True)
    )


def entry(token_id: int, logprob: float) -> Json:
    one = {"token": f"token_id:{token_id}", "token_id": token_id, "logprob": logprob}
    return {**one, "top_logprobs": [one]}


def test_captured_first_turn_gets_the_captured_reply():
    async def body(client: Client) -> None:
        reply = await client.post(PATH, TURN_1)
        assert accepted_by_renderers(reply)
        assert reply["request_id"].startswith("generate-tokens-")
        assert type(reply["created"]) is int
        assert without(reply, "request_id", "created") == {
            "model": "toy",
            "usage": {
                "prompt_tokens": 24,
                "total_tokens": 27,
                "completion_tokens": 3,
                "prompt_tokens_details": {"cached_tokens": 12},
            },
            "prompt_token_ids": None,
            "mm_placeholders": None,
            "output_mode": "tokens",
            "choices": [
                {
                    "index": 0,
                    "finish_reason": "stop",
                    "stop_reason": 2,
                    "token_ids": [22465, 30, 2],
                    "routed_experts": None,
                    "sampling_mask": None,
                    "weight_versions": [{"version": "4", "start": 0, "end": 1}, {"version": "5", "start": 1, "end": 3}],
                    "logprobs": {"content": [entry(22465, -0.125), entry(30, -0.25), entry(2, -0.375)]},
                }
            ],
        }
        (request,) = client.sampler.requests
        np.testing.assert_array_equal(request.tokens_T, PROMPT)
        assert request.tokens_T.dtype == np.int32
        assert (request.params.temperature, request.params.max_tokens) == (1.0, 64)
        assert request.params.stop_token_ids == (2, 259)  # its own, and the model's

    play(body, {"ids": [22465, 30, 2, 77], "versions": [4, 5]}, **SMOLLM2)


def test_captured_second_turn_gets_routed_experts_from_where_it_asks():
    turn_2 = [*PROMPT, 22465, 30, 2, 198, 1]
    sampling = {**TURN_1["sampling_params"], "routed_experts_prompt_start": 23}

    async def body(client: Client) -> None:
        reply = await client.post(PATH, {**TURN_1, "token_ids": turn_2, "sampling_params": sampling})
        experts_TLA = np.load(io.BytesIO(base64.b64decode(reply["choices"][0]["routed_experts"])))
        all_TLA = np.arange(31 * 2 * 3, dtype=np.uint16).reshape(31, 2, 3)  # 29 + 3 tokens, the last was never an input
        np.testing.assert_array_equal(experts_TLA, all_TLA[23:])
        assert experts_TLA.dtype == np.uint16

    play(body, {"ids": [22465, 30, 2]}, return_routed_experts=True, **SMOLLM2)


def test_session_and_salt_reach_the_sampler_and_seeds_count_up():
    async def body(client: Client) -> None:
        sampling = {"n": 3, "seed": 11, "max_tokens": 1, "top_k": -1}
        request = {"token_ids": [5], "sampling_params": sampling, "cache_salt": "17", "priority": 0, "features": None}
        reply = await client.post(PATH, {**request, "request_id": "g7"}, **{"X-Session-ID": "trace-1"})
        assert reply["request_id"] == "generate-tokens-g7"
        assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2]
        assert reply["choices"][0]["logprobs"] is None
        assert [request.params.seed for request in client.sampler.requests] == [11, 12, 13]
        assert {request.prefix_key for request in client.sampler.requests} == {"17/trace-1"}
        assert {request.params.top_k for request in client.sampler.requests} == {0}
        assert reply["usage"]["total_tokens"] == 1 + 3

    play(body)


def test_seeds_of_requests_without_one_differ():
    async def body(client: Client) -> None:
        for _ in range(2):
            await client.post(PATH, {"token_ids": [5], "sampling_params": {}})
        first, second = client.sampler.requests
        assert first.params.seed != second.params.seed
        assert first.prefix_key != second.prefix_key
        assert first.params.max_tokens == MAX_LEN - 1

    play(body)


@pytest.mark.parametrize("chunk", [1, 2, 5])
def test_streamed_pieces_add_up_to_the_whole_reply(chunk: int):
    request = {"token_ids": [5, 6, 7], "sampling_params": {"logprobs": 0, "n": 2}}

    async def body(client: Client) -> None:
        whole = await client.post(PATH, request)
        options = {"stream": True, "stream_options": {"include_usage": True}}
        *chunks, last = await client.events(PATH, {**request, **options})
        assert (last["choices"], last["usage"]) == ([], whole["usage"])
        for index, expected in enumerate(whole["choices"]):
            parts = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
            assert {part["finish_reason"] for part in parts[:-1]} <= {None}
            token_ids = [token_id for part in parts for token_id in part["token_ids"]]
            content = [entry for part in parts for entry in part["logprobs"]["content"]]
            assert {**parts[-1], "token_ids": token_ids, "logprobs": {"content": content}} == expected

    play(body, {"text": "wrote", "chunk": chunk, "versions": [4, 4, 4, 6]})


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        ({"max_tokens": 2}, ([98, 97], "length", None)),
        ({}, ([98, 97, 259], "stop", None)),
        ({"stop_token_ids": [97]}, ([98, 97], "stop", 97)),
        ({"stop": "a"}, ([98, 97], "stop", "a")),
        ({"ignore_eos": True}, ([98, 97, 259], "length", None)),
    ],
)
def test_each_end_says_why(sampling: Json, expected: tuple[list[int], str, object]):
    async def body(client: Client) -> None:
        reply = await client.post(PATH, {"token_ids": [257], "sampling_params": sampling})
        choice = reply["choices"][0]
        assert (choice["token_ids"], choice["finish_reason"], choice["stop_reason"]) == expected

    play(body)


@pytest.mark.parametrize(
    ("change", "sampling", "messages"),
    [
        ({}, {"bogus": 1, "temprature": 2}, ["sampling_params.bogus: unknown key; allowed: ", "temprature", "top_p"]),
        ({"bogus": None}, {}, ["bogus: unknown key; allowed: ", "token_ids"]),
        ({"token_ids": "abc"}, {}, ["token_ids='abc': expected a list of integers"]),
        ({"token_ids": [5, 265]}, {}, ["token_ids[1]=265: expected an integer from 0 to 264"]),
        ({"token_ids": [5, True]}, {}, ["token_ids[1]=True"]),
        ({"token_ids": [5, 1.0]}, {}, ["token_ids[1]=1.0"]),
        ({"token_ids": [-1]}, {}, ["token_ids[0]=-1"]),
        ({"token_ids": []}, {}, ["the prompt has 0 tokens; expected at least 1"]),
        ({"token_ids": None}, {}, ["token_ids: missing"]),
        ({"token_ids": [1] * 211}, {}, ["the prompt has 211 tokens", "max_len=211", "to 210 tokens or fewer"]),
        ({"sampling_params": [1]}, {}, ["sampling_params=[1]: expected an object"]),
        ({"priority": 1}, {}, ["priority=1: expected 0 or null: this server cannot do it"]),
        ({"cache_salt": "x" * 1025}, {}, ["expected a string of 1 to 1024 characters"]),
        ({"stream": 1}, {}, ["stream=1: expected true or false"]),
        ({"output_mode": "text"}, {}, ["output_mode='text': expected \"tokens\" or null"]),
        ({"features": {}}, {}, ["features={}: expected null"]),
        (
            {},
            {"temperature": -0.5, "top_p": 0, "min_p": 2},
            ["temperature=-0.5", "top_p=0: expected a number in (0, 1]"],
        ),
        ({}, {"temperature": "hot"}, ["sampling_params.temperature='hot': expected a number from 0 to 1000"]),
        ({}, {"temperature": 10**400}, ["temperature=1000"]),
        ({}, {"temperature": True}, ["temperature=True"]),
        ({}, {"temperature": 99}, ["temperature=99: this sampler refuses it"]),
        ({}, {"max_tokens": 0}, ["max_tokens=0: expected an integer from 1"]),
        ({}, {"n": 0, "seed": -1}, ["n=0: expected an integer from 1 to 128", "seed=-1"]),
        ({}, {"logprobs": 5}, ["logprobs=5: expected 0 or 1: only the sampled token's own"]),
        ({}, {"prompt_logprobs": 1}, ["prompt_logprobs=1: expected null"]),
        ({}, {"frequency_penalty": 0.5}, ["frequency_penalty=0.5: expected 0 or null"]),
        ({}, {"stop": ["ok", ""]}, ["stop=['ok', '']: expected a string of 1 to 1024 characters, or a list"]),
        ({}, {"stop": ["x"] * 65}, ["or a list of at most 64 of them"]),
        ({}, {"routed_experts_prompt_start": 2}, ["routed_experts_prompt_start=2: expected an integer from 0 to 1"]),
    ],
)
def test_bad_bodies_are_refused_with_every_fault(change: Json, sampling: Json, messages: list[str]):
    async def body(client: Client) -> None:
        reply = await client.post(PATH, {"token_ids": [5, 6], "sampling_params": sampling, **change}, status=400)
        assert set(reply) == {"error"}
        assert set(reply["error"]) == {"message", "type", "param", "code"}
        assert reply["error"]["type"] == "invalid_request_error"
        for message in messages:
            assert message in reply["error"]["message"]

    play(body)


def test_settings_that_ask_for_nothing_are_accepted():
    neutral = {"frequency_penalty": 0.0, "presence_penalty": 0, "repetition_penalty": 1.0, "min_tokens": 0}
    neutral |= {"logit_bias": {}, "detokenize": False, "prompt_logprobs": None, "top_p": None, "min_p": 0}

    async def body(client: Client) -> None:
        await client.post(PATH, {"token_ids": [5], "sampling_params": neutral})

    play(body)


def test_defaults_come_from_the_config():
    async def body(client: Client) -> None:
        await client.post(PATH, {"token_ids": [5], "sampling_params": {}})
        params = client.sampler.requests[0].params
        assert (params.temperature, params.top_p, params.top_k, params.min_p, params.max_tokens) == (
            0.5,
            0.75,
            3,
            0.125,
            7,
        )

    play(body, temperature=0.5, top_p=0.75, top_k=3, min_p=0.125, max_tokens=7)


def test_no_log_probability_that_is_no_number_leaves():
    class Nan(FakeSampler):
        async def stream(self, request):
            async for progress in FakeSampler.stream(self, request):
                progress.logprobs_T[:] = np.nan
                yield progress

    async def body(client: Client) -> None:
        client.sampler.__class__ = Nan
        reply = await client.post(PATH, {"token_ids": [5], "sampling_params": {}}, status=503)
        assert "log-probabilities [nan]" in reply["error"]["message"]

    play(body)
