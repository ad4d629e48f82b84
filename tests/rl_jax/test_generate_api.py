"""rl_jax/rollout/generate_api.py: a true reply is read exactly, and every lie is refused with its value."""

import base64
import copy
import io
from collections.abc import Callable

import numpy as np
import pytest
from fleet_fakes import make_choice, make_request
from http_fakes import Client, play
from hypothesis import given
from hypothesis import strategies as st

from rl_jax.http.replies import version_spans
from rl_jax.rollout.generate_api import BadReply, generate_body, read_completion, read_routes, read_scores
from rl_jax.sampler import Request, SamplingParams
from rl_jax.types import FinishReason

REQUEST = make_request(7, max_tokens=5)
TRUE = {"choices": [make_choice(7, ["3", "3", "4", "4", "4"])]}


def read(reply: dict, request: Request = REQUEST):
    return read_completion(reply, request, known_versions={2, 3, 4}, oldest=3)


def test_a_true_reply_is_read_exactly():
    found = read(TRUE)
    choice = TRUE["choices"][0]
    np.testing.assert_array_equal(found.tokens_T, choice["token_ids"])
    np.testing.assert_array_equal(found.versions_T, [3, 3, 4, 4, 4])
    np.testing.assert_array_equal(
        found.logprobs_T, np.float32([entry["logprob"] for entry in choice["logprobs"]["content"]])
    )
    assert found.finish is FinishReason.LENGTH
    assert (found.tokens_T.dtype, found.logprobs_T.dtype, found.versions_T.dtype) == (np.int32, np.float32, np.int32)


def test_an_abort_without_tokens_is_read():
    choice = {"finish_reason": "abort", "token_ids": [], "logprobs": {"content": []}, "weight_versions": None}
    found = read({"choices": [choice]})
    assert (found.finish, len(found.tokens_T), len(found.versions_T)) == (FinishReason.ABORT, 0, 0)


def entry(choice: dict, t: int = 1) -> dict:
    return choice["logprobs"]["content"][t]


LIES: dict[str, tuple[Callable[[dict], object], str]] = {
    "finish": (lambda c: c.update(finish_reason="repetition"), "finish_reason='repetition': expected one of stop"),
    "no finish": (lambda c: c.update(finish_reason=None), "finish_reason=None: expected str"),
    "fewer logprobs": (lambda c: c["logprobs"]["content"].pop(), "4 log-probabilities for 5 tokens"),
    "no logprobs": (lambda c: c.update(logprobs=None), "logprobs=None: expected dict"),
    "floor": (lambda c: entry(c).update(logprob=-9999.0), r"token 1: logprob=-9999.0"),
    "nan": (lambda c: entry(c).update(logprob=float("nan")), "logprob=nan"),
    "text": (lambda c: entry(c).update(logprob="-1"), "logprob='-1'"),
    "positive": (lambda c: entry(c).update(logprob=0.5), "logprob=0.5"),
    "rank": (lambda c: entry(c).update(rank=None), "without a rank"),
    "other token": (lambda c: entry(c).update(token_id=96), "log-probability 1 is of token 96"),
    "negative id": (lambda c: c["token_ids"].__setitem__(0, -1), "expected ids from 0 on"),
    "too many": (lambda c: c["token_ids"].append(3), "6 tokens: asked for at most 5"),
    "gap": (lambda c: c["weight_versions"][1].update(start=3), "expected spans that cover 0..5"),
    "short": (lambda c: c["weight_versions"].pop(), "expected spans that cover 0..5"),
    "long": (lambda c: c["weight_versions"][1].update(end=6), "expected spans that cover 0..5"),
    "no spans": (lambda c: c.update(weight_versions=None), "weight_versions=None: expected list"),
    "unknown version": (lambda c: c["weight_versions"][1].update(version="9"), "version 9 was never published"),
    "default": (lambda c: c["weight_versions"][0].update(version="default"), "weight version 'default'"),
    "backwards": (lambda c: c["weight_versions"][1].update(version="2"), "version 2 after 3"),
    "old": (lambda c: c["weight_versions"][0].update(version="2"), "version 2 after 3"),
}


@pytest.mark.parametrize(("lie", "expected"), LIES.values(), ids=LIES)
def test_a_lie_is_refused_with_its_value(lie: Callable[[dict], object], expected: str):
    reply = copy.deepcopy(TRUE)
    lie(reply["choices"][0])
    with pytest.raises(BadReply, match=expected):
        read(reply)


@pytest.mark.parametrize("reply", [None, [], {}, {"choices": []}, {"choices": [1]}, {"choices": [{}, {}]}])
def test_what_is_no_reply_is_refused(reply: object):
    with pytest.raises(BadReply, match=r"request train\.7\.0"):
        read_completion(reply, REQUEST, {3}, 3)


