"""A training run at work: its rooms, and the steps that rl_jax/train.py puts in order.

Everything that must hold between rooms at run time is here: when weights are published, what a checkpoint holds, what
a step logs. Knows no algorithm.
"""

import asyncio
import dataclasses
import hashlib
import logging
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from types import TracebackType

import numpy as np
from rich.console import Console

from rl_jax import rooms
from rl_jax.advantages import Advantages
from rl_jax.cli import RunConfig, check, shown
from rl_jax.config import to_toml
from rl_jax.engine.config import EngineConfig
from rl_jax.engine.sampler import EmbeddedSampler
from rl_jax.half.lead import LeadingHalf
from rl_jax.hosts.group import Hosts
from rl_jax.interrupt import Interrupt
from rl_jax.metrics import MetricsWriter, RolloutText, quantiles, read_metrics
from rl_jax.orchestrator.loop import Orchestrator, StepBatch
from rl_jax.packing import fill_frac, pack, pack_routes
from rl_jax.plot import plot_run
from rl_jax.progress import Dashboard
from rl_jax.rollout.canary import Canary
from rl_jax.rollout.evaluation import evaluate
from rl_jax.rollout.fleet import VllmFleet
from rl_jax.run_folder import RunFolder
from rl_jax.trainer.loop import StepResult
from rl_jax.trainer.supervised import supervised_batches
from rl_jax.types import Batch, Rollout

logger = logging.getLogger(__name__)

STEADY_AFTER_STEPS = 20
"""Steps after which a new compilation is a logged fault: by then every shape was met."""


