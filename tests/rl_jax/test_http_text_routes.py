"""Chat and text completions as their clients call them; requests of the evaluation client were captured."""

import numpy as np
import pytest
from http_fakes import END, TOKENIZER, Client, Json, play, without

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "ab"}]
CAPTURED = {
    "model": "toy",
    "stream": True,
    "messages": [{"role": "user", "content": "Guess the 5-letter word. Reply with [guess]."}],
    "stream_options": {"include_usage": True},
    "temperature": 1.0,
    "max_tokens": 64,
}
ONE_VERSION = [{"version": "4", "start": 0, "end": 3}]


def test_captured_evaluation_stream_has_the_order_that_clients_need():
    async def body(client: Client) -> None:
        chunks = await client.events(CHAT, CAPTURED)
        heads = [(chunk["id"], chunk["object"], chunk["model"]) for chunk in chunks]
        assert set(heads) == {(chunks[0]["id"], "chat.completion.chunk", "toy")}
        assert chunks[0]["id"].startswith("chatcmpl-")
        text, end, usage = (without(chunk, "id", "object", "model", "created") for chunk in chunks)
        delta = {"role": "assistant", "content": "ba"}
        assert text == {"choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}]}
        stop = {"finish_reason": "stop", "stop_reason": None, "weight_versions": ONE_VERSION}
        assert end == {"choices": [{"index": 0, "delta": {}, "logprobs": None, **stop}]}
        counts = {"prompt_tokens": 46, "total_tokens": 49, "completion_tokens": 3}
        assert usage == {"choices": [], "usage": {**counts, "prompt_tokens_details": {"cached_tokens": 23}}}
        (request,) = client.sampler.requests
        np.testing.assert_array_equal(request.tokens_T, TOKENIZER.render_chat(CAPTURED["messages"]))

    play(body, {"chunk": 5})


def test_captured_chat_of_the_v0_client_gets_the_ids_of_prompt_and_reply():
    asked = {"n": 1, "temperature": 1.0, "max_completion_tokens": 9, "logprobs": True, "return_token_ids": True}

    async def body(client: Client) -> None:
        reply = await client.post(CHAT, {"model": "toy", "messages": USER, **asked})
        content = [
            {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
            for text, logprob in (("b", -0.125), ("a", -0.25), ("<|end|>", -0.375))
        ]
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": "ba"},
            "logprobs": {"content": content},
            "token_ids": [98, 97, END],
            "finish_reason": "stop",
            "stop_reason": None,
            "weight_versions": ONE_VERSION,
        }
        assert without(reply, "id", "created", "usage") == {
            "object": "chat.completion",
            "model": "toy",
            "prompt_token_ids": [257, 97, 98, 258],
            "choices": [choice],
        }

    play(body)


def test_text_completions_continue_texts_and_ids():
    prompts = ["ab<|user|>", "c"]  # a raw prompt is the model's own language: special tokens are special

    async def body(client: Client) -> None:
        asked = {"n": 2, "logprobs": 1, "return_token_ids": True, "seed": 5}
        reply = await client.post(TEXT, {"prompt": prompts, **asked})
        again = await client.post(TEXT, {"prompt": [[97, 98, 257], [99]], **asked})
        assert without(reply, "id", "created") == without(again, "id", "created")
        assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]
        assert [choice["prompt_token_ids"] for choice in reply["choices"]] == [[97, 98, 257]] * 2 + [[99]] * 2
        assert [request.params.seed for request in client.sampler.requests[:4]] == [5, 6, 5, 6]
        assert (reply["object"], reply["choices"][3]["text"]) == ("text_completion", "b\u00e9")
        assert reply["choices"][3]["logprobs"] == {
            "tokens": ["b", "\ufffd", "\ufffd", "<|end|>"],
            "token_logprobs": [-0.125, -0.25, -0.375, -0.5],
            "top_logprobs": None,
            "text_offset": [0, 1, 2, 3],
        }
        counts = {"prompt_tokens": 4, "total_tokens": 20, "completion_tokens": 16}
        assert reply["usage"] == {**counts, "prompt_tokens_details": {"cached_tokens": 1}}

    play(body, {"text": "b\u00e9"})


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("chunk", [1, 2, 7])
@pytest.mark.parametrize("stop", [[], ["wo"], [" w", "zz"], ["hexx"]])
def test_streamed_chunks_add_up_to_the_whole_reply(path: str, chunk: int, stop: list[str]):
    asked = {"n": 2, "logprobs": path == CHAT or 1, "return_token_ids": True, "stop": stop}
    asked |= {"messages": USER} if path == CHAT else {"prompt": "ab"}

    async def body(client: Client) -> None:
        whole = await client.post(path, asked)
        *chunks, usage = await client.events(path, {**asked, "stream": True, "stream_options": {"include_usage": True}})
        assert usage["usage"] == whole["usage"]
        assert chunks[0].get("prompt_token_ids") == whole.get("prompt_token_ids")
        for index, choice in enumerate(whole["choices"]):
            assert rebuilt([c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]) == choice

    play(body, {"text": "hello w\u00f6rld", "chunk": chunk, "versions": [4, 4, 5]})