@given(st.lists(st.integers(3, 6), min_size=1, max_size=9).map(sorted))
def test_spans_of_the_embedded_server_are_read_back(versions: list[int]):
    choice = make_choice(1, [str(v) for v in versions])
    choice["weight_versions"] = version_spans(np.array(versions, np.int32))
    found = read_completion({"choices": [choice]}, make_request(1, max_tokens=9), {3, 4, 5, 6}, 3)
    np.testing.assert_array_equal(found.versions_T, versions)


def test_the_body_says_everything_that_decides_the_tokens():
    params = SamplingParams(
        max_tokens=3, temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, stop_token_ids=(9, 8), stop=("x",), seed=11
    )
    request = Request(request_id="a", tokens_T=np.array([4, 6], np.int32), params=params)
    body = generate_body(request, "a.1", 17)
    assert (body["token_ids"], body["cache_salt"], body["request_id"]) == ([4, 6], "17", "a.1")
    assert body["sampling_params"] == {
        **{"n": 1, "max_tokens": 3, "temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 11},
        **{"stop_token_ids": [9, 8], "stop": ["x"], "ignore_eos": True, "logprobs": 0, "skip_special_tokens": False},
    }


def npy(array: np.ndarray) -> str:
    file = io.BytesIO()
    np.save(file, array)
    return base64.b64encode(file.getvalue()).decode()


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32])
def test_routes_of_vllm_are_read(dtype: type):
    routes_TLA = np.arange(8 * 3 * 2).reshape(8, 3, 2).astype(dtype)  # 4 prompt + 5 sampled - 1 rows
    request = make_request(7, max_tokens=5)
    asked = Request(
        request_id="r",
        tokens_T=request.tokens_T,
        params=SamplingParams(max_tokens=5, seed=7, return_routed_experts=True),
    )
    reply = copy.deepcopy(TRUE)
    reply["choices"][0]["routed_experts"] = npy(routes_TLA)
    found = read(reply, asked).routed_experts_TLA
    assert found is not None and found.dtype == np.uint16
    np.testing.assert_array_equal(found, routes_TLA)
    assert read(reply).routed_experts_TLA is None  # nobody asked


def test_the_embedded_server_takes_the_body_and_its_reply_is_believed():
    """One client for both: rl_jax.serve answers the same route, routed experts in the same compact form."""
    params = SamplingParams(max_tokens=9, stop_token_ids=(2,), seed=5, return_routed_experts=True)
    request = Request(request_id="train.3.0", tokens_T=np.array([1, 7, 30], np.int32), params=params)

    async def body(client: Client) -> None:
        reply = await client.post("/inference/v1/generate", generate_body(request, "train.3.0.1", 4))
        found = read_completion(reply, request, {4, 5}, 4)
        np.testing.assert_array_equal(found.tokens_T, [224, 30, 31, 2])
        np.testing.assert_array_equal(found.logprobs_T, np.float32([-0.125, -0.25, -0.375, -0.5]))
        np.testing.assert_array_equal(found.versions_T, [4, 5, 5, 5])
        assert (found.finish, found.num_cached_tokens) == (FinishReason.STOP, 1)
        assert found.routed_experts_TLA is not None
        np.testing.assert_array_equal(found.routed_experts_TLA, np.arange(6 * 2 * 3).reshape(6, 2, 3))
        asked = client.sampler.requests[0].params
        assert (asked.seed, asked.max_tokens, asked.stop_token_ids) == (5, 9, (2,))

    play(body, {"ids": [224, 30, 31, 2, 8], "versions": (4, 5)}, return_routed_experts=True)


@pytest.mark.parametrize(
    ("payload", "expected"),
    [
        ("!!", "expected base64 of a .npy file"),
        (base64.b64encode(b"no npy").decode(), "expected base64 of a .npy file"),
        (npy(np.zeros((6, 2, 2), np.uint8)), r"uint8 \(6, 2, 2\): expected \[7"),
        (npy(np.zeros((7, 4), np.uint8)), "expected"),
        (npy(np.zeros((7, 2, 2), np.float32)), "float32"),
        (npy(np.full((7, 2, 2), -1, np.int32)), "not experts"),
        (npy(np.array([None] * 7, object)), "expected base64 of a .npy file"),
    ],
)
def test_bad_routes_are_refused(payload: str, expected: str):
    with pytest.raises(BadReply, match=expected):
        read_routes(payload, 7, "r")


def test_scores_are_those_of_the_prompt():
    tokens_T = np.array([5, 9, 5], np.int32)
    reply = {"prompt_logprobs": [None, {"9": {"logprob": -1.5, "rank": 3}}, {"5": {"logprob": -0.25, "rank": 1}}]}
    np.testing.assert_array_equal(read_scores(reply, tokens_T, "s"), np.float32([0, -1.5, -0.25]))
    for wrong in ([None, {"9": {"logprob": -1.5, "rank": 3}}], [None, {"8": {"logprob": -1}}, {}], None):
        with pytest.raises(BadReply, match="s: "):
            read_scores({"prompt_logprobs": wrong}, tokens_T, "s")
