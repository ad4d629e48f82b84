"""Train a policy by asynchronous RL: python -m rl_jax.train --config configs/reverse_text.toml.

This page is the algorithm; what each line does is in rl_jax/session.py and the rooms (docs/walk.md).
"""

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

from rl_jax import cli
from rl_jax.config import to_toml
from rl_jax.half.on_hosts import on_hosts
from rl_jax.hosts.group import Hosts
from rl_jax.interrupt import Interrupt
from rl_jax.models.schema import num_active_params, num_params
from rl_jax.progress import Column, Dashboard
from rl_jax.run_folder import RunFolder
from rl_jax.session import Session, console

# Reward of all arrivals: of what is trained it would be biased, since groups of equal reward are filtered out of it.
COLUMNS: Sequence[Column] = (
    ("reward", "train/agg/all/reward/mean", ".3f"),
    ("exact", "train/agg/all/exact/mean", ".3f"),
    ("mismatch KL", "mismatch_kl/all/mean", ".1e"),
    ("staleness", "off_policy/mean", ".2f"),
    ("entropy", "entropy/all/mean", ".3f"),
    ("sampler tok/s", "inference/agg/tokens_per_s", ",.0f"),
    ("trainer tok/s", "perf/throughput", ",.0f"),
)


def train(session: Session, host: bytes | None, interrupt: Interrupt) -> None:
    """Run from the start, or from a restored checkpoint with the orchestrator's state, to the last step or an interrupt.

    A step is logged before it is saved: a checkpoint never knows of a step that metrics.jsonl lacks.
    """
    config, promise = session.config, interrupt.promise
    interrupt.promise = "the warm start ends after this step and is not kept"
    if host is None:
        session.warm_start(interrupt)
    if interrupt.is_requested:
        return  # half a warm start is nothing to train or to keep
    interrupt.promise = "the run ends before its next step, and its checkpoint is kept"
    session.start_training(host)
    trainer, last_step = session.trainer, config.run.steps
    metrics = session.publish()
    if host is None:
        metrics |= session.evaluate()
        session.report(metrics)
        session.log(metrics, None, 0.0)
        session.save()
    session.dashboard.phase("training", last_step, trainer.version, COLUMNS)
    saved, interrupt.promise = trainer.version, promise
    while trainer.version < last_step and not interrupt.is_requested:
        started_s = time.monotonic()
        batch = session.orchestrator.next_batch(trainer.version)
        metrics = session.train(batch) | session.publish()
        if session.is_evaluation_due():
            metrics |= session.evaluate()
            session.report(metrics)
        metrics = session.log(metrics, batch, time.monotonic() - started_s)
        if trainer.version % config.checkpoint.interval_steps == 0 or trainer.version == last_step:
            session.save()
            saved = trainer.version
        session.dashboard.step(trainer.version, metrics)
    interrupt.promise = "training has ended; its last checkpoint and a summary are written"
    if saved != trainer.version:
        session.save()
    session.half.wait()


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run; returns the exit code."""
    args = cli.parser("train", "Train a policy by asynchronous RL.")
    args.add_argument("--resume", metavar="RUN", help="continue a run folder, or from one of its checkpoints")
    return cli.run_entry(_run, cli.arguments(args, argv))


def _run(args: argparse.Namespace) -> int:
    resumed, step = RunFolder.resumed(args.resume) if args.resume else (None, None)
    config = cli.load_config(args, [resumed.config] if resumed else [])
    if args.dry_run:
        arch = config.model.resolve()
        cli.check(config, arch, "rl")
        cli.print_plan(config, _plan(config, num_params(arch), num_active_params(arch)))
        return 0
    dashboard = Dashboard(console())
    return on_hosts(config, "rl", partial(_lead, resumed, step, dashboard), dashboard)


def _lead(
    resumed: RunFolder | None, step: int | None, dashboard: Dashboard, config: cli.RunConfig, hosts: Hosts
) -> int:
    folder = resumed or RunFolder(Path(config.run.dir))
    with dashboard, Session(config, folder, dashboard, hosts) as session:
        if not resumed:  # only when nothing is left that could be wrong with the config
            session.folder = folder = RunFolder.create(config.run.dir, config.run.name)
            folder.record(to_toml(config), cli.command_line())
        dashboard.say(f"run folder {folder.path}")
        run = partial(_train, session, resumed is not None, step)
        return cli.supervise(run, folder, cli.shown("rl_jax.train", "--resume", folder.path), dashboard, hosts)


def _train(session: Session, is_resumed: bool, step: int | None, interrupt: Interrupt) -> None:
    started_s = time.monotonic()
    with closing(session):
        session.open()
        host = session.restore(step) if is_resumed else None
        if is_resumed:  # and only now: settings that do not fit the checkpoint leave those on disk that do
            session.folder.record(to_toml(session.config), cli.command_line())
        train(session, host, interrupt)
        session.summarise(time.monotonic() - started_s)


def _plan(config: cli.RunConfig, total: int, active: int) -> list[str]:
    orchestrator = config.orchestrator
    return [
        f"would train {total:,} parameters ({active:,} active) for {config.run.steps} steps on {config.mesh}",
        f"after {config.sft.steps} supervised steps of {config.sft.batch_size} documents",
        f"each step: {orchestrator.batch_size} rollouts in groups of {orchestrator.group_size}, "
        f"at most {orchestrator.max_staleness} versions old",
        f"environments: {', '.join(env.label for env in config.envs)}; "
        f"held out: {', '.join(env.label for env in config.evaluate.envs) or 'none'}",
    ]


if __name__ == "__main__":
    sys.exit(main())
