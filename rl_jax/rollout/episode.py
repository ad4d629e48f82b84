"""Plays episodes: tokens in, tokens out, never encoded again (step 4 of docs/walk.md).

    prompt tokens -> sampler -> text of the turn -> environment's reply -> its tokens, masked -> sampler -> ... -> reward

An episode only ever grows at its end, so what is trained is what the sampler saw. What goes wrong in an environment is
a value, `Failure`; a lost sampler is an error, for whoever dispatches to try again. Knows no batches and no staleness.
"""

import asyncio
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np

from rl_jax.config import refuse
from rl_jax.envs.base import Task
from rl_jax.envs.errors import EnvError
from rl_jax.envs.pool import Score
from rl_jax.rollout.transcript import Transcript
from rl_jax.sampler import Request, Sampler, SamplerLost, SamplingParams
from rl_jax.tokenizer import Chat
from rl_jax.types import DropReason, FinishReason, Prompt, Rollout


@dataclass(frozen=True, kw_only=True)
class EpisodeConfig:
    """How an episode is sampled."""

    max_tokens: int = 128
    """Tokens of one turn at most; also bounded by what is left of the context."""
    max_turns: int = 1
    """Turns of the policy at most. An environment without replies ends after one."""
    temperature: float = 1.0
    """0 = greedy, for evaluation only: then a group has no variety to learn from."""
    top_p: float = 1.0
    """Share of probability that is kept; 1 = off. Training wants 1: the loss knows the untruncated distribution."""
    top_k: int = 0
    """Number of likeliest tokens that are kept; 0 = off."""
    min_p: float = 0.0
    """Tokens less likely than this share of the likeliest are left out; 0 = off."""
    stop: tuple[str, ...] = ()
    """Texts that end a turn, besides the stop tokens of the tokenizer."""
    return_routed_experts: bool = False
    """Ask the sampler which experts it used, for router replay."""
    rollout_timeout_s: float = 0.0
    """Seconds from dispatch after which an unfinished episode is dropped; 0 = no limit. In its first turn a group is
    one request and shares its fate."""

    def __post_init__(self) -> None:
        refuse(
            [
                None if self.max_tokens >= 1 else f"max_tokens={self.max_tokens}: must be at least 1",
                None if self.max_turns >= 1 else f"max_turns={self.max_turns}: must be at least 1",
                None if 0 <= self.temperature <= 100 else f"temperature={self.temperature}: must be in [0, 100]",
                None if 0 < self.top_p <= 1 else f"top_p={self.top_p}: must be in (0, 1]",
                None if self.top_k >= 0 else f"top_k={self.top_k}: must be at least 0",
                None if 0 <= self.min_p < 1 else f"min_p={self.min_p}: must be in [0, 1)",
                None if all(self.stop) else f"stop={list(self.stop)}: an empty text would end every turn at once",
                None
                if 0 <= self.rollout_timeout_s < float("inf")
                else f"rollout_timeout_s={self.rollout_timeout_s}: must be a finite number >= 0",
            ]
        )


@dataclass(frozen=True, kw_only=True)
class Draw:
    """One group to play. Example: Draw(group_id=7, env="reverse_text", task_id=1041, rollout_ids=(28, 29, 30, 31))."""

    group_id: int
    env: str
    task_id: int
    rollout_ids: tuple[int, ...]
    """One for each member."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A member that cannot be trained, and why. Example: reason=REWARD_TIMEOUT, detail="arithmetic: reward of ..."."""

    rollout_id: int
    group_id: int
    member: int
    reason: DropReason
    detail: str


Outcome: TypeAlias = Rollout | Failure


@runtime_checkable
class Pool(Protocol):
    """What an episode needs of environments; rl_jax/envs/pool.py has it. All may raise EnvError."""

    async def info(self, env: str) -> int | None:
        """Return the number of tasks, None = endless."""
        ...

    async def task(self, env: str, index: int) -> Task:
        """Return task `index`."""
        ...

    async def reply(self, env: str, index: int, completions: Sequence[str]) -> str | None:
        """Return the next user turn, None = over."""
        ...

    async def score(self, env: str, index: int, completions: Sequence[str]) -> Score:
        """Judge a finished episode."""
        ...


@runtime_checkable
class ChatTokenizer(Protocol):
    """What an episode needs of a tokenizer; rl_jax/tokenizer.py has it."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a turn."""
        ...

    def prompt_ids(self, prompt: Chat) -> np.ndarray:
        """Return int32 [T], what the policy continues."""
        ...

    def decode(self, ids_T: np.ndarray) -> str:
        """Return the text of `ids_T`."""
        ...

    def bridge_ids(self, prompt: Chat, tokens_T: np.ndarray, reply: str) -> np.ndarray | None:
        """Return int32 [T], what follows a finished turn; None if the template would rewrite earlier turns."""
        ...


