"""Documents from environments and from JSONL: prompt masked, answer trained, bad lines named."""

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest

from rl_jax.config import ConfigError
from rl_jax.envs.pool import EnvPool, PoolConfig
from rl_jax.envs.registry import EnvConfig
from rl_jax.rollout.documents import Document, read_documents, solved_tasks
from rl_jax.tokenizer import Tokenizer

TOKENIZER = Tokenizer.byte_level()
USER, ASSISTANT, END = 257, 258, 259


def expected(question: str, answer: str) -> Document:
    prompt = [USER, *question.encode(), ASSISTANT]
    completion = [*answer.encode(), END]
    trained_T = np.array([False] * len(prompt) + [True] * len(completion))
    return Document(tokens_T=np.array(prompt + completion, np.int32), trained_T=trained_T)


def assert_same(found: list[Document], wanted: list[Document]) -> None:
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one.tokens_T, other.tokens_T)
        np.testing.assert_array_equal(one.trained_T, other.trained_T)


def read(folder: Path, *lines: object, max_len: int = 99) -> list[Document]:
    file = folder / "data.jsonl"
    file.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return read_documents(file, TOKENIZER, max_len)


def test_both_forms_of_a_line(tmp_path: Path) -> None:
    user, assistant = {"role": "user", "content": "ab"}, {"role": "assistant", "content": "ba"}
    found = read(
        tmp_path,
        {"prompt": "ab", "completion": "ba"},
        "",
        {"messages": [user, assistant]},
        {"prompt": [user], "completion": "ba"},
    )
    assert_same(found, [expected("ab", "ba")] * 3)


def test_documents_that_do_not_fit_are_left_out(tmp_path: Path) -> None:
    lines = [{"prompt": "q" * n, "completion": "a"} for n in (1, 5, 2)]
    assert_same(read(tmp_path, *lines, max_len=6), [expected("q", "a"), expected("qq", "a")])
    with pytest.raises(ConfigError, match=r"none of 3 documents has at most 4 tokens"):
        read(tmp_path, *lines, max_len=4)


@pytest.mark.parametrize(
    "line", ["{", "[]", "7", '"text"', '{"prompt": "a"}', '{"prompt": "a", "completion": 3}', '{"messages": []}']
)
def test_a_line_that_is_no_document_is_named(line: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.jsonl:2: expected an object with"):
        read(tmp_path, {"prompt": "a", "completion": "b"}, line)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"sft\.data='.*nowhere\.jsonl': no such file"):
        read_documents(tmp_path / "nowhere.jsonl", TOKENIZER, 9)


def test_solved_tasks_are_the_first_of_each_environment_by_weight() -> None:
    envs = [
        EnvConfig(id="reverse_text", name="words", weight=3, settings={"split": "warmup", "max_chars": 8}),
        EnvConfig(id="reverse_text", name="more", weight=1, settings={"split": "warmup", "max_chars": 8}),
    ]

    async def make() -> tuple[list[Document], list[str], list[str]]:
        async with EnvPool(envs, PoolConfig()) as pool:
            documents = await solved_tasks(pool, envs, TOKENIZER, limit=8, max_len=99)
            prompts = [(await pool.task("words", i)).prompt for i in range(6)]
            answers = [await pool.solution("words", i) for i in range(6)]
            return documents, [str(prompt) for prompt in prompts], answers

    documents, prompts, answers = asyncio.run(make())
    assert len(documents) == 8
    assert_same(documents[:6], [expected(*pair) for pair in zip(prompts, answers, strict=True)])
    assert_same(documents[6:], documents[:2])
