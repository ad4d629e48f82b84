"""Documents for supervised training: prompt and perfect answer, from environments or a JSONL file. Knows no model."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rl_jax.config import ConfigError
from rl_jax.envs.pool import EnvPool
from rl_jax.envs.registry import EnvConfig
from rl_jax.tokenizer import Tokenizer


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
    """
    total = sum(env.weight for env in envs)
    documents: list[Document] = []
    for env in envs:
        wanted = max(1, round(limit * env.weight / total))
        size = await pool.info(env.label)
        indices = range(wanted if size is None else min(size, wanted))
        made = await asyncio.gather(*(_solved(pool, env.label, index, tokenizer) for index in indices))
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
    path = Path(file)
    if not path.is_file():
        raise ConfigError([f"sft.data={str(file)!r}: no such file"])
    documents = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if line.strip():
            documents.append(_parse(f"{file}:{number}", line, tokenizer))
    fitting = [document for document in documents if len(document.tokens_T) <= max_len]
    if not fitting:
        raise ConfigError([f"sft.data={str(file)!r}: none of {len(documents)} documents has at most {max_len} tokens"])
    return fitting


async def _solved(pool: EnvPool, env: str, index: int, tokenizer: Tokenizer) -> Document:
    task, solution = await asyncio.gather(pool.task(env, index), pool.solution(env, index))
    return _document(tokenizer.prompt_ids(task.prompt), tokenizer.completion_ids(solution))


def _parse(where: str, line: str, tokenizer: Tokenizer) -> Document:
    try:
        raw = json.loads(line)
        if "messages" in raw:
            *prompt, answer = raw["messages"]
            return _document(tokenizer.render_chat(prompt), tokenizer.completion_ids(answer["content"]))
        return _document(tokenizer.prompt_ids(raw["prompt"]), tokenizer.completion_ids(raw["completion"]))
    except (ValueError, KeyError, TypeError) as error:
        wanted = '{"prompt", "completion"} or {"messages"}'
        raise ConfigError([f"{where}: expected an object with {wanted} ({error!r})"]) from error


def _document(prompt_T: np.ndarray, completion_T: np.ndarray) -> Document:
    trained_T = np.concatenate([np.zeros(len(prompt_T), bool), np.ones(len(completion_T), bool)])
    return Document(tokens_T=np.concatenate([prompt_T, completion_T]), trained_T=trained_T)
