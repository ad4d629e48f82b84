"""Supervised training on documents: python -m rl_jax.sft --config FILE.

Trains sft.steps steps from model.path or from scratch; leaves checkpoints, and a Hugging Face directory that the
model.path of an RL run can name.
"""

import argparse
import asyncio
import dataclasses
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from jax.sharding import Mesh

from bridge import hf
from rl_jax import cli, rooms
from rl_jax.checkpoint import Checkpointer
from rl_jax.config import ConfigError, to_toml
from rl_jax.interrupt import Interrupt
from rl_jax.metrics import MetricsWriter
from rl_jax.models.architecture import Architecture
from rl_jax.plot import plot_run
from rl_jax.progress import Dashboard
from rl_jax.run_folder import RunFolder
from rl_jax.session import console
from rl_jax.tokenizer import Tokenizer
from rl_jax.trainer.loop import Trainer
from rl_jax.trainer.supervised import Pair, supervised_batches

COLUMNS = (
    ("loss", "loss/mean", ".4f"),
    ("entropy", "entropy/all/mean", ".3f"),
    ("tokens/s", "perf/throughput", ",.0f"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and train; returns the exit code."""
    args = cli.parser("sft", "Supervised training on documents.")
    args.add_argument("--resume", metavar="RUN_FOLDER", help="continue from its newest checkpoint")
    return cli.run_entry(_run, cli.arguments(args, argv))


def _run(args: argparse.Namespace) -> int:
    resumed = RunFolder.existing(args.resume) if args.resume else None
    config = cli.load_config(args, [resumed.config] if resumed else [])
    config = dataclasses.replace(config, envs=(), evaluate=dataclasses.replace(config.evaluate, envs=()))
    arch = config.model.resolve()
    cli.check(config, arch, "sft")
    if not config.sft.steps:
        raise ConfigError(["sft.steps=0: nothing to train; set it, and sft.envs or sft.data"])
    tokenizer = rooms.load_tokenizer(config, arch)
    if args.dry_run:
        cli.print_plan(
            config, [f"would train {config.sft.steps} supervised steps of {config.sft.batch_size} documents"]
        )
        return 0
    rooms.check_start(config, arch)
    mesh = rooms.start_mesh(config)
    documents = _documents(config, tokenizer)
    folder = resumed or RunFolder.create(config.run.dir, config.run.name)
    if not resumed:
        folder.record(to_toml(config), cli.command_line())
    tokenizer.save(folder.tokenizer)
    with Dashboard(console()) as dashboard:
        dashboard.say(f"run folder {folder.path}, {len(documents)} documents")
        run = partial(_train, config, arch, mesh, folder, documents, resumed is not None, dashboard)
        return cli.supervise(run, folder, f"python -m rl_jax.sft --resume {folder.path}", dashboard)


def _documents(config: cli.RunConfig, tokenizer: Tokenizer) -> list[Pair]:
    if config.sft.data:
        return rooms.load_documents(config, tokenizer, None)
    pool = rooms.start_pool(config)
    try:
        return rooms.load_documents(config, tokenizer, pool)
    finally:
        asyncio.run(pool.close())


def _train(
    config: cli.RunConfig,
    arch: Architecture,
    mesh: Mesh,
    folder: RunFolder,
    documents: Sequence[Pair],
    is_resumed: bool,
    dashboard: Dashboard,
    interrupt: Interrupt,
) -> None:
    trainer = _trainer(config, arch, mesh)
    with Checkpointer(folder.path, config.checkpoint, arch) as checkpoints:
        if is_resumed:
            _restore(trainer, checkpoints, config, folder)
        metrics = MetricsWriter(folder.path, config.metrics, dataclasses.asdict(config), trainer.version)
        dashboard.phase("supervised", config.sft.steps, trainer.version, COLUMNS)
        saved = trainer.version
        while trainer.version < config.sft.steps and not interrupt.is_requested:
            started_s = time.monotonic()
            step = trainer.version
            batches = supervised_batches(documents, config.sft, config.packing, config.run.seed, step)
            told = trainer.train_sft(batches).metrics | {"time/step": time.monotonic() - started_s}
            metrics.log(trainer.version, told)
            dashboard.step(trainer.version, told)
            if trainer.version % config.checkpoint.interval_steps == 0:
                checkpoints.save(trainer.version, trainer.state, b"")
                saved = trainer.version
        metrics.close()
        if saved != trainer.version:
            checkpoints.save(trainer.version, trainer.state, b"")
    _finish(config, arch, folder, trainer, dashboard)


def _trainer(config: cli.RunConfig, arch: Architecture, mesh: Mesh) -> Trainer:
    return Trainer(
        config=config.trainer,
        arch=arch,
        forward=config.forward,
        loss=dataclasses.replace(config.loss, ref_kl_coef=0.0),
        optim=config.sft.optim,
        mesh=mesh,
        start=rooms.load_start(config, arch, mesh),
    )


def _restore(trainer: Trainer, checkpoints: Checkpointer, config: cli.RunConfig, folder: RunFolder) -> None:
    """Go on from the newest checkpoint; a run that was killed before its first one begins again."""
    if checkpoints.latest() is not None:
        trainer.restore(checkpoints.restore(trainer.abstract_state).state)
    # Only now: settings that do not fit the checkpoint leave those on disk that do.
    folder.record(to_toml(config), cli.command_line())


def _finish(
    config: cli.RunConfig, arch: Architecture, folder: RunFolder, trainer: Trainer, dashboard: Dashboard
) -> None:
    if trainer.version < config.sft.steps:
        dashboard.say(f"stopped after step {trainer.version}; python -m rl_jax.sft --resume {folder.path}")
        return
    target = folder.path / "hf"
    hf.save_params(target, arch, trainer.state.params, folder.tokenizer, replace=True)
    dashboard.say(f"model     {target} (name it in model.path of an RL run)")
    dashboard.say(f"curves    {plot_run(Path(folder.path), config.run.name)}")


if __name__ == "__main__":
    sys.exit(main())