def rebuilt(parts: list[Json]) -> Json:
    """Return the choice that streamed parts make."""
    *parts, end = parts
    choice = {**parts[0], **end, "logprobs": parts[0]["logprobs"], "token_ids": []}
    is_chat = choice.pop("delta", None) is not None
    texts = [part["delta"]["content"] if is_chat else part["text"] for part in parts]
    choice |= {"message": {"role": "assistant", "content": "".join(texts)}} if is_chat else {"text": "".join(texts)}
    choice["token_ids"] = [token_id for part in parts for token_id in part["token_ids"]]
    for key, value in parts[0]["logprobs"].items():
        joined = [item for part in parts for item in part["logprobs"][key] or []]
        choice["logprobs"] = {**choice["logprobs"], key: joined if value is not None else None}
    return choice


def test_partial_characters_and_stop_strings_never_leak_into_a_stream():
    async def body(client: Client) -> None:
        asked = {"messages": USER, "stream": True, "stop": "END"}
        chunks = await client.events(CHAT, asked)
        texts = [chunk["choices"][0]["delta"].get("content") for chunk in chunks]
        assert texts == ["\u00e9", " ", "EN\U0001f40d", None]
        assert chunks[-1]["choices"][0]["stop_reason"] == "END"

    play(body, {"text": "\u00e9 EN\U0001f40dEND tail"})


def test_an_empty_reply_streams_a_role_and_an_end():
    async def body(client: Client) -> None:
        first, last = await client.events(CHAT, {"messages": USER, "stream": True})
        assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert (last["choices"][0]["delta"], last["choices"][0]["finish_reason"]) == ({}, "stop")

    play(body, {"text": ""})


def test_a_prefilled_turn_and_parts_of_text_are_rendered():
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]

    async def body(client: Client) -> None:
        await client.post(CHAT, {"messages": messages, "add_generation_prompt": False, "tools": [], "user": "me"})
        np.testing.assert_array_equal(client.sampler.requests[0].tokens_T, [257, 97, 10, 98])

    play(body)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"messages": []}, "messages=[]: expected at least one message"),
        ({"messages": None}, "messages: missing"),
        ({"messages": "hi"}, "messages='hi': expected a list of messages"),
        ({"messages": ["hi"]}, "messages[0]='hi': expected an object such as"),
        ({"messages": [{"content": "x"}]}, "messages[0].role=None: expected a string"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content=3: expected a string"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content="),
        ({"messages": [*USER, {"role": "user"}]}, "messages[1].content=None: expected a string"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "or a list of parts of type text"),
        ({"messages": [{"role": "user", "content": "x" * 300}]}, "the prompt has 302 tokens"),
        ({"tools": [{"type": "function"}]}, "tools=[{'type': 'function'}]: expected [] or null: this server cannot"),
        (
            {"top_logprobs": 3},
            "top_logprobs=3: expected 0 or null: only the sampled token's own log-probability is known",
        ),
        ({"logprobs": 1}, "logprobs=1: expected true or false"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens and max_completion_tokens are 3 and 4; give one"),
        (
            {"stream_options": {"bogus": 1}},
            "stream_options.bogus: unknown key; allowed: continuous_usage_stats, include",
        ),
        ({"response_format": {"type": "json_object"}}, "response_format={'type': 'json_object'}: expected"),
        ({"best_of": 2}, "best_of: unknown key"),
    ],
)
def test_bad_chats_are_refused(change: Json, message: str):
    async def body(client: Client) -> None:
        reply = await client.post(CHAT, {"messages": USER, **change}, status=400)
        assert message in reply["error"]["message"]
        stream = await client.post(CHAT, {"messages": USER, "stream": True, **change}, status=400)
        assert stream == reply

    play(body)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": []}, "prompt=[]: expected at least one prompt"),
        ({"prompt": {}}, "prompt={}: expected a string, a list of token ids, or a list of either"),
        ({"prompt": ""}, "the prompt has 0 tokens"),
        ({"prompt": [["a"]]}, "prompt: holds 'a'; expected token ids from 0 to 264"),
        ({"prompt": ["a", None]}, "prompt: holds None; expected a string or a list of token ids"),
        ({"prompt": [1, 500]}, "prompt: holds 500; expected token ids"),
        ({"prompt": ["a"] * 9, "n": 128}, "9 prompts with n=128 are 1152 completions; expected at most 1024"),
        ({"logprobs": 2}, "logprobs=2: expected 0 or 1"),
        ({"logprobs": True}, "logprobs=True: expected 0 or 1"),
        ({"echo": True}, "echo=True: expected false or null"),
    ],
)
def test_bad_text_completions_are_refused(change: Json, message: str):
    async def body(client: Client) -> None:
        reply = await client.post(TEXT, {"prompt": "ab", **change}, status=400)
        assert message in reply["error"]["message"]

    play(body)
