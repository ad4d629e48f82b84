"""Documents for supervised training: prompt and perfect answer, from environments or a JSONL file. Knows no model."""

import asyncio
import json
import logging
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rl_jax.config import ConfigError
from rl_jax.envs.errors import EnvError
from rl_jax.envs.pool import EnvPool
from rl_jax.envs.registry import EnvConfig
from rl_jax.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, kw_only=True)
class Document:
    """One example. Example, "ab" answered by "ba": tokens_T = [257, 97, 98, 258, 98, 97, 259], trained_T true on the
    last three."""

    tokens_T: np.ndarray
    """int32"""
    trained_T: np.ndarray
    """bool"""


async def solved_tasks(
    pool: EnvPool, envs: Sequence[EnvConfig], tokenizer: Tokenizer, limit: int, max_len: int
) -> list[Document]:
    """Return up to `limit` tasks of environments that know their solution, split by weight.

    Raises:
        ConfigError: an environment without tasks that fit.
        EnvError: one whose tasks all fail; some that do are left out, with a warning.
    """
    total = sum(env.weight for env in envs)
    documents: list[Document] = []
    for env in envs:
        wanted = max(1, round(limit * env.weight / total))
        size = await pool.info(env.label)
        indices = range(wanted if size is None else min(size, wanted))
        made = await _all_solved(pool, env.label, indices, tokenizer)
        fitting = [document for document in made if len(document.tokens_T) <= max_len]
        if not fitting:
            raise ConfigError([f"sft.envs: {env.label} has no task of at most {max_len} tokens with its solution"])
        documents += fitting
    return documents


def read_documents(file: str | Path, tokenizer: Tokenizer, max_len: int) -> list[Document]:
    """Read JSONL with {"prompt": text or messages, "completion": text} or {"messages": [..., assistant]} on each line.

    Raises:
        ConfigError: naming the line that is not such an object, or no document of at most `max_len` tokens.
    """
    documents = []
    for number, line in enumerate(_read(file).split("\n"), start=1):
        if line.strip():
            documents.append(_parse(f"{file}:{number}", line, tokenizer))
    fitting = [document for document in documents if len(document.tokens_T) <= max_len]
    if not fitting:
        raise ConfigError([f"sft.data={str(file)!r}: none of {len(documents)} documents has at most {max_len} tokens"])
    return fitting


async def _all_solved(pool: EnvPool, env: str, indices: Sequence[int], tokenizer: Tokenizer) -> list[Document]:
    """Return the documents of the tasks that do not fail."""
    ended = await asyncio.gather(*(_solved(pool, env, i, tokenizer) for i in indices), return_exceptions=True)
    failures = [end for end in ended if isinstance(end, BaseException)]
    made = [end for end in ended if isinstance(end, Document)]
    if failures and (not made or not all(isinstance(failure, EnvError) for failure in failures)):
        raise next((failure for failure in failures if not isinstance(failure, EnvError)), failures[0])
    if failures:
        logger.warning("%s: %d of %d tasks are left out: %s", env, len(failures), len(ended), failures[0])
    return made


async def _solved(pool: EnvPool, env: str, index: int, tokenizer: Tokenizer) -> Document:
    task, solution = await asyncio.gather(pool.task(env, index), pool.solution(env, index))
    return _document(tokenizer.prompt_ids(task.prompt), tokenizer.completion_ids(solution))


def _parse(where: str, line: str, tokenizer: Tokenizer) -> Document:
    try:
        raw = json.loads(line)
        if "messages" in raw:
            *prompt, answer = _messages(raw["messages"])
            if answer["role"] != "assistant" or not prompt:
                raise ValueError(
                    "the last message is what is trained: expected role 'assistant', after another message"
                )
            return _document(tokenizer.render_chat(prompt), tokenizer.completion_ids(answer["content"]))
        prompt = raw["prompt"] if isinstance(raw["prompt"], str) else _messages(raw["prompt"])
        return _document(tokenizer.prompt_ids(prompt), tokenizer.completion_ids(raw["completion"]))
    except (ValueError, KeyError, TypeError) as error:
        wanted = '{"prompt", "completion"} or {"messages"}'
        raise ConfigError([f"{where}: expected an object with {wanted} ({error!r})"]) from error


def _messages(raw: object) -> list[dict[str, str]]:
    """Return the messages of a conversation if they are some, each with a known role and text."""
    if not isinstance(raw, list) or not raw:
        raise ValueError(f"{reprlib.repr(raw)}: expected a list of messages")
    for message in raw:
        if message["role"] not in ROLES or not isinstance(message["content"], str):
            raise ValueError(f"message {reprlib.repr(message)}: expected text, and a role out of {', '.join(ROLES)}")
    return raw


def _read(file: str | Path) -> str:
    if not Path(file).is_file():
        raise ConfigError([f"sft.data={str(file)!r}: no such file"])
    try:
        return Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError([f"sft.data={str(file)!r}: cannot be read ({error.strerror})"]) from error
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ConfigError(
            [f"{file}:{line}: not UTF-8 ({error.reason}, byte {error.start}); convert the file"]
        ) from error


def _document(prompt_T: np.ndarray, completion_T: np.ndarray) -> Document:
    trained_T = np.concatenate([np.zeros(len(prompt_T), bool), np.ones(len(completion_T), bool)])
    return Document(tokens_T=np.concatenate([prompt_T, completion_T]), trained_T=trained_T)
