"""Measure a config on the hardware at hand: python -m rl_jax.bench --config configs/reverse_text.toml [--csv bench.csv].

Takes training steps on made-up rollouts that fill the rows of the config's micro-batches, one sequence a row, and lets the
embedded sampler fill all its slots. One row of numbers is printed and appended to a CSV, with commit, versions, devices.
"""

import argparse
import csv
import dataclasses
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh
from rich.progress import track
from rich.table import Table

from rl_jax import cli, rooms
from rl_jax.checkpoint import versions
from rl_jax.config import ConfigError
from rl_jax.engine.bench import decode_tokens_per_s
from rl_jax.engine.config import EngineConfig
from rl_jax.engine.engine import Engine
from rl_jax.engine.programs import Programs
from rl_jax.models.architecture import Architecture
from rl_jax.models.schema import init_params, num_active_params, num_params
from rl_jax.packing import pack
from rl_jax.run_folder import commit
from rl_jax.session import console
from rl_jax.trainer.loop import Trainer
from rl_jax.trainer.report import speed
from rl_jax.types import Batch, FinishReason, Rollout

WARM_UP_STEPS = 2
"""Steps that compile and are not counted."""
PROMPT_TOKENS = 16
"""Of each request to the sampler; the rest of its context is sampled."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """What was measured on what: the columns of the CSV."""

    date: str
    commit: str
    versions: str
    devices: str
    mesh: str
    config: str
    """The files, and the settings on top of them."""
    parameters: int
    active_parameters: int
    compute_dtype: str
    seq_len: int
    tokens_a_step: int
    """Of all devices."""
    steps: int
    """That count; all numbers of the trainer are of them."""
    compile_s: float
    """The first step, which compiles."""
    step_s: float
    """Median."""
    step_s_min: float
    step_s_max: float
    tokens_s: float
    mfu: float
    """FLOPs of the model over the peak of all devices; 0 where the peak is not known, as on a CPU."""
    peak_bytes: int
    """Memory of the first device at most; 0 where the platform does not tell."""
    sampler_tokens_s: float
    """Sampled by the embedded sampler with all slots full; 0 with --no-sampler."""


COLUMNS = [field.name for field in dataclasses.fields(Row)]


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and measure; returns the exit code."""
    args = cli.parser("bench", "Measure trainer and embedded sampler of a config on the hardware at hand.")
    args.add_argument("--steps", type=int, default=10, metavar="N", help="training steps that count (default 10)")
    args.add_argument("--micro-batches", type=int, default=1, metavar="N", help="micro-batches of a step (default 1)")
    args.add_argument("--no-sampler", action="store_true", help="measure the trainer only")
    args.add_argument("--csv", type=Path, metavar="FILE", help="append the row to this file")
    return cli.run_entry(_run, cli.arguments(args, argv))


def _run(args: argparse.Namespace) -> int:
    config = cli.load_config(args)
    arch = config.model.resolve()
    _check(args, config, arch)
    if args.dry_run:
        tokens = args.micro_batches * config.packing.rows * config.packing.seq_len
        total = f"{num_params(arch):,} parameters on {config.mesh}"
        cli.print_plan(config, [f"would take {WARM_UP_STEPS} + {args.steps} steps of {tokens:,} tokens with {total}"])
        return 0
    row = _measure(args, config, arch, rooms.start_mesh(config))
    table = Table("measured", "value", title=f"{row.config} on {row.devices}")
    for name, value in dataclasses.asdict(row).items():
        table.add_row(name, f"{value:,.4g}" if isinstance(value, float) else str(value))
    console().print(table)
    if args.csv:
        append(args.csv, row)
        console().print(f"appended to {args.csv}")
    return 0


def _check(args: argparse.Namespace, config: cli.RunConfig, arch: Architecture) -> None:
    numbers = {"--steps": args.steps, "--micro-batches": args.micro_batches}
    faults = [f"{name} {number}: expected at least 1" for name, number in numbers.items() if number < 1]
    if not args.no_sampler and not isinstance(config.sampler, EngineConfig):
        faults.append("sampler.type='vllm': bench measures the embedded sampler; give --no-sampler")
    if not args.no_sampler and config.sampler.max_len <= PROMPT_TOKENS:
        faults.append(
            f"sampler.max_len={config.sampler.max_len}: bench asks with {PROMPT_TOKENS} tokens; make it longer"
        )
    if faults:
        raise ConfigError(faults)
    cli.check(config, arch, "sft")
    if args.csv:
        check_columns(args.csv)


