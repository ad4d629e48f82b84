"""Documents from environments and from JSONL: prompt masked, answer trained, bad lines named."""

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest

from rl_jax.config import ConfigError
from rl_jax.envs.errors import EnvFailed
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


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([("user", "x")], "expected role 'assistant', after another message"),
        ([("assistant", "x")], "expected role 'assistant', after another message"),
        ([("user", "x"), ("assistant", "y"), ("user", "z")], "expected role 'assistant'"),
        ([("usr", "x"), ("assistant", "y")], "a role out of system, user, assistant, tool"),
        ([("user", 3), ("assistant", "y")], "expected text, and a role"),
    ],
)
def test_only_an_answer_of_the_assistant_is_trained(messages: list, says: str, tmp_path: Path) -> None:
    line = {"messages": [{"role": role, "content": content} for role, content in messages]}
    with pytest.raises(ConfigError, match=rf"data\.jsonl:2: expected an object .*{says}"):
        read(tmp_path, {"prompt": "a", "completion": "b"}, line)


def test_a_file_that_is_not_utf_8_is_named_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "latin.jsonl"
    file.write_bytes(b'{"prompt": "a", "completion": "b"}\n{"prompt": "\xe9", "completion": "b"}\n')
    with pytest.raises(ConfigError, match=r"latin\.jsonl:2: not UTF-8"):
        read_documents(file, TOKENIZER, 9)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"sft\.data='.*nowhere\.jsonl': no such file"):
        read_documents(tmp_path / "nowhere.jsonl", TOKENIZER, 9)


FLAKY = """
from rl_jax.envs.base import Task

class Flaky:
    size = 5
    def __init__(self, bad=1): self.bad = bad
    def task(self, index): return Task(prompt=f"q{index}", answer=index)
    def reward(self, task, completions): return 0.0
    def solution(self, task):
        if task.answer % 5 >= self.bad: raise KeyError("no solution")
        return "a"
"""


def test_a_task_that_fails_costs_its_document(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "flaky.py").write_text(FLAKY)

    async def make(bad: int) -> list[Document]:
        envs = [EnvConfig(id=f"{tmp_path}/flaky.py:Flaky", settings={"bad": bad})]
        async with EnvPool(envs, PoolConfig()) as pool:
            return await solved_tasks(pool, envs, TOKENIZER, limit=9, max_len=99)

    assert_same(asyncio.run(make(2)), [expected("q0", "a"), expected("q1", "a")])
    assert "Flaky: 3 of 5 tasks are left out: Flaky: solution of task 2: KeyError: 'no solution'" in caplog.text
    with pytest.raises(EnvFailed, match="solution of task 0: KeyError"):
        asyncio.run(make(0))


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
