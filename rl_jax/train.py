"""Train a policy by asynchronous RL: python -m rl_jax.train --config configs/reverse_text.toml.

This page is the algorithm; what each line does is in rl_jax/session.py and the rooms (docs/walk.md).
"""

import argparse
import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rl_jax import cli
from rl_jax.checkpoint import CheckpointFailed
from rl_jax.config import ConfigError, to_toml
from rl_jax.interrupt import Interrupt
from rl_jax.models.schema import num_active_params, num_params
from rl_jax.plot import plot_run
from rl_jax.progress import Column, Dashboard
from rl_jax.rollout.canary import CanaryFailed
from rl_jax.run_folder import RunFolder, command_line
from rl_jax.sampler import SamplerLost
from rl_jax.session import Session, console
from rl_jax.trainer.loop import NonFinite

COLUMNS: Sequence[Column] = (
    ("reward", "train/agg/all/reward/mean", ".3f"),
    ("exact", "train/agg/all/exact/mean", ".3f"),
    ("mismatch KL", "mismatch_kl/all/mean", ".1e"),
    ("staleness", "off_policy/mean", ".2f"),
    ("entropy", "entropy/all/mean", ".3f"),
    ("sampler tok/s", "inference/agg/tokens_per_s", ",.0f"),
    ("trainer tok/s", "perf/throughput", ",.0f"),
)
FAILURES = (CanaryFailed, CheckpointFailed, NonFinite, SamplerLost, RuntimeError, TimeoutError)
"""What ends a run with a message; the last checkpoint is whole."""


def train(session: Session, is_resumed: bool, interrupt: Interrupt) -> None:
    """Run from the start, or from the newest checkpoint, to the last step or an interrupt."""
    config = session.config
    if is_resumed:
        start, host = session.restore()
    else:
        start, host = session.warm_start(), None
    session.start_training(start, host)
    trainer, last_step = session.trainer, config.run.steps
    if not is_resumed:
        session.save()
    metrics = session.publish() | session.evaluate()
    session.report(metrics)
    session.log(metrics, None, 0.0)
    session.dashboard.phase("training", last_step, trainer.version, COLUMNS)
    saved = trainer.version
    while trainer.version < last_step and not interrupt.is_requested:
        started_s = time.monotonic()
        batch = session.orchestrator.next_batch(trainer.version)
        metrics = session.train(batch)
        if trainer.version % config.checkpoint.interval_steps == 0 or trainer.version == last_step:
            session.save()
            saved = trainer.version
        metrics |= session.publish()
        if session.is_evaluation_due():
            metrics |= session.evaluate()
            session.report(metrics)
        metrics = session.log(metrics, batch, time.monotonic() - started_s)
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
    with Dashboard(console()) as dashboard:
        folder = resumed or RunFolder(Path(config.run.dir))
        with Session(config, folder, dashboard) as session, Interrupt(dashboard) as interrupt:
            if not resumed:
                session.folder = folder = RunFolder.create(config.run.dir, config.run.name)
            return _supervise(session, folder, resumed is not None, interrupt)


def _supervise(session: Session, folder: RunFolder, is_resumed: bool, interrupt: Interrupt) -> int:
    """Run with a log, and turn what can end a run into a message that says how to go on."""
    folder.record(to_toml(session.config), command_line())
    handler = folder.open_log()
    started_s = time.monotonic()
    session.dashboard.say(f"run folder {folder.path}")
    resume = f"continue with: python -m rl_jax.train --resume {folder.path}"
    try:
        session.open()
        train(session, is_resumed, interrupt)
    except ConfigError:
        raise
    except FAILURES as error:
        logging.getLogger(__name__).exception("the run ended")
        session.dashboard.say(f"the run ended: {error}\ndetails in {folder.log}; {resume}")
        return 1
    except KeyboardInterrupt:
        session.dashboard.say(f"stopped at once; {resume}")
        return cli.EXIT_INTERRUPTED
    finally:
        handler.close()
    if interrupt.is_requested and session.trainer.version < session.config.run.steps:
        session.dashboard.say(f"stopped after step {session.trainer.version}, checkpoint written; {resume}")
    session.summarise(time.monotonic() - started_s, plot_run(folder.path, session.config.run.name))
    return 0


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
