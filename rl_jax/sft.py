"""Supervised training on documents: python -m rl_jax.sft --config FILE.

Trains sft.steps steps from model.path or from scratch; leaves checkpoints, and a Hugging Face directory that the
model.path of an RL run can name.
"""

import argparse
import asyncio
import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

from bridge import hf
from rl_jax import cli, rooms
from rl_jax.config import ConfigError, to_toml
from rl_jax.half.lead import LeadingHalf
from rl_jax.half.on_hosts import on_hosts
from rl_jax.hosts.group import Hosts
from rl_jax.interrupt import Interrupt
from rl_jax.metrics import MetricsWriter
from rl_jax.plot import plot_run
from rl_jax.progress import Dashboard
from rl_jax.run_folder import RunFolder
from rl_jax.session import console
from rl_jax.tokenizer import Tokenizer
from rl_jax.trainer.supervised import Pair, supervised_batches

COLUMNS = (
    ("loss", "loss/mean", ".4f"),
    ("entropy", "entropy/all/mean", ".3f"),
    ("tokens/s", "perf/throughput", ",.0f"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and train; returns the exit code."""
    args = cli.parser("sft", "Supervised training on documents.")
    args.add_argument("--resume", metavar="RUN", help="continue a run folder, or from one of its checkpoints")
    return cli.run_entry(_run, cli.arguments(args, argv))


def _run(args: argparse.Namespace) -> int:
    resumed, step = RunFolder.resumed(args.resume) if args.resume else (None, None)
    config = cli.load_config(args, [resumed.config] if resumed else [])
    config = dataclasses.replace(config, envs=(), evaluate=dataclasses.replace(config.evaluate, envs=()))
    arch = config.model.resolve()
    cli.check(config, arch, "sft")
    if not config.sft.steps:
        raise ConfigError(["sft.steps=0: nothing to train; set it, and sft.envs or sft.data"])
    if args.dry_run:
        rooms.load_tokenizer(config, arch)
        cli.print_plan(
            config, [f"would train {config.sft.steps} supervised steps of {config.sft.batch_size} documents"]
        )
        return 0
    dashboard = Dashboard(console())
    return on_hosts(config, "sft", partial(_lead, resumed, step, dashboard), dashboard)


def _lead(
    resumed: RunFolder | None, step: int | None, dashboard: Dashboard, config: cli.RunConfig, hosts: Hosts
) -> int:
    arch = config.model.resolve()
    tokenizer = rooms.load_tokenizer(config, arch)
    rooms.check_start(config, arch)
    half = LeadingHalf(config, arch, rooms.start_mesh(config), hosts, "sft")
    documents = _documents(config, tokenizer)
    folder = resumed or RunFolder.create(config.run.dir, config.run.name)
    if not resumed:
        folder.record(to_toml(config), cli.command_line())
    tokenizer.save(folder.tokenizer)
    with dashboard:
        dashboard.say(f"run folder {folder.path}, {len(documents)} documents")
        restore = partial(_restore, config, folder, step) if resumed else None
        run = partial(_train, half, folder, documents, restore, dashboard)
        return cli.supervise(run, folder, cli.shown("rl_jax.sft", "--resume", folder.path), dashboard, hosts)


def _documents(config: cli.RunConfig, tokenizer: Tokenizer) -> list[Pair]:
    if config.sft.data:
        return rooms.load_documents(config, tokenizer, None)
    pool = rooms.start_pool(config)
    try:
        return rooms.load_documents(config, tokenizer, pool)
    finally:
        asyncio.run(pool.close())


def _train(
    half: LeadingHalf,
    folder: RunFolder,
    documents: Sequence[Pair],
    restore: Callable[[LeadingHalf], bool] | None,
    dashboard: Dashboard,
    interrupt: Interrupt,
) -> None:
    with closing(half):
        half.open(folder.path, "")
        if not (restore and restore(half)):
            half.load()
        half.begin()
        saved = _take_steps(half, folder, documents, dashboard, interrupt)
        interrupt.promise = "training has ended; its last checkpoint and the model are written"
        if saved != half.trainer.version:
            half.save(b"")
        half.wait()
        _finish(half, folder, dashboard)


def _take_steps(
    half: LeadingHalf, folder: RunFolder, documents: Sequence[Pair], dashboard: Dashboard, interrupt: Interrupt
) -> int:
    """Train to the last step or an interrupt; returns the step of the last checkpoint."""
    config, trainer = half.config, half.trainer
    metrics = MetricsWriter(folder.path, config.metrics, dataclasses.asdict(config), trainer.version)
    dashboard.phase("supervised", config.sft.steps, trainer.version, COLUMNS)
    saved = trainer.version
    while trainer.version < config.sft.steps and not interrupt.is_requested:
        started_s = time.monotonic()
        step = trainer.version
        batches = supervised_batches(documents, config.sft, config.packing, config.run.seed, step)
        told = half.train_sft(batches).metrics | {"time/step": time.monotonic() - started_s}
        metrics.log(trainer.version, told)
        dashboard.step(trainer.version, told)
        if trainer.version % config.checkpoint.interval_steps == 0:
            half.save(b"")
            saved = trainer.version
    metrics.close()
    return saved


def _restore(config: cli.RunConfig, folder: RunFolder, step: int | None, half: LeadingHalf) -> bool:
    """Go on from a checkpoint, None = the newest; false if the run was killed before its first one and begins again."""
    found = half.checkpoints.latest() if step is None else step
    if found is not None:
        half.restore(found, rewinds=step is not None)
    # Only now: settings that do not fit the checkpoint leave those on disk that do.
    folder.record(to_toml(config), cli.command_line())
    return found is not None


def _finish(half: LeadingHalf, folder: RunFolder, dashboard: Dashboard) -> None:
    config, version = half.config, half.trainer.version
    if version < config.sft.steps:
        dashboard.say(f"stopped after step {version}; {cli.shown('rl_jax.sft', '--resume', folder.path)}")
        return
    target = folder.path / "hf"
    hf.save_params(target, half.arch, half.master_weights(), folder.tokenizer, replace=True)
    dashboard.say(f"model     {target} (name it in model.path of an RL run)")
    dashboard.say(f"curves    {plot_run(Path(folder.path), config.run.name)}")


if __name__ == "__main__":
    sys.exit(main())
