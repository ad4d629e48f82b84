"""Text that is given out piece by piece, against the whole text cut by a plain search."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_jax.http.text import TextStream
from rl_jax.sampler import SamplingParams
from rl_jax.tokenizer import Tokenizer

TOKENIZER = Tokenizer.byte_level()
END = 259


def cut(text: str, stops: list[str]) -> str:
    """Return `text` before the stop string that is complete first, the longest one of those."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))]
    return text


def params(stop: list[str], stop_token_ids: tuple[int, ...] = (END,)) -> SamplingParams:
    return SamplingParams(max_tokens=1, stop=tuple(stop), stop_token_ids=stop_token_ids)


@given(
    text=st.text("ab\u00e9\U0001f40d", max_size=12),
    stops=st.lists(st.text("ab\u00e9", min_size=1, max_size=4), max_size=3),
    sizes=st.lists(st.integers(1, 5), min_size=60, max_size=60),
)
def test_pieces_add_up_to_the_text_before_the_first_stop_string(text: str, stops: list[str], sizes: list[int]):
    stream, ids = TextStream(TOKENIZER, params(stops)), TOKENIZER.encode(text).tolist()
    told = ""
    for size in sizes:
        told += stream.push(ids[:size])
        ids = ids[size:]
        assert cut(text, stops).startswith(told)  # nothing of a stop string leaks, ever
    assert told + stream.finish() == cut(text, stops)
    assert (stream.stop_reason is None) == (cut(text, stops) == text)


def test_only_what_may_be_a_stop_string_is_held_back():
    stream = TextStream(TOKENIZER, params(["END"]))
    pieces = [stream.push(TOKENIZER.encode(text).tolist()) for text in ("a EN", "T", " END b")]
    assert (pieces, stream.finish(), stream.stop_reason) == (["a ", "ENT", " "], "", "END")


@pytest.mark.parametrize(
    ("token_id", "stop_token_ids", "expected"), [(END, (END,), None), (97, (97, END), 97), (END, (97,), None)]
)
def test_stop_tokens_leave_no_text(token_id: int, stop_token_ids: tuple[int, ...], expected: int | None):
    stream = TextStream(TOKENIZER, params(["bc"], stop_token_ids))
    assert stream.push([98, token_id]) == ""  # "b" may begin "bc"
    assert (stream.finish(), stream.stop_reason) == ("b", expected)


def test_special_tokens_are_shown_when_asked_for():
    texts = [TextStream(TOKENIZER, params([]), skip_special).push([258, 98]) for skip_special in (True, False)]
    assert texts == ["b", "<|assistant|>b"]
