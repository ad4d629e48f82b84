"""A deterministic Sampler, and environments without processes, for the tests of rollout/ and orchestrator/."""

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from rl_jax.advantages import AdvantageConfig, Advantages
from rl_jax.envs.base import Task
from rl_jax.envs.pool import Score
from rl_jax.orchestrator.config import OrchestratorConfig
from rl_jax.orchestrator.curriculum import Curriculum
from rl_jax.orchestrator.ship import Shipper
from rl_jax.rollout.episode import EpisodeConfig, Player
from rl_jax.sampler import Completion, Request, SamplerHealth, SamplerLost
from rl_jax.tokenizer import Tokenizer
from rl_jax.types import FinishReason

END = 259  # the end token of Tokenizer.byte_level()


class FakeSampler:
    """Writes 3 to 6 random letters and an end token, all determined by the request's seed; `delay` says how slowly.

    Every token carries the version that was published last when it was written, minus `version_lag`.
    """

    def __init__(
        self,
        delay: Callable[[Request], float] = lambda request: 0.0,
        is_lost: Callable[[Request], bool] = lambda request: False,
        version_lag: int = 0,
    ):
        self.version = -1
        self.calls: list[list[Request]] = []
        self.num_running = 0
        self.most_running = 0
        self.publish_delay_s = 0.0
        self._delay = delay
        self._is_lost = is_lost
        self._version_lag = version_lag

    async def generate(self, request: Request) -> Completion:
        return (await self.generate_many([request]))[0]

    async def generate_many(self, requests: Sequence[Request]) -> list[Completion]:
        self.calls.append(list(requests))
        return list(await asyncio.gather(*(self._write(request) for request in requests)))

    async def _write(self, request: Request) -> Completion:
        rng = np.random.default_rng((request.params.seed, len(request.tokens_T)))
        letters = rng.integers(97, 123, size=min(int(rng.integers(3, 7)), request.params.max_tokens)).tolist()
        is_stopped = len(letters) < request.params.max_tokens
        tokens_T = np.array(letters + [END] * is_stopped, np.int32)
        versions_T = np.zeros(len(tokens_T), np.int32)
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            for i in range(len(tokens_T)):
                versions_T[i] = self.version - self._version_lag
                await asyncio.sleep(self._delay(request) / len(tokens_T))
        finally:
            self.num_running -= 1
        if self._is_lost(request):
            raise SamplerLost(f"{request.request_id}: connection reset")
        return Completion(
            tokens_T=tokens_T,
            logprobs_T=-rng.random(len(tokens_T)).astype(np.float32),
            versions_T=versions_T,
            finish=FinishReason.STOP if is_stopped else FinishReason.LENGTH,
        )

    async def publish(self, weights: object, version: int) -> None:
        await asyncio.sleep(self.publish_delay_s)
        self.version = version

    async def score(self, tokens_T: np.ndarray) -> np.ndarray:
        return np.zeros(len(tokens_T), np.float32)

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def health(self) -> SamplerHealth:
        return SamplerHealth(
            version=self.version,
            num_running=self.num_running,
            num_waiting=0,
            max_running=1000,
            kv_used_frac=0.1,
            num_sampled_tokens=0,
            num_prompt_tokens=0,
            num_cached_tokens=0,
            busy_s=0.0,
        )

    async def close(self) -> None: ...


class FakePool:
    """Environments whose prompt is "<env>:<task>" and whose reward is what `judge(env, task, texts)` says."""

    def __init__(
        self,
        judge: Callable[[str, int, Sequence[str]], float] = lambda env, index, texts: len(texts[-1]) / 4,
        sizes: Mapping[str, int | None] | None = None,
        replies: Sequence[str] = (),
        prompt: Callable[[str, int], str] = lambda env, index: f"{env}:{index}",
    ):
        self._judge = judge
        self._sizes = sizes or {}
        self._replies = replies
        self._prompt = prompt

    async def info(self, env: str) -> int | None:
        return self._sizes.get(env)

    async def task(self, env: str, index: int) -> Task:
        return Task(prompt=self._prompt(env, index))

    async def reply(self, env: str, index: int, completions: Sequence[str]) -> str | None:
        turn = len(completions)
        return self._replies[turn - 1] if turn <= len(self._replies) else None

    async def score(self, env: str, index: int, completions: Sequence[str]) -> Score:
        await asyncio.sleep(0)
        return Score(reward=self._judge(env, index, completions), parts={"length": float(len(completions[-1]))})


def spread(env: str, index: int, texts: Sequence[str]) -> float:
    """Return a reward that almost never repeats within a group."""
    return random.Random(f"{env}:{index}:{texts}").random()


def make_player(sampler: FakeSampler, pool: FakePool, context_len: int = 64, **config: float) -> Player:
    return Player(
        EpisodeConfig(**{"max_tokens": 8, **config}),
        sampler=sampler,
        pool=pool,
        tokenizer=Tokenizer.byte_level(),
        context_len=context_len,
        seed=11,
    )


def make_shipper(
    config: OrchestratorConfig,
    player: Player,
    ledger_path,
    weights: Mapping[str, float] | None = None,
    last_step: int | None = None,
    advantage: AdvantageConfig | None = None,
) -> Shipper:
    """Return a started Shipper; call inside the event loop."""
    weights = weights or {"a": 1.0}
    sizes = {env: player.pool._sizes.get(env) for env in weights}
    shipper = Shipper(
        config,
        player=player,
        curriculum=Curriculum(weights, sizes, 5, config.max_fruitless_tasks),
        advantages=Advantages(advantage or AdvantageConfig()),
        ledger_path=ledger_path,
        last_step=last_step,
    )
    shipper.start()
    return shipper
