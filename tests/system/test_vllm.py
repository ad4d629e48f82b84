"""Two real vLLM servers on CPU: updated under load, attached to by a run that learns, killed; skipped without make fleet.

Servers take half a minute to start, so all tests share one pair, in this order.
"""

import asyncio
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import numpy as np
import psutil
import pytest
from tiny_runs import ROOT, folder_in, run

from rl_jax import rooms
from rl_jax.cli import RunConfig
from rl_jax.config import load
from rl_jax.mesh import make_mesh
from rl_jax.models.schema import Params, init_params
from rl_jax.rollout.fleet import VllmFleet
from rl_jax.rollout.fleet_config import FleetConfig
from rl_jax.sampler import Completion, Request, SamplingParams
from rl_jax.tokenizer import Tokenizer
from rl_jax.trainer.loop import Trainer
from rl_jax.types import FinishReason

CONFIG = ROOT / "tests" / "system" / "vllm.toml"
FLEET = ROOT / ".venv-fleet" / "bin" / "python"
PARITY = 2e-5
"""Nats; float32 on both sides (facts measured on vLLM's CPU build: 6e-6)."""
PATIENCE_S = 60.0

pytestmark = pytest.mark.skipif(not FLEET.is_file(), reason=f"{FLEET} is missing: make fleet installs vLLM")


class World:
    """A fleet, and the weights of every version that it was given."""

    def __init__(self, folder: Path):
        self.config = load(RunConfig, [CONFIG])
        self.arch = self.config.model.resolve()
        self.mesh = make_mesh(self.config.mesh)
        self.weights: dict[int, Params] = {0: init_params(self.arch, self.mesh, jax.random.key(0))}
        self.tokenizer = Tokenizer.byte_level()
        self.tokenizer.save(folder / "tokenizer")
        fleet = self.config.sampler
        assert isinstance(fleet, FleetConfig)
        weights, tokenizer = self.weights[0], folder / "tokenizer"
        self.fleet: VllmFleet = rooms.make_fleet(
            self.config, self.arch, fleet, weights, folder / "fleet", tokenizer, print
        )

    async def publish(self, version: int) -> None:
        """Publish weights that are the first ones with noise of their own; nearly every element differs."""
        if version:
            leaves, tree = jax.tree.flatten(self.weights[0])
            keys = jax.random.split(jax.random.key(version), len(leaves))
            noisy = [w + 0.1 * jax.random.normal(k, w.shape) for w, k in zip(leaves, keys, strict=True)]
            self.weights[version] = jax.tree.unflatten(tree, noisy)
        await self.fleet.publish(self.weights[version], version)

    def check(self, requests: Sequence[Request], completions: Sequence[Completion]) -> None:
        """Every log-probability is that of the version on its token, by the trainer's own forward."""
        sequences = [np.concatenate([r.tokens_T, c.tokens_T]) for r, c in zip(requests, completions, strict=True)]
        for version in sorted({int(v) for c in completions for v in c.versions_T}):
            expected = self._trainer(version).score(sequences)
            for request, completion, scores_T in zip(requests, completions, expected, strict=True):
                at_T = completion.versions_T == version
                gap_T = np.abs(scores_T[len(request.tokens_T) :] - completion.logprobs_T)[at_T]
                assert gap_T.max(initial=0) < PARITY, f"version {version}"

    def _trainer(self, version: int) -> Trainer:
        config = self.config
        return Trainer(
            config=config.trainer,
            arch=self.arch,
            forward=config.forward,
            loss=config.loss,
            optim=config.optim,
            mesh=self.mesh,
            start=self.weights[version],
            reference=None,
        )


groups = itertools.count()


