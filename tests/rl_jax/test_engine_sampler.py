"""The embedded sampler on its thread: waves, cancelling, pausing, publishing, streaming, dying."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from rl_jax.engine.config import EngineConfig
from rl_jax.engine.sampler import EmbeddedSampler
from rl_jax.mesh import MeshConfig, make_mesh
from rl_jax.models.architecture import Architecture
from rl_jax.models.schema import Params, flat_table
from rl_jax.models.transformer import ForwardConfig
from rl_jax.sampler import Completion, Request, SamplerLost, SamplingParams
from rl_jax.types import FinishReason

ARCH = Architecture(
    family="llama",
    vocab_size=31,
    width=8,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_width=4,
    mlp_width=6,
    qk_norm=False,
    max_positions=4096,
)
CONFIG = EngineConfig(
    num_slots=3,
    slot_buckets=(3,),
    max_len=4000,
    page_size=1000,
    num_pages=13,
    prefill_lengths=(8,),
    prefill_tokens=8,
    decode_steps=2,
)
LONG = 3900
"""Tokens of a completion that no test waits for."""


@pytest.fixture(scope="module", autouse=True)
def compiled_once(tmp_path_factory):
    """Every test starts a sampler of its own; they share their compiled programs through JAX's cache on disk."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    compilation_cache.reset_cache()
    jax.config.update(names[0], str(tmp_path_factory.mktemp("jax")))
    jax.config.update(names[1], 0.0)
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def weights(seed: int = 0) -> Params:
    rng, flat = np.random.default_rng(seed), flat_table(ARCH)
    values = {name: rng.normal(size=param.sizes).astype(np.float32) for name, param in flat.items()}
    layers = {name.removeprefix("layers/"): value for name, value in values.items() if name.startswith("layers/")}
    return {**{name: value for name, value in values.items() if not name.startswith("layers/")}, "layers": layers}


def request(name: str = "r", max_tokens: int = 5, length: int = 3, **settings: object) -> Request:
    params = SamplingParams(max_tokens=max_tokens, **settings)  # type: ignore[arg-type]
    return Request(request_id=name, tokens_T=np.arange(length, dtype=np.int32), params=params)


def with_sampler(body: Callable[[EmbeddedSampler], Awaitable[None]]) -> None:
    """Run `body` on an event loop with a sampler, and close it."""

    async def main() -> None:
        mesh = make_mesh(MeshConfig(), jax.devices()[2:])
        sampler = EmbeddedSampler(ARCH, ForwardConfig(), CONFIG, weights(), mesh=mesh)
        try:
            await asyncio.wait_for(body(sampler), 120)
        finally:
            await sampler.close()
        assert not sampler._thread.is_alive()

    asyncio.run(main())


def assert_equal(left: Completion, right: Completion) -> None:
    np.testing.assert_array_equal(left.tokens_T, right.tokens_T)
    np.testing.assert_array_equal(left.logprobs_T, right.logprobs_T)
    np.testing.assert_array_equal(left.versions_T, right.versions_T)


def test_a_wave_is_repeated_bitwise_and_keeps_its_order():
    wave = [request(str(i), max_tokens=9 - i, seed=i, length=i % 3 + 1) for i in range(7)]
    results = []

    async def body(sampler: EmbeddedSampler) -> None:
        results.append(await sampler.generate_many(wave))
        health = await sampler.health()
        assert (health.num_running, health.num_waiting, health.kv_used_frac) == (0, 0, 0)
        assert health.num_sampled_tokens == sum(range(3, 10))
        assert health.num_prompt_tokens == sum(i % 3 + 1 for i in range(7))
        assert health.busy_s > 0
        assert await sampler.generate_many([]) == []

    with_sampler(body)
    with_sampler(body)
    assert [len(c.tokens_T) for c in results[0]] == list(range(9, 2, -1))
    for left, right in zip(*results, strict=True):
        assert_equal(left, right)
        assert left.num_cached_tokens == right.num_cached_tokens


def test_calls_on_several_event_loops_are_answered_on_theirs():
    async def body(sampler: EmbeddedSampler) -> None:
        here = await sampler.generate(request(seed=4))
        elsewhere = await asyncio.to_thread(lambda: asyncio.run(sampler.generate(request(seed=4))))
        np.testing.assert_array_equal(here.tokens_T, elsewhere.tokens_T)

    with_sampler(body)


def test_cancelling_frees_slots_and_pages():
    async def body(sampler: EmbeddedSampler) -> None:
        calls = [asyncio.create_task(sampler.generate(request(str(i), LONG))) for i in range(5)]
        while (await sampler.health()).num_running < 2:  # eight pages for requests, four each
            await asyncio.sleep(0.01)
        health = await sampler.health()
        assert (health.num_running, health.num_waiting) == (2, 3)
        for call in calls:
            call.cancel()
        ended = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(end, asyncio.CancelledError) for end in ended)
        await sampler.score(np.arange(2))  # runs after the aborts
        health = await sampler.health()
        assert (health.num_running, health.num_waiting, health.kv_used_frac) == (0, 0, 0)
        assert len((await sampler.generate(request())).tokens_T) == 5

    with_sampler(body)