def _measure(args: argparse.Namespace, config: cli.RunConfig, arch: Architecture, mesh: Mesh) -> Row:
    shape = " ".join(f"{axis}={size}" for axis, size in mesh.shape.items() if size > 1) or "1 device"
    batches = full_batches(arch, config, args.micro_batches)
    seconds = _trained(args.steps, config, arch, mesh, batches)
    counted = seconds[WARM_UP_STEPS:]
    reached = speed(arch, mesh, batches, statistics.median(counted))
    device = mesh.devices.flat[0]
    return Row(
        date=time.strftime("%Y-%m-%d"),
        commit=commit(),
        versions=", ".join(f"{name} {version}" for name, version in versions().items()),
        devices=f"{mesh.size} x {device.device_kind}",
        mesh=shape,
        config=" ".join([*args.config, *(f"--set {setting}" for setting in args.set)]),
        parameters=num_params(arch),
        active_parameters=num_active_params(arch),
        compute_dtype=config.forward.compute_dtype,
        seq_len=config.packing.seq_len,
        tokens_a_step=sum(batch.num_tokens for batch in batches),
        steps=args.steps,
        compile_s=seconds[0],
        step_s=statistics.median(counted),
        step_s_min=min(counted),
        step_s_max=max(counted),
        tokens_s=reached["perf/throughput"],
        mfu=reached.get("perf/mfu", 0.0),
        peak_bytes=(device.memory_stats() or {}).get("peak_bytes_in_use", 0),
        sampler_tokens_s=0.0 if args.no_sampler else _sampled(config, arch, mesh),
    )


def _trained(
    steps: int, config: cli.RunConfig, arch: Architecture, mesh: Mesh, batches: Sequence[Batch]
) -> list[float]:
    """Return the seconds of each step, those of the warm-up first."""
    trainer = Trainer(
        config=dataclasses.replace(config.trainer, router_replay=False),
        arch=arch,
        forward=config.forward,
        loss=dataclasses.replace(config.loss, ref_kl_coef=0.0),
        optim=config.optim,
        mesh=mesh,
        start=init_params(arch, mesh, jax.random.key(config.run.seed)),
    )
    seconds = []
    for _ in track(range(WARM_UP_STEPS + steps), "training steps", console=console()):
        started = time.perf_counter()
        trainer.train(batches)
        seconds.append(time.perf_counter() - started)
    return seconds


def full_batches(arch: Architecture, config: cli.RunConfig, number: int) -> list[Batch]:
    """Return micro-batches whose rows are one rollout each; the second half of a rollout is trained."""
    chance = np.random.default_rng(0)
    length = config.packing.seq_len
    sampled_T = np.arange(length) >= max(1, length // 2)
    logprobs_T = np.where(sampled_T, -np.log(arch.vocab_size), 0).astype(np.float32)
    rollouts = [
        Rollout(
            rollout_id=i,
            group_id=i,
            member=0,
            env="bench",
            task_id=i,
            tokens_T=chance.integers(0, arch.vocab_size, length).astype(np.int32),
            sampled_T=sampled_T,
            logprobs_T=logprobs_T,
            versions_T=np.where(sampled_T, 0, -1).astype(np.int32),
            temperature=1.0,
            finish=FinishReason.LENGTH,
            reward=0.0,
        )
        for i in range(number * config.packing.rows)
    ]
    return pack(rollouts, chance.standard_normal(len(rollouts)), config.packing)


def _sampled(config: cli.RunConfig, arch: Architecture, mesh: Mesh) -> float:
    """Return tokens a second of the embedded sampler with all slots full."""
    sizes = config.sampler
    assert isinstance(sizes, EngineConfig), "checked before"
    programs = Programs(arch, config.forward, sizes, mesh)
    engine = Engine(programs, programs.place(init_params(arch, mesh, jax.random.key(config.run.seed))))
    return decode_tokens_per_s(engine, sizes.num_slots, PROMPT_TOKENS, sizes.max_len - PROMPT_TOKENS)


def append(file: Path, row: Row) -> None:
    """Append a row to a CSV; a new file gets the names of the columns first.

    Raises:
        ConfigError: the file has other columns.
    """
    check_columns(file)
    is_new = not file.exists()
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        if is_new:
            writer.writerow(COLUMNS)
        writer.writerow(dataclasses.astuple(row))


def check_columns(file: Path) -> None:
    """Refuse a CSV whose first line names other columns; a file that is not there is none.

    Raises:
        ConfigError: what the file has instead.
    """
    if not file.exists():
        return
    try:
        with file.open(newline="", encoding="utf-8") as stream:
            found = next(csv.reader(stream), [])
    except (OSError, ValueError) as error:
        raise ConfigError([f"--csv {file}: cannot be read ({error}); give another file"]) from error
    if found != COLUMNS:
        raise ConfigError([f"--csv {file}: its columns are {found}, expected {COLUMNS}; give another file"])


if __name__ == "__main__":
    sys.exit(main())
