"""The prompts of the canary: tasks that fail are left out, and only a run without one is refused."""

from pathlib import Path
from typing import cast

import pytest

from rl_jax.cli import RunConfig
from rl_jax.config import ConfigError, load
from rl_jax.envs.base import Task
from rl_jax.envs.errors import EnvFailed, EnvTimeout
from rl_jax.envs.pool import EnvPool
from rl_jax.rooms import canary_sequences
from rl_jax.tokenizer import Tokenizer

SYSTEM = Path(__file__).parents[1] / "system"
TOKENIZER = Tokenizer.byte_level()


class Pool:
    """An endless environment; what a task is, `tasks` says, and beyond them it fails."""

    def __init__(self, *tasks: str | Exception):
        self.tasks = tasks

    async def info(self, env: str) -> int | None:
        return None

    async def task(self, env: str, index: int) -> Task:
        made = self.tasks[index] if index < len(self.tasks) else EnvFailed(f"{env}: no task {index}")
        if isinstance(made, Exception):
            raise made
        return Task(prompt=made)


def sequences_of(*tasks: str | Exception) -> list[list[int]]:
    config = load(RunConfig, [SYSTEM / "tiny.toml", SYSTEM / "tiny_model.toml"], ["canary.num_prompts=4"])
    found = canary_sequences(config, cast(EnvPool, Pool(*tasks)), TOKENIZER)
    return [tokens_T.tolist() for tokens_T in found]


def test_tasks_that_fail_are_left_out() -> None:
    expected = [TOKENIZER.prompt_ids(text).tolist() for text in ("one", "three")]
    assert sequences_of("one", EnvFailed("raised"), "three") == expected


def test_a_run_without_one_that_works_is_refused_with_the_reasons() -> None:
    with pytest.raises(ConfigError, match=r"canary\.num_prompts=4: checksum, task 0: it hangs") as refusal:
        sequences_of(EnvTimeout("it hangs"))
    assert "checksum, task 1: checksum: no task 1" in str(refusal.value)
