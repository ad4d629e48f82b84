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
from rl_jax.interrupt import Interrupt
from rl_jax.models.schema import num_active_params, num_params
from rl_jax.progress import Column, Dashboard
from rl_jax.run_folder import RunFolder
from rl_jax.session import Found, Session, console

COLUMNS: Sequence[Column] = (
    ("reward", "train/agg/all/reward/mean", ".3f"),
    ("exact", "train/agg/all/exact/mean", ".3f"),
    ("mismatch KL", "mismatch_kl/all/mean", ".1e"),
    ("staleness", "off_policy/mean", ".2f"),
    ("entropy", "entropy/all/mean", ".3f"),
    ("sampler tok/s", "inference/agg/tokens_per_s", ",.0f"),
    ("trainer tok/s", "perf/throughput", ",.0f"),
)


def train(session: Session, found: Found | None, interrupt: Interrupt) -> None:
    """Run from the start, or from what a checkpoint gave back, to the last step or an interrupt.

    A step is logged before it is saved: a checkpoint never knows of a step that metrics.jsonl lacks.
    """
    config = session.config
    start, host = found or (session.warm_start(interrupt), None)
    if interrupt.is_requested:
        return  # half a warm start is nothing to train or to keep
    session.start_training(start, host)
    trainer, last_step = session.trainer, config.run.steps
    metrics = session.publish()
    if host is None:
        metrics |= session.evaluate()
        session.report(metrics)
        session.log(metrics, None, 0.0)
        session.save()
    session.dashboard.phase("training", last_step, trainer.version, COLUMNS)
    saved = trainer.version
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
    if saved != trainer.version:
        session.save()
    session.checkpoints.wait()


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run; returns the exit code."""
    args = cli.parser("train", "Train a policy by asynchronous RL.")
    args.add_argument("--resume", metavar="RUN_FOLDER", help="continue a run from its newest checkpoint")
    return cli.run_entry(_run, cli.arguments(args, argv))


def _run(args: argparse.Namespace) -> int:
    resumed = RunFolder.existing(args.resume) if args.resume else None
    config = cli.load_config(args, [resumed.config] if resumed else [])
    if args.dry_run:
        arch = config.model.resolve()
        cli.check(config, arch, "rl")
        cli.print_plan(config, _plan(config, num_params(arch), num_active_params(arch)))
        return 0
    folder = resumed or RunFolder(Path(config.run.dir))
    with Dashboard(console()) as dashboard, Session(config, folder, dashboard) as session:
        if not resumed:  # only when nothing is left that could be wrong with the config
            session.folder = folder = RunFolder.create(config.run.dir, config.run.name)
            folder.record(to_toml(config), cli.command_line())
        dashboard.say(f"run folder {folder.path}")
        run = partial(_train, session, resumed is not None)
        return cli.supervise(run, folder, f"python -m rl_jax.train --resume {folder.path}", dashboard)


def _train(session: Session, is_resumed: bool, interrupt: Interrupt) -> None:
    started_s = time.monotonic()
    with closing(session):
        session.open()
        found = session.restore() if is_resumed else None
        if is_resumed:  # and only now: settings that do not fit the checkpoint leave those on disk that do
            session.folder.record(to_toml(session.config), cli.command_line())
        train(session, found, interrupt)
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