def turn_seed(seed: int, group_id: int, member: int, turn: int) -> int:
    """Return the sampling seed of a turn, in [0, 2**31): the first word of NumPy's SeedSequence of the four numbers.

    It does not depend on the attempt or on rollout ids: a group that is dispatched again writes the same tokens if the
    weights are the same.
    """
    return int(np.random.SeedSequence((seed, group_id, member, turn)).generate_state(1)[0]) >> 1


@dataclass
class _Episode:
    """One member under way. `outcome` is set once, and then nothing else happens to it."""

    prompt: Prompt
    chat: Chat
    member: int
    rollout_id: int
    transcript: Transcript
    is_over: bool = False
    outcome: Outcome | None = None

    def fail(self, reason: DropReason, detail: str) -> None:
        """End in a failure."""
        self.is_over = True
        self.outcome = Failure(
            rollout_id=self.rollout_id,
            group_id=self.prompt.group_id,
            member=self.member,
            reason=reason,
            detail=detail,
        )


class Player:
    """Plays groups with one sampler, one pool and one tokenizer. `name` keeps its requests apart from another player's."""

    def __init__(
        self,
        config: EpisodeConfig,
        *,
        sampler: Sampler,
        pool: Pool,
        tokenizer: ChatTokenizer,
        context_len: int,
        seed: int,
        name: str = "train",
    ):
        """`context_len`: tokens of an episode at most, prompt included."""
        self.config = config
        self.sampler = sampler
        self.pool = pool
        self._tokenizer = tokenizer
        self._context_len = context_len
        self._seed = seed
        self._name = name
        self.num_unbridged = 0
        """Episodes cut short because the chat template would have rewritten their earlier turns."""
        self.num_context_full = 0
        """Episodes cut short because the environment's reply left no room in the context."""

    async def run_group(self, draw: Draw) -> list[Outcome]:
        """Play one group: its first turn is one request, so that the prompt is computed once; then members go alone.

        Raises:
            SamplerLost: nothing of the group is kept.
        """
        (outcomes,) = await self._run([draw], is_lockstep=False)
        return outcomes

    async def run_wave(self, draws: Sequence[Draw]) -> list[list[Outcome]]:
        """Play groups in lockstep, turn by turn, each turn one request: what the sampler computes together never varies.

        Returns:
            The outcomes of each draw, in order. Raises as `run_group`.
        """
        return await self._run(draws, is_lockstep=True)

    async def _run(self, draws: Sequence[Draw], *, is_lockstep: bool) -> list[list[Outcome]]:
        groups: list[list[_Episode]] = [[] for _ in draws]
        deadline = asyncio.timeout(self.config.rollout_timeout_s or None)
        try:
            async with deadline:
                await _together(self._open(draw, group) for draw, group in zip(draws, groups, strict=True))
                await self._play([e for group in groups for e in group], is_lockstep)
        except TimeoutError:
            if not deadline.expired():
                raise
        return [self._outcomes(draw, group) for draw, group in zip(draws, groups, strict=True)]

    async def _play(self, episodes: Sequence[_Episode], is_lockstep: bool) -> None:
        running = [e for e in episodes if not e.is_over]
        if running and not is_lockstep:
            await self._sample(running)
            await _together(self._go_on(e) for e in running)
        while running and is_lockstep:
            await self._sample(running)
            await _together(self._reply(e) for e in running)
            running = [e for e in running if not e.is_over]
        await _together(self._score(e) for e in episodes if e.outcome is None)

    async def _go_on(self, episode: _Episode) -> None:
        await self._reply(episode)
        while not episode.is_over:
            await self._sample([episode])
            await self._reply(episode)
        if episode.outcome is None:
            await self._score(episode)

    async def _open(self, draw: Draw, episodes: list[_Episode]) -> None:
        """Make the prompt of a group and append its members to `episodes`."""
        chat: Chat = ""
        tokens_T, failure = np.zeros(0, np.int32), None
        try:
            chat = (await self.pool.task(draw.env, draw.task_id)).prompt
            tokens_T = self._tokenizer.prompt_ids(chat)
        except EnvError as error:
            failure = (error.drop_reason, str(error))
        except ValueError as error:  # the tokenizer or its template refuses what the environment gave
            failure = (DropReason.REWARD_ERROR, f"{draw.env}: prompt of task {draw.task_id}: {error}")
        else:
            failure = self._refuse_prompt(draw, len(tokens_T))
        prompt = Prompt(group_id=draw.group_id, env=draw.env, task_id=draw.task_id, tokens_T=tokens_T, seed=self._seed)
        for member, rollout_id in enumerate(draw.rollout_ids):
            episode = _Episode(prompt, chat, member, rollout_id, Transcript(tokens_T))
            if failure:
                episode.fail(*failure)
            episodes.append(episode)

    def _refuse_prompt(self, draw: Draw, num_tokens: int) -> tuple[DropReason, str] | None:
        where = f"{draw.env}: prompt of task {draw.task_id} has {num_tokens} tokens"
        if num_tokens == 0:
            return DropReason.REWARD_ERROR, f"{where}: expected at least 1"
        if num_tokens >= self._context_len:
            return DropReason.PROMPT_TOO_LONG, f"{where}: no room left in a context of {self._context_len}"
        return None

    async def _sample(self, episodes: Sequence[_Episode]) -> None:
        """Let the sampler write one turn of each."""
        requests = [self._request(e) for e in episodes]
        completions = await self.sampler.generate_many(requests)
        for episode, request, completion in zip(episodes, requests, completions, strict=True):
            if completion.finish is FinishReason.ABORT or not len(completion.tokens_T):
                raise SamplerLost(f"request {request.request_id}: the sampler gave it up")
            if self.config.return_routed_experts and completion.routed_experts_TLA is None:
                raise ValueError(
                    f"request {request.request_id}: return_routed_experts=true, but the sampler returned none; "
                    "use a sampler that can, or turn it off"
                )
            text = self._tokenizer.decode(completion.tokens_T)
            episode.transcript.add_turn(completion, text)

    def _request(self, episode: _Episode) -> Request:
        config, prompt, turn = self.config, episode.prompt, episode.transcript.num_turns
        tokens_T = episode.transcript.tokens_T
        params = SamplingParams(
            max_tokens=min(config.max_tokens, self._context_len - len(tokens_T)),
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            min_p=config.min_p,
            stop_token_ids=self._tokenizer.stop_token_ids,
            stop=config.stop,
            seed=turn_seed(self._seed, prompt.group_id, episode.member, turn),
            return_routed_experts=config.return_routed_experts,
        )
        return Request(
            request_id=f"{self._name}.{episode.rollout_id}.{turn}",
            tokens_T=tokens_T,
            params=params,
            prefix_key=f"{self._name}.{prompt.group_id}",
        )

    async def _reply(self, episode: _Episode) -> None:
        """Let the environment answer the last turn, or end the episode."""
        transcript, prompt = episode.transcript, episode.prompt
        if transcript.finish is FinishReason.LENGTH or transcript.num_turns >= self.config.max_turns:
            episode.is_over = True
            return
        try:
            text = await self.pool.reply(prompt.env, prompt.task_id, transcript.texts)
            ids_T = self._tokenizer.bridge_ids(episode.chat, transcript.tokens_T, text) if text is not None else None
        except EnvError as error:
            episode.fail(error.drop_reason, str(error))
            return
        except ValueError as error:  # as in _open
            episode.fail(DropReason.REWARD_ERROR, f"{prompt.env}: reply of task {prompt.task_id}: {error}")
            return
        if text is None:
            episode.is_over = True
        elif ids_T is None:
            self.num_unbridged += 1
            episode.is_over = True
        elif len(transcript.tokens_T) + len(ids_T) >= self._context_len:
            self.num_context_full += 1
            transcript.finish = FinishReason.LENGTH
            episode.is_over = True
        else:
            transcript.add_reply(ids_T)

    async def _score(self, episode: _Episode) -> None:
        prompt, transcript = episode.prompt, episode.transcript
        try:
            score = await self.pool.score(prompt.env, prompt.task_id, transcript.texts)
        except EnvError as error:
            episode.fail(error.drop_reason, str(error))
            return
        episode.outcome = Rollout(
            rollout_id=episode.rollout_id,
            group_id=prompt.group_id,
            member=episode.member,
            env=prompt.env,
            task_id=prompt.task_id,
            tokens_T=transcript.tokens_T,
            sampled_T=transcript.sampled_T,
            logprobs_T=transcript.logprobs_T,
            versions_T=transcript.versions_T,
            temperature=self.config.temperature,
            finish=transcript.finish,
            reward=score.reward,
            reward_parts=_plain(score.parts),
            num_turns=transcript.num_turns,
            routed_experts_TLA=transcript.routed_experts_TLA,
        )

    def _outcomes(self, draw: Draw, episodes: Sequence[_Episode]) -> list[Outcome]:
        """Return one outcome for each member; what the deadline left unfinished is a failure."""
        detail = f"not finished within rollout_timeout_s={self.config.rollout_timeout_s}"
        found = {e.member: e.outcome for e in episodes if e.outcome is not None}
        return [
            found.get(member)
            or Failure(
                rollout_id=rollout_id,
                group_id=draw.group_id,
                member=member,
                reason=DropReason.ROLLOUT_TIMEOUT,
                detail=detail,
            )
            for member, rollout_id in enumerate(draw.rollout_ids)
        ]


def _plain(parts: Mapping[str, float]) -> dict[str, float]:
    return {name: float(value) for name, value in parts.items()}


async def _together(coroutines: Iterable[Coroutine[object, object, None]]) -> None:
    """Run all; the first error cancels the rest and is raised as itself, not in a group."""
    try:
        async with asyncio.TaskGroup() as group:
            for coroutine in coroutines:
                group.create_task(coroutine)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
