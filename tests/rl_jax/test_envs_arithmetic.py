"""arithmetic: the sums are right by Python's own arithmetic; junk is wrong, not a failure. Needs reasoning-gym."""

import asyncio
import re

import pytest

from rl_jax.config import ConfigError
from rl_jax.envs.arithmetic import Arithmetic
from rl_jax.envs.pool import EnvPool, PoolConfig
from rl_jax.envs.registry import EnvConfig

pytest.importorskip("reasoning_gym")

EASY = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}


def test_sums_agree_with_python():
    environment = Arithmetic(seed=7, size=50, knobs=EASY)
    for index in range(environment.size):
        task = environment.task(index)
        first, sign, second = re.search(r"(\d+) ([+-]) (\d+) =", str(task.prompt)).groups()
        value = int(first) + int(second) * (1 if sign == "+" else -1)
        assert environment.reward(task, [f" {value}\n"]) == {"reward": 1.0, "unreadable": 0.0}
        assert environment.reward(task, [str(value + 1)])["reward"] < 1
        assert environment.solution(task) == str(value)
    assert environment.size == 50


def test_through_the_pool_same_tasks_in_every_worker_and_other_tasks_for_another_seed():
    configs = [
        EnvConfig(id="arithmetic", name=f"seed{s}", settings={"seed": s, "knobs": EASY, "tag": "a"}) for s in (1, 2)
    ]

    async def main() -> None:
        async with EnvPool(configs, PoolConfig(num_workers=1)) as pool:
            here = Arithmetic(seed=1, knobs=EASY)
            tasks = [await pool.task("seed1", i) for i in range(11)]
            assert [task.prompt for task in tasks] == [here.task(i).prompt for i in range(11)]
            assert tasks != [await pool.task("seed2", i) for i in range(11)]
            assert (await pool.score("seed1", 5, [await pool.solution("seed1", 5)])).reward == 1.0
            assert (await pool.score("seed1", 5, [str(here.task(5).answer)])).parts == {"unreadable": 1.0}
            assert await pool.info("seed1") == 100_000

    asyncio.run(main())


def test_answer_that_a_scorer_cannot_read_is_wrong():
    environment = Arithmetic(dataset="prime_factorization", size=3)
    task = environment.task(2)
    assert environment.reward(task, ["zzz"]) == {"reward": 0.0, "unreadable": 1.0}
    assert environment.reward(task, [environment.solution(task)]) == {"reward": 1.0, "unreadable": 0.0}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dataset": "chain_sums"}, "^dataset='chain_sums': not in reasoning-gym; near: chain_sum"),
        ({"knobs": {"terms": 2}}, "^knobs.terms: unknown knob of chain_sum; allowed: .*max_terms"),
        ({"knobs": {"seed": 2}}, "^knobs.seed: unknown knob"),
        ({"knobs": {"min_terms": 9, "max_terms": 2}}, "^knobs=.*refused by chain_sum"),
        ({"size": 0}, "^size=0"),
    ],
)
def test_settings_refused(settings: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        Arithmetic(**settings)
