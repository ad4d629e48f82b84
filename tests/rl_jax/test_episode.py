"""rollout/episode.py: masks, exact prefixes, seeds, and what goes wrong as a value."""

import asyncio
import itertools

import numpy as np
import pytest
from fakes import END, FakePool, FakeSampler, make_player

from rl_jax.envs.errors import EnvFailed, EnvTimeout
from rl_jax.rollout.episode import Draw, EpisodeConfig, Failure, turn_seed
from rl_jax.rollout.transcript import Transcript
from rl_jax.sampler import Completion, SamplerLost
from rl_jax.types import DropReason, FinishReason, Rollout

DRAW = Draw(group_id=3, env="a", task_id=7, rollout_ids=(30, 31, 32))
PROMPT = [257, *b"a:7", 258]


def play(sampler, pool, draw=DRAW, **config):
    player = make_player(sampler, pool, **config)
    return asyncio.run(player.run_group(draw)), player


def test_single_turn_marks_exactly_the_sampled_tokens():
    sampler = FakeSampler()
    sampler.version = 4
    rollouts, _ = play(sampler, FakePool())
    for member, rollout in enumerate(rollouts):
        assert isinstance(rollout, Rollout)
        completion = rollout.tokens_T[len(PROMPT) :]
        assert rollout.tokens_T.tolist() == [*PROMPT, *completion.tolist()]
        assert rollout.sampled_T.tolist() == [False] * len(PROMPT) + [True] * len(completion)
        assert rollout.versions_T.tolist() == [-1] * len(PROMPT) + [4] * len(completion)
        assert (rollout.logprobs_T[rollout.sampled_T] < 0).all()
        assert not rollout.logprobs_T[~rollout.sampled_T].any()
        assert rollout.reward == (len(completion) - 1) / 4
        assert (rollout.rollout_id, rollout.member, rollout.env, rollout.task_id) == (30 + member, member, "a", 7)
        assert rollout.reward_parts == {"length": len(completion) - 1}
    assert len(sampler.calls) == 1  # one request for the group, so that its prompt is computed once


@pytest.mark.parametrize("is_wave", [False, True])
def test_each_turn_extends_the_tokens_of_the_one_before(is_wave):
    sampler, pool = FakeSampler(), FakePool(replies=("higher", "lower"))
    player = make_player(sampler, pool, max_turns=3)
    run = player.run_wave([DRAW]) if is_wave else player.run_group(DRAW)
    outcomes = asyncio.run(run)
    rollouts = outcomes[0] if is_wave else outcomes
    requests = {}
    for request in itertools.chain.from_iterable(sampler.calls):
        requests.setdefault(request.request_id.split(".")[1], []).append(request.tokens_T.tolist())
    for rollout in rollouts:
        prefixes = [*requests[str(rollout.rollout_id)], rollout.tokens_T.tolist()]
        assert len(prefixes) == 4
        for shorter, longer in itertools.pairwise(prefixes):
            assert longer[: len(shorter)] == shorter
        assert rollout.num_turns == 3
        replies = [257, *b"higher", 258], [257, *b"lower", 258]
        unsampled = rollout.tokens_T[~rollout.sampled_T].tolist()
        assert unsampled == [*PROMPT, *replies[0], *replies[1]]
        assert rollout.tokens_T[rollout.sampled_T].tolist().count(END) == 3


def test_wave_and_groups_write_the_same_rollouts():
    pool = FakePool(replies=("x",))
    draws = [Draw(group_id=g, env="a", task_id=g, rollout_ids=(2 * g, 2 * g + 1)) for g in range(3)]
    player = make_player(FakeSampler(), pool, max_turns=2)
    wave = asyncio.run(player.run_wave(draws))
    groups = [asyncio.run(player.run_group(draw)) for draw in draws]
    flat = [rollout.tokens_T.tolist() for group in wave for rollout in group]
    assert flat == [rollout.tokens_T.tolist() for group in groups for rollout in group]
    assert len({tuple(tokens) for tokens in flat}) == 6


def test_wave_submits_each_turn_at_once_in_order():
    sampler = FakeSampler(delay=lambda request: 0.002 * (request.params.seed % 3))
    draws = [Draw(group_id=g, env="a", task_id=g, rollout_ids=(2 * g, 2 * g + 1)) for g in range(3)]
    asyncio.run(make_player(sampler, FakePool(replies=("x",)), max_turns=2).run_wave(draws))
    ids = [[request.request_id for request in call] for call in sampler.calls]
    assert ids == [[f"train.{i}.{turn}" for i in range(6)] for turn in range(2)]


def test_seeds_differ_by_each_part_and_never_by_attempt():
    seeds = [turn_seed(*parts) for parts in itertools.product((0, 1), (5, 6), (0, 1), (0, 1))]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert turn_seed(1, 2, 3, 4) == int(np.random.SeedSequence((1, 2, 3, 4)).generate_state(1)[0]) // 2