def test_a_paused_sampler_keeps_its_requests_and_still_publishes_and_scores():
    async def body(sampler: EmbeddedSampler) -> None:
        call = asyncio.create_task(sampler.generate(request(max_tokens=400, seed=1)))
        while (await sampler.health()).num_sampled_tokens < 4:
            await asyncio.sleep(0.001)
        await sampler.pause()
        before = await sampler.health()
        old_T = await sampler.score(np.arange(9))
        await sampler.publish(weights(1), 3)
        new_T = await sampler.score(np.arange(9))
        await asyncio.sleep(0.05)
        after = await sampler.health()
        assert after.num_sampled_tokens == before.num_sampled_tokens < 400
        assert (after.num_running, after.version) == (1, 3)
        assert np.abs(old_T - new_T).max() > 0.1
        await sampler.resume()
        got = await call
        assert got.versions_T.tolist() == sorted(got.versions_T)
        assert (got.versions_T == 3).sum() == 400 - before.num_sampled_tokens

    with_sampler(body)


def test_published_weights_are_those_that_score():
    async def body(sampler: EmbeddedSampler) -> None:
        first_T = await sampler.score(np.arange(12))
        mutable = weights(1)
        await sampler.publish(mutable, 1)
        second_T = await sampler.score(np.arange(12))
        mutable["embed_VD"] *= 0  # the sampler has a copy
        np.testing.assert_array_equal(await sampler.score(np.arange(12)), second_T)
        await sampler.publish(weights(0), 2)
        np.testing.assert_array_equal(await sampler.score(np.arange(12)), first_T)
        with pytest.raises(ValueError, match="version 1 is older than 2"):
            await sampler.publish(weights(0), 1)
        with pytest.raises(ValueError, match="final_norm_D: missing"):
            await sampler.publish({k: v for k, v in weights(0).items() if k != "final_norm_D"}, 3)
        assert (await sampler.health()).version == 2

    with_sampler(body)


def test_a_stream_adds_up_and_leaving_it_aborts():
    async def body(sampler: EmbeddedSampler) -> None:
        whole = await sampler.generate(request(seed=8))
        parts = [part async for part in sampler.stream(request(seed=8))]
        assert [len(part.tokens_T) for part in parts] == [2, 2, 1]
        assert parts[-1].completion is not None
        assert_equal(parts[-1].completion, whole)
        stream = sampler.stream(request(max_tokens=LONG))
        await anext(stream)
        await stream.aclose()
        await sampler.score(np.arange(2))
        assert (await sampler.health()).num_running == 0

    with_sampler(body)


def test_a_bad_request_starts_nothing_of_its_wave():
    async def body(sampler: EmbeddedSampler) -> None:
        with pytest.raises(ValueError, match="request bad: its prompt has 4000 tokens"):
            bad = replace(request("bad"), tokens_T=np.zeros(4000, np.int32))
            await sampler.generate_many([request(), bad])
        with pytest.raises(ValueError, match="score: 4001 tokens"):
            await sampler.score(np.zeros(4001, np.int32))
        assert (await sampler.health()).num_prompt_tokens == 0

    with_sampler(body)


def test_closing_ends_pending_requests_with_what_they_have():
    async def body(sampler: EmbeddedSampler) -> None:
        calls = [asyncio.create_task(sampler.generate(request(str(i), LONG, seed=i))) for i in range(4)]
        while (await sampler.health()).num_sampled_tokens < 5:
            await asyncio.sleep(0.001)
        await sampler.close()
        ended = await asyncio.gather(*calls)
        assert {completion.finish for completion in ended} == {FinishReason.ABORT}
        assert sum(len(completion.tokens_T) for completion in ended) >= 5
        for call in (sampler.generate(request()), sampler.health(), sampler.score(np.arange(3)), sampler.pause()):
            with pytest.raises(SamplerLost, match="it was closed"):
                await call

    with_sampler(body)


def test_a_dead_engine_thread_fails_everything_instead_of_hanging():
    nan = {**weights(), "embed_VD": np.full((31, 8), np.nan, np.float32)}

    async def body(sampler: EmbeddedSampler) -> None:
        pending = [asyncio.create_task(sampler.generate(request(str(i), LONG))) for i in range(4)]
        while (await sampler.health()).num_running < 2:
            await asyncio.sleep(0.001)
        await sampler.publish(nan, 1)
        for call in pending:
            with pytest.raises(SamplerLost, match="non-finite") as caught:
                await call
            assert isinstance(caught.value.__cause__, FloatingPointError)
        for call in (sampler.generate(request()), sampler.publish(weights(), 2), sampler.health(), sampler.resume()):
            with pytest.raises(SamplerLost, match="non-finite"):
                await call
        with pytest.raises(SamplerLost, match="non-finite"):
            await anext(sampler.stream(request()))

    with_sampler(body)
    assert not [thread for thread in threading.enumerate() if thread.name == "sampler-engine"]