class Session:
    """See the module. A context: leaving it stops sampling, closes the account and frees every room."""

    def __init__(self, config: RunConfig, folder: RunFolder, dashboard: Dashboard, hosts: Hosts):
        """Check everything that can be checked without starting anything.

        Raises:
            ConfigError: with every fault.
        """
        self.config = config
        self.folder = folder
        self.dashboard = dashboard
        self.arch = config.model.resolve()
        check(config, self.arch, "rl")
        self.tokenizer = rooms.load_tokenizer(config, self.arch)
        rooms.check_start(config, self.arch)
        self.half = LeadingHalf(config, self.arch, rooms.start_mesh(config), hosts)
        self._stack = ExitStack()
        self._num_compilations = 0
        self._evaluations: list[tuple[int, dict[str, float]]] = []
        self._published: tuple[float, int, float] = (time.monotonic(), 0, 0.0)

    def __enter__(self) -> "Session":
        """Start the worker processes.

        Raises:
            ConfigError: an environment that cannot be made.
        """
        self.pool = rooms.start_pool(self.config)
        self._stack.callback(lambda: asyncio.run(self.pool.close()))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop sampling, close the account and free every room; idempotent."""
        self._stack.close()

    def open(self) -> None:
        """Open the checkpoints of the folder."""
        self.tokenizer.save(self.folder.tokenizer)
        digest = hashlib.sha256(to_toml(self.config).encode()).hexdigest()[:16]
        self._stack.callback(self.half.close)
        self.half.open(self.folder.path, digest)

    # ---- weights

    def warm_start(self, interrupt: Interrupt) -> None:
        """Make the weights that RL starts from: supervised steps on model.path's or drawn ones.

        An interrupt ends it after a step; then the weights are of no use.
        """
        self.half.load()
        sft = self.config.sft
        if not sft.steps:
            return
        documents = rooms.load_documents(self.config, self.tokenizer, self.pool)
        self.half.warm_up()
        trainer = self.half.trainer
        columns = [("loss", "loss/mean", ".3f"), ("tokens/s", "perf/throughput", ",.0f")]
        self.dashboard.phase("warm start", sft.steps, 0, columns)
        while trainer.version < sft.steps and not interrupt.is_requested:
            step = trainer.version
            batches = supervised_batches(documents, sft, self.config.packing, self.config.run.seed, step)
            self.dashboard.step(step + 1, self.half.train_sft(batches).metrics)
        self.half.end_warm_up()

    def restore(self, step: int | None = None) -> bytes | None:
        """Restore the checkpoint of a step, None = the newest, and return what it holds of the orchestrator.

        Returns:
            None if the run was killed before its first checkpoint.
        Raises:
            ConfigError: it is damaged, or of another model or optimizer.
        """
        found = self.half.checkpoints.latest() if step is None else step
        if found is None:
            self.dashboard.say("no checkpoint yet: the run begins again")
            return None
        meta, host = self.half.restore(found, rewinds=step is not None)
        self.dashboard.say(f"resumed after step {meta.step}")
        return host

    def start_training(self, host: bytes | None) -> None:
        """Start trainer, sampler and orchestrator, from the orchestrator's state that a checkpoint gave back, if any."""
        config = self.config
        self.half.begin()
        self.trainer = self.half.trainer
        logged = self.trainer.version if host is not None else -1  # later lines are of steps that will come again
        self.metrics = MetricsWriter(self.folder.path, config.metrics, dataclasses.asdict(config), logged)
        self._stack.callback(self.metrics.close)
        for line in read_metrics(self.folder.path):
            self._remember(int(line["step"] or 0), line)
        self.sampler = self._sampler()
        self._stack.callback(lambda: asyncio.run(self.sampler.close()))
        self.orchestrator = Orchestrator(
            config.orchestrator,
            player=rooms.make_player(config, config.episode, self.sampler, self.pool, self.tokenizer, "train"),
            weights={env.label: env.weight for env in config.envs},
            advantages=Advantages(config.advantage),
            ledger_path=self.folder.ledger,
            seed=config.run.seed,
            last_step=config.run.steps,
        )
        self.orchestrator.start()
        self._stack.callback(self.orchestrator.close)
        if host is not None:
            self.orchestrator.restore(host)
        sequences = rooms.canary_sequences(config, self.pool, self.tokenizer) if config.canary.num_prompts else []
        self._canary = Canary(config.canary, sequences)

    def publish(self) -> dict[str, float]:
        """Give the sampler the trainer's weights, and compare both on the fixed prompts.

        Raises:
            CanaryFailed: they disagree.
        """
        started_s = time.monotonic()
        version = self.trainer.version
        if isinstance(self.config.sampler, EngineConfig):
            self.orchestrator.publish(self.half.weights(), version)
        else:
            with self.half.exporting(self.config.sampler.format) as weights:
                self.orchestrator.publish(weights, version)
        metrics = {"time/broadcast_weights": time.monotonic() - started_s}
        if isinstance(self.sampler, VllmFleet):
            metrics |= self.sampler.sync_metrics()
        if self._canary.sequences:
            theirs = self.orchestrator.run(self._sampler_scores)
            metrics["canary/gap"] = self._canary.check(self.half.score, theirs, version)
        return metrics

    # ---- one step

    def train(self, batch: StepBatch) -> dict[str, float]:
        """Pack a batch, take one step, enter it into the ledger."""
        rollouts = batch.rollouts
        batches = pack(rollouts, batch.advantages, self.config.packing)
        routes = pack_routes(batches, rollouts) if self.config.trainer.router_replay else None
        result = self.half.train(batches, routes, [r.rollout_id for r in rollouts])
        self.orchestrator.record_trained(result.step, rollouts)
        mismatch = _mismatch_by_env(batches, rollouts, result)
        return {**batch.metrics, **result.metrics, **mismatch, "perf/packing_fill": fill_frac(batches)}

    def evaluate(self) -> dict[str, float]:
        """Play the held-out tasks with the current weights."""
        if not self.config.evaluate.envs:
            return {}
        episode = dataclasses.replace(self.config.episode, temperature=self.config.evaluate.temperature)
        player = rooms.make_player(self.config, episode, self.sampler, self.pool, self.tokenizer, "evaluate")
        metrics, _ = self.orchestrator.run(lambda: evaluate(self.config.evaluate, player))
        return metrics

    def is_evaluation_due(self) -> bool:
        """Whether the held-out tasks are played after the current step."""
        step, every = self.trainer.version, self.config.evaluate.interval_steps
        return step == self.config.run.steps or bool(every and step % every == 0)

    def report(self, metrics: Mapping[str, float]) -> None:
        """Say the held-out results, and remember the first and the last for the summary."""
        found = self._remember(self.trainer.version, metrics)
        if found:
            shown = "  ".join(f"{name.removeprefix('eval/')} {value:.3f}" for name, value in found.items())
            self.dashboard.say(f"held out after step {self.trainer.version}: {shown}")

    def _remember(self, step: int, metrics: Mapping[str, float | None]) -> dict[str, float]:
        """Keep held-out results, if there are any, as the last ones, or as the first; return them."""
        found = {name: value for name, value in metrics.items() if name.startswith("eval/") and value is not None}
        if found:
            self._evaluations = [*self._evaluations[:1], (step, found)]
        return found

    def summarise(self, seconds: float) -> None:
        """Say what the run did and where to look next."""
        say, step, last_step = self.dashboard.say, self.half.checkpoints.latest(), self.config.run.steps
        path = self.folder.path
        resume = f"continue with: {shown('rl_jax.train', '--resume', path)}"
        if step is None:
            say(f"stopped before the first checkpoint; {resume}")
            return
        if step < last_step:
            say(f"stopped after step {step}, checkpoint written; {resume}")
        else:
            say(f"finished {step} of {last_step} steps in {seconds:.0f} s")
        if len(self._evaluations) == 2:
            (first_step, first), (last_step, last) = self._evaluations
            for name in sorted(first.keys() & last.keys()):
                label = name.removeprefix("eval/")
                say(f"  {label:28} {first[name]:.3f} (step {first_step}) -> {last[name]:.3f} (step {last_step})")
        say(f"curves    {plot_run(path, self.config.run.name)}")
        if (path / "rollouts").is_dir():
            say(f"rollouts  {path / 'rollouts'}")
        say(f"account   {shown('rl_jax.account', path)}")
        say(f"evaluate  {shown('rl_jax.evaluate', '--policy', path)}")
        say(f"serve     {shown('rl_jax.serve', '--policy', path)}")

    def save(self) -> None:
        """Start to write the checkpoint of the current step; the one before it is committed when this returns."""
        self.half.save(self.orchestrator.state())

    def log(self, metrics: Mapping[str, float], batch: StepBatch | None, step_s: float) -> dict[str, float]:
        """Write the metrics of a step everywhere, with the speed of both sides since the last call."""
        step = self.trainer.version
        every = {**metrics, "time/step": step_s, **self._sampler_speed()}
        busy_s = every.get("time/forward_backward", 0.0)
        every["perf/trainer_idle_frac"] = max(0.0, 1 - busy_s / step_s) if step_s > 0 else 0.0
        self._watch_compilations(step)
        self.metrics.log(step, every)
        if batch is not None:
            self.metrics.rollouts(step, map(self._readable, batch.rollouts))
        return every

    def _sampler(self) -> EmbeddedSampler | VllmFleet:
        config, arch = self.config, self.arch
        if isinstance(config.sampler, EngineConfig):
            self.dashboard.say("compiling the sampler ...")
            return rooms.make_sampler(config, arch, self.tokenizer, self.half.weights())
        folder, say = self.folder.path / "fleet", self.dashboard.say
        for bulky in ("model", "updates"):  # after the servers have ended
            self._stack.callback(shutil.rmtree, folder / bulky, ignore_errors=True)
        make = partial(rooms.make_fleet, config, arch, config.sampler, folder=folder)
        if config.sampler.urls:
            return make(weights=None, tokenizer_dir=self.folder.tokenizer, say=say)
        with self.half.exporting(config.sampler.format) as weights:
            return make(weights=weights, tokenizer_dir=self.folder.tokenizer, say=say)

    async def _sampler_scores(self) -> dict[str, list[np.ndarray]]:
        """Return the scores of everything that samples, by its name."""
        if isinstance(self.sampler, VllmFleet):
            return await self.sampler.score_each(self._canary.sequences)
        # All at once: the sampler looks for calls between its decode steps only.
        return {"sampler": list(await asyncio.gather(*map(self.sampler.score, self._canary.sequences)))}

    def _sampler_speed(self) -> dict[str, float]:
        health = self.orchestrator.run(self.sampler.health)
        now_s = time.monotonic()
        last_s, last_tokens, last_busy_s = self._published
        self._published = (now_s, health.num_sampled_tokens, health.busy_s)
        passed_s = max(now_s - last_s, 1e-9)
        return {
            "inference/agg/tokens_per_s": (health.num_sampled_tokens - last_tokens) / passed_s,
            "inference/agg/idle_frac": max(0.0, 1 - (health.busy_s - last_busy_s) / passed_s),
            "inference/engine/kv_used_frac": health.kv_used_frac,
            "inference/engine/num_running": float(health.num_running),
            "inference/engine/num_waiting": float(health.num_waiting),
        }

    def _watch_compilations(self, step: int) -> None:
        total = self.trainer.num_compilations + self.sampler.num_compilations
        if step > STEADY_AFTER_STEPS and total > self._num_compilations:
            logger.warning("step %d compiled %d new programs: some shape changed", step, total - self._num_compilations)
        self._num_compilations = total

    def _readable(self, rollout: Rollout) -> RolloutText:
        first = int(np.argmax(rollout.sampled_T))
        decode = self.tokenizer.decode
        return RolloutText(
            title=f"{rollout.env} task {rollout.task_id}, group {rollout.group_id} member {rollout.member}",
            facts={
                "reward": rollout.reward,
                **rollout.reward_parts,
                "finish": rollout.finish.value,
                "turns": rollout.num_turns,
                "tokens": rollout.num_sampled,
                "versions": f"{rollout.oldest_version}..{int(rollout.versions_T.max())}",
            },
            prompt=decode(rollout.tokens_T[:first], skip_special=False),
            completion=decode(rollout.tokens_T[first:], skip_special=False),
        )


def _mismatch_by_env(batches: Sequence[Batch], rollouts: Sequence[Rollout], result: StepResult) -> dict[str, float]:
    """Return quantiles of the k3 estimate of KL(sampler, trainer) of each environment's tokens."""
    names = np.array([rollout.env for rollout in rollouts])
    values: dict[str, list[np.ndarray]] = {name: [] for name in sorted(set(names.tolist()))}
    for batch, logp_BT in zip(batches, result.logp_BT, strict=True):
        log_ratio = np.clip(logp_BT.astype(np.float64) - batch.logprobs_BT, -20, 20)[batch.mask_BT]
        env = names[batch.rollouts_BT[batch.mask_BT]]
        for name, found in values.items():
            found.append((np.expm1(log_ratio) - log_ratio)[env == name])
    metrics: dict[str, float] = {}
    for name, found in values.items():
        metrics |= quantiles(f"mismatch_kl/{name}", np.concatenate(found))
    return metrics


def console() -> Console:
    """Return the console of a run."""
    return Console(soft_wrap=True)