def make_requests(number: int, max_tokens: int, **params: object) -> list[Request]:
    """Return requests of new groups, two in each: the groups of one that was updating stay with its neighbour."""
    keys = [f"g{next(groups)}" for _ in range(0, number, 2)]
    rng = np.random.default_rng(3)
    return [
        Request(
            request_id=f"r{i}",
            tokens_T=rng.integers(0, 256, size=3 + i % 5).astype(np.int32),
            params=SamplingParams(max_tokens=max_tokens, seed=i, **params),
            prefix_key=keys[i // 2],
        )
        for i in range(number)
    ]


async def until_running(world: World, writing: asyncio.Task) -> None:
    """Wait until the servers are at it; who asked must not be done before."""
    async with asyncio.timeout(PATIENCE_S):
        while not (await world.fleet.health()).num_running:
            assert not writing.done()
            await asyncio.sleep(0.005)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    world = World(tmp_path_factory.mktemp("vllm"))
    try:
        asyncio.run(world.publish(0))
        yield world
    finally:
        asyncio.run(world.fleet.close())
    assert not [p for p in psutil.Process().children(recursive=True) if "vllm" in " ".join(p.cmdline())]


def test_two_updates_while_requests_are_in_flight(world: World) -> None:
    written: list[tuple[Request, Completion]] = []

    async def keep_busy(request: Request, are_updated: asyncio.Event) -> None:
        while not are_updated.is_set():
            written.append((request, await world.fleet.generate(request)))

    async def go() -> None:
        are_updated = asyncio.Event()
        workers = [asyncio.create_task(keep_busy(request, are_updated)) for request in make_requests(24, 110)]
        for version in (1, 2):
            await until_running(world, workers[0])
            await world.publish(version)
        are_updated.set()
        await asyncio.gather(*workers)

    asyncio.run(go())
    requests, completions = [r for r, _ in written], [c for _, c in written]
    assert all(len(c.tokens_T) == 110 and c.finish is FinishReason.LENGTH for c in completions)
    assert all((np.diff(c.versions_T) >= 0).all() for c in completions)
    crossed = [set(c.versions_T.tolist()) for c in completions]
    for update in ({0, 1}, {1, 2}):
        assert sum(update <= versions for versions in crossed) >= 12  # of 24 in flight, some end just then
    world.check(requests, completions)
    metrics = world.fleet.sync_metrics()
    assert (metrics["fleet/num_live"], metrics["fleet/num_evictions"], metrics["sync/replica1/version"]) == (2, 0, 2)


def test_sampling_is_what_was_asked_for(world: World) -> None:
    (request,) = make_requests(1, 20)
    first, again = asyncio.run(world.fleet.generate(request)), asyncio.run(world.fleet.generate(request))
    np.testing.assert_array_equal(first.tokens_T, again.tokens_T)  # the seed decides
    assert again.num_cached_tokens <= len(request.tokens_T)
    (greedy,) = make_requests(1, 6, temperature=0.0)
    completion = asyncio.run(world.fleet.generate(greedy))
    world.check([greedy], [completion])  # log-probabilities of temperature 1
    stop_id = int(first.tokens_T[7])
    (stopped,) = make_requests(1, 20, stop_token_ids=(stop_id,))
    completion = asyncio.run(world.fleet.generate(stopped))
    end = first.tokens_T.tolist().index(stop_id) + 1
    assert completion.finish is FinishReason.STOP
    np.testing.assert_array_equal(completion.tokens_T, first.tokens_T[:end])
    text = world.tokenizer.decode(first.tokens_T)
    place = next(i for i, c in enumerate(text) if i > 2 and c.isascii() and c.isprintable())
    (by_text,) = make_requests(1, 20, stop=(text[place],))
    completion = asyncio.run(world.fleet.generate(by_text))
    assert completion.finish is FinishReason.STOP
    assert world.tokenizer.decode(completion.tokens_T) == text[: text.index(text[place]) + 1]


def test_a_cancelled_request_leaves_the_server(world: World) -> None:
    async def go() -> None:
        writing = asyncio.create_task(world.fleet.generate_many(make_requests(24, 120)))
        await until_running(world, writing)
        writing.cancel()
        (outcome,) = await asyncio.gather(writing, return_exceptions=True)
        assert isinstance(outcome, asyncio.CancelledError)
        async with asyncio.timeout(PATIENCE_S):
            while (await world.fleet.health()).num_running:
                await asyncio.sleep(0.01)

    asyncio.run(go())


def test_a_run_that_is_attached_learns(world: World, tmp_path: Path) -> None:
    urls = json.dumps([replica.url for replica in world.fleet._replicas.members.values()])
    settings = ["--set", f"sampler.urls={urls}", "--set", f"run.dir={tmp_path}"]
    assert run("train", "--config", CONFIG, *settings).returncode == 0
    lines = [json.loads(line) for line in (folder_in(tmp_path) / "metrics.jsonl").read_text().splitlines()]
    rewards = [line["train/agg/effective/reward/mean"] for line in lines[1:]]
    assert np.mean(rewards[:3]) < 0.35  # 52 of 264 tokens are letters
    assert np.mean(rewards[-3:]) > 0.7
    assert max(line["canary/gap"] for line in lines) < PARITY
    assert [line["sync/replica0/version"] for line in lines] == list(range(13))
    assert all(line["sync/replica1/pause_s"] > 0 and line["fleet/num_live"] == 2 for line in lines)
    assert max(line["off_policy/max"] for line in lines[1:]) == 1
    assert not list((folder_in(tmp_path) / "fleet" / "updates").glob("*"))


def test_all_rollouts_are_finished_though_a_server_is_killed(world: World) -> None:
    asyncio.run(world.publish(3))  # both hold what the run left: the difference is refused, everything is sent
    assert world.fleet.sync_metrics()["fleet/num_live"] == 2
    (victim, *_) = [p for p in psutil.Process().children() if "leash.py" in " ".join(p.cmdline())]
    written: list[tuple[Request, Completion]] = []

    async def keep_busy(request: Request, is_noticed: asyncio.Event) -> None:
        while not is_noticed.is_set():
            written.append((request, await world.fleet.generate(request)))

    async def go() -> None:
        is_noticed = asyncio.Event()
        workers = [asyncio.create_task(keep_busy(request, is_noticed)) for request in make_requests(24, 110)]
        await until_running(world, workers[0])
        victim.children()[0].kill()
        async with asyncio.timeout(PATIENCE_S):
            while world.fleet.sync_metrics()["fleet/num_live"] == 2:
                await asyncio.sleep(0.01)
        is_noticed.set()
        await asyncio.gather(*workers)

    asyncio.run(go())
    assert len(written) >= 24
    requests, completions = [r for r, _ in written], [c for _, c in written]
    assert all(len(c.tokens_T) == 110 for c in completions)
    world.check(requests, completions)
    metrics = world.fleet.sync_metrics()
    assert (metrics["fleet/num_live"], metrics["fleet/num_evictions"]) == (1, 1)
    assert metrics["fleet/num_redispatched"] > 0
