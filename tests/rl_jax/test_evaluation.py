"""Averages and passes of k samples, against counting by hand; failed samples count nowhere but among the failed."""

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest
from fakes import FakePool, FakeSampler, make_player

from rl_jax.config import ConfigError
from rl_jax.envs.errors import EnvFailed
from rl_jax.envs.registry import EnvConfig
from rl_jax.rollout.evaluation import EvaluateConfig, evaluate
from rl_jax.types import Rollout

ENVS = (EnvConfig(id="m:a"), EnvConfig(id="m:b"))


def judge(env: str, index: int, texts: Sequence[str]) -> float:
    """Task 2 of a fails; else 1 or 0 by the text's length."""
    if (env, index) == ("a", 2):
        raise EnvFailed("it raised")
    return float(len(texts[-1]) % 2)


def play(**fields: object) -> tuple[dict[str, float], list[Rollout]]:
    config = EvaluateConfig(envs=ENVS, num_tasks=5, samples_per_task=3, **fields)  # type: ignore[arg-type]
    return asyncio.run(evaluate(config, make_player(FakeSampler(), FakePool(judge, sizes={"b": 2}))))


def test_numbers_are_those_of_counting_by_hand() -> None:
    metrics, rollouts = play()
    by_env = {env: [r for r in rollouts if r.env == env] for env in ("a", "b")}
    assert sorted({r.task_id for r in by_env["a"]}) == [0, 1, 3, 4]  # 2 failed
    assert sorted({r.task_id for r in by_env["b"]}) == [0, 1]  # there are no more
    assert (metrics["eval/a/num_failed"], metrics["eval/b/num_failed"]) == (3, 0)
    for env, found in by_env.items():
        rewards_PG = np.array([[r.reward for r in found if r.task_id == task] for task in {r.task_id for r in found}])
        assert rewards_PG.shape[1] == 3
        assert metrics[f"eval/{env}/avg@3"] == pytest.approx(rewards_PG.mean())
        assert metrics[f"eval/{env}/pass@3"] == pytest.approx((rewards_PG.max(axis=1) >= 1).mean())
        assert metrics[f"eval/{env}/pass^3"] == pytest.approx((rewards_PG.min(axis=1) >= 1).mean())
        assert metrics[f"eval/{env}/num_output_tokens"] == pytest.approx(np.mean([r.num_sampled for r in found]))
        assert metrics[f"eval/{env}/length"] == pytest.approx(np.mean([r.reward_parts["length"] for r in found]))


def test_every_evaluation_sees_the_same() -> None:
    (first, rollouts), (again, others) = play(), play()
    assert first == again
    assert [r.tokens_T.tolist() for r in rollouts] == [r.tokens_T.tolist() for r in others]
    assert len({tuple(r.tokens_T.tolist()) for r in rollouts if r.task_id == 0 and r.env == "a"}) > 1


def test_what_passes_is_configured() -> None:
    metrics, _ = play(pass_reward=0.0)
    assert metrics["eval/a/pass^3"] == 1


def test_an_environment_that_only_fails_has_no_averages() -> None:
    def fail(env: str, index: int, texts: Sequence[str]) -> float:
        raise EnvFailed("always")

    config = EvaluateConfig(envs=ENVS[:1], num_tasks=2)
    metrics, rollouts = asyncio.run(evaluate(config, make_player(FakeSampler(), FakePool(fail))))
    assert metrics == {"eval/a/num_failed": 2}
    assert rollouts == []


@pytest.mark.parametrize("field", ["num_tasks", "samples_per_task"])
def test_config_that_cannot_be(field: str) -> None:
    with pytest.raises(ConfigError, match=f"{field}=0: must be at least 1"):
        EvaluateConfig(**{field: 0})
