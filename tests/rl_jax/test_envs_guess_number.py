"""guess_number: a binary search plays it through the pool, turn by turn."""

import asyncio
import math

import pytest

from rl_jax.config import ConfigError
from rl_jax.envs.base import Task
from rl_jax.envs.guess_number import GuessNumber
from rl_jax.envs.pool import EnvPool, PoolConfig
from rl_jax.envs.registry import EnvConfig


async def search(pool: EnvPool, index: int, high: int) -> list[str]:
    low, completions, reply = 1, [], ""
    while reply is not None:
        middle = (low + high) // 2
        completions.append(f"I guess {middle}.")
        reply = await pool.reply("guess_number", index, completions)
        low, high = (middle + 1, high) if reply == "higher" else (low, middle - 1)
    return completions


def test_binary_search_always_hits():
    async def main() -> None:
        config = EnvConfig(id="guess_number", settings={"high": 13, "max_turns": 4})
        async with EnvPool([config], PoolConfig(num_workers=2)) as pool:
            games = await asyncio.gather(*(search(pool, i, high=13) for i in range(20)))
            for index, completions in enumerate(games):
                score = await pool.score("guess_number", index, completions)
                assert score.parts == {"hit": 1.0}
                assert score.reward == 1 - (len(completions) - 1) / 4
            assert max(map(len, games)) <= math.ceil(math.log2(13 + 1))
            assert len({len(completions) for completions in games}) > 1

    asyncio.run(main())


@pytest.mark.parametrize(
    ("completions", "reply", "reward"),
    [
        (["7"], None, 1.0),
        (["5"], "higher", 0.0),
        (["maybe 9?"], "lower", 0.0),
        (["seven"], "write one number", 0.0),
        (["5", "9", "7"], None, 1 / 3),
        (["5", "9", "8"], None, 0.0),
    ],
)
def test_replies_and_rewards(completions: list[str], reply: str | None, reward: float):
    environment, task = GuessNumber(high=11, max_turns=3), Task(prompt="", answer=7)
    assert environment.reply(task, completions) == reply
    assert environment.reward(task, completions)["reward"] == pytest.approx(reward, abs=1e-15)


def test_secrets_cover_the_range():
    environment = GuessNumber(high=5)
    assert {environment.task(i).answer for i in range(100)} == {1, 2, 3, 4, 5}


@pytest.mark.parametrize("settings", [{"high": 0}, {"max_turns": 0}], ids=str)
def test_settings_refused(settings: dict):
    with pytest.raises(ConfigError, match=f"^{next(iter(settings))}=0"):
        GuessNumber(**settings)