def test_context_bounds_prompt_turns_and_replies():
    sampler = FakeSampler()
    rollouts, _ = play(sampler, FakePool(), context_len=len(PROMPT) + 2)
    assert {len(rollout.tokens_T) for rollout in rollouts} == {len(PROMPT) + 2}
    assert {request.params.max_tokens for request in sampler.calls[0]} == {2}
    failures, _ = play(FakeSampler(), FakePool(), context_len=len(PROMPT))
    assert [(f.reason, f.rollout_id) for f in failures] == [(DropReason.PROMPT_TOO_LONG, i) for i in (30, 31, 32)]
    assert "has 5 tokens: no room left in a context of 5" in failures[0].detail
    rollouts, player = play(FakeSampler(), FakePool(replies=("y" * 24,)), context_len=30, max_turns=2)
    assert {(rollout.finish, rollout.num_turns) for rollout in rollouts} == {(FinishReason.LENGTH, 1)}
    assert all(rollout.sampled_T[-1] for rollout in rollouts)
    assert player.num_context_full == 3


def test_truncated_turn_ends_the_episode():
    rollouts, _ = play(FakeSampler(), FakePool(replies=("x",)), max_turns=2, max_tokens=1)
    assert {(rollout.finish, rollout.num_turns) for rollout in rollouts} == {(FinishReason.LENGTH, 1)}


def test_template_that_rewrites_turns_ends_the_episode_and_is_counted():
    player = make_player(FakeSampler(), FakePool(replies=("x",)), max_turns=2)
    player._tokenizer.bridge_ids = lambda prompt, tokens_T, reply: None
    rollouts = asyncio.run(player.run_group(DRAW))
    assert [rollout.num_turns for rollout in rollouts] == [1, 1, 1]
    assert player.num_unbridged == 3


def test_failing_environment_costs_the_member_only():
    def judge(env, index, texts):
        if len(texts[-1]) == 5:
            raise EnvTimeout("a: reward of task 7: no answer in 1 s")
        return 1.0

    outcomes, _ = play(
        FakeSampler(), FakePool(judge), Draw(group_id=3, env="a", task_id=7, rollout_ids=tuple(range(20)))
    )
    failures = [outcome for outcome in outcomes if isinstance(outcome, Failure)]
    rollouts = [outcome for outcome in outcomes if isinstance(outcome, Rollout)]
    assert 0 < len(failures) < 20
    assert len(failures) + len(rollouts) == 20
    assert {failure.reason for failure in failures} == {DropReason.REWARD_TIMEOUT}
    assert all(rollout.num_sampled != 6 for rollout in rollouts)


def test_prompt_that_fails_fails_every_member():
    class Broken(FakePool):
        async def task(self, env, index):
            raise EnvFailed("a: task of task 7: ZeroDivisionError")

    failures, _ = play(FakeSampler(), Broken())
    assert [(f.reason, f.member) for f in failures] == [(DropReason.REWARD_ERROR, m) for m in range(3)]


def test_lost_sampler_is_raised_as_itself():
    with pytest.raises(SamplerLost, match="connection reset"):
        play(FakeSampler(is_lost=lambda request: request.request_id == "train.31.0"), FakePool())


def test_rollout_timeout_in_first_and_in_later_turns():
    failures, _ = play(FakeSampler(delay=lambda request: 30), FakePool(), rollout_timeout_s=0.02)
    assert [(f.reason, f.rollout_id) for f in failures] == [(DropReason.ROLLOUT_TIMEOUT, i) for i in (30, 31, 32)]
    slow = FakeSampler(delay=lambda request: 30.0 * (request.request_id == "train.31.1"))
    outcomes, _ = play(slow, FakePool(replies=("x",)), max_turns=2, rollout_timeout_s=1.0)
    assert [getattr(outcome, "reason", None) for outcome in outcomes] == [None, DropReason.ROLLOUT_TIMEOUT, None]


def test_routes_are_those_under_which_a_token_was_made():
    transcript = Transcript(np.array([5, 6]))

    def turn(tokens, num_rows, expert):
        return Completion(
            tokens_T=np.array(tokens),
            logprobs_T=np.zeros(len(tokens)),
            versions_T=np.zeros(len(tokens)),
            finish=FinishReason.STOP,
            routed_experts_TLA=np.full((num_rows, 2, 1), expert, np.uint16),
        )

    transcript.add_turn(turn([7, 8], 3, expert=1), "")
    transcript.add_reply(np.array([9]))
    transcript.add_turn(turn([4], 5, expert=2), "")
    assert transcript.routed_experts_TLA[:, 0, 0].tolist() == [1, 1, 1, 2, 2]
    assert transcript.sampled_T.tolist() == [False, False, True, True, False, True]


def test_completion_of_uneven_arrays_is_refused():
    broken = Completion(
        tokens_T=np.array([7, 8]), logprobs_T=np.zeros(1), versions_T=np.zeros(2), finish=FinishReason.STOP
    )
    with pytest.raises(ValueError, match="2 tokens, 1 log-probabilities and 2 versions"):
        Transcript(np.array([5])).add_turn(broken, "")


@pytest.mark.parametrize(
    "field", [{"max_tokens": 0}, {"max_turns": 0}, {"temperature": -1.0}, {"top_p": 0.0}, {"stop": ("",)}]
)
def test_config_refuses(field):
    with pytest.raises(ValueError, match=f"^{next(iter(field))}="):
        EpisodeConfig(**field)
