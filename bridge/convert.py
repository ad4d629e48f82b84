"""Convert weights: an Orbax checkpoint into a Hugging Face directory that vLLM loads, and back.

    python -m bridge.convert --checkpoint RUN_OR_CHECKPOINT --out DIR --format fp8-block
    python -m bridge.convert --from-hf HF_DIR --out DIR

Formats, guarantees and limits: docs/bridge.md.
"""

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jax
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from bridge.allocator import keep_freed_memory
from bridge.from_hf import DTYPES, FromHf, convert_from_hf, source_bytes
from bridge.hf import check_tensors
from bridge.report import export_lines, kinds_table, plain_lines, stored_lines
from bridge.sources import find_source
from bridge.to_hf import ToHf, ToHfConversion
from rl_jax import cli
from rl_jax.checkpoint import FOLDER, Meta, find_checkpoint, read_meta, versions
from rl_jax.config import ConfigError, refuse
from rl_jax.interrupt import sigterm_as_interrupt
from rl_jax.models.architecture import read_architecture
from rl_jax.models.fp8_rule import FORMATS

ONLY_TO_HF = ("source", "trust_checkpoint", "tensor_parallel", "max_shard_gb", "host_index", "num_hosts")
"""Options that --from-hf has no use for."""


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and convert; returns the exit code."""
    found = cli.arguments(_parser(), argv)
    with sigterm_as_interrupt():
        return cli.run_entry(_run, found)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bridge.convert", description="Convert weights between Orbax checkpoints and Hugging Face."
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--checkpoint", type=Path, metavar="DIR", help="run folder or checkpoint to convert")
    what.add_argument("--from-hf", type=Path, metavar="DIR", help="Hugging Face directory to convert back")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="directory to make")
    parser.add_argument("--format", choices=FORMATS, help="default: fp8-block; with --from-hf: float32 (or bf16)")
    parser.add_argument("--source", type=Path, metavar="HF_DIR", help="directory with the model's own config.json")
    parser.add_argument("--without-tokenizer", action="store_true", help="write weights and config alone")
    parser.add_argument("--trust-checkpoint", action="store_true", help="do not compare its files with their checksums")
    parser.add_argument("--tensor-parallel", type=int, default=1, metavar="N", help="GPUs that will share the model")
    parser.add_argument("--max-shard-gb", type=float, default=5.0, metavar="GB", help="largest file (default: 5)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, metavar="N", help="default: all cores")
    parser.add_argument("--host-index", type=int, default=0, metavar="I", help="which of --num-hosts this is, from 0")
    parser.add_argument("--num-hosts", type=int, default=1, metavar="N", help="hosts that write into --out together")
    return parser


def _run(args: argparse.Namespace) -> int:
    refuse(
        [
            None if args.threads >= 1 else f"--threads {args.threads}: must be at least 1",
            None if 0 < args.max_shard_gb < 1e9 else f"--max-shard-gb {args.max_shard_gb}: must be positive and finite",
            None if args.out.resolve().name else f"--out {args.out}: must name a directory to make",
            *_without_effect(args),
            None if args.tensor_parallel >= 1 else f"--tensor-parallel {args.tensor_parallel}: must be at least 1",
            None
            if 0 <= args.host_index < args.num_hosts
            else f"--host-index {args.host_index}: must be 0..{args.num_hosts - 1} with --num-hosts {args.num_hosts}",
        ]
    )
    jax.config.update("jax_platforms", "cpu")  # an accelerator of this host belongs to the trainer
    keep_freed_memory()
    console = Console(soft_wrap=True)
    return _from_hf(args, console) if args.from_hf else _to_hf(args, console)


def _without_effect(args: argparse.Namespace) -> list[str]:
    """Return a fault for each option that was given and says nothing of the way back."""
    parser = _parser()
    given = [name for name in ONLY_TO_HF if getattr(args, name) != parser.get_default(name)]
    names = [f"--{name.replace('_', '-')}" for name in given if args.from_hf]
    return [f"{name}: has no effect with --from-hf; leave it out" for name in names]


def _to_hf(args: argparse.Namespace, console: Console) -> int:
    checkpoint = _found(args.checkpoint)
    refuse([_inside(args.out.resolve(), checkpoint.resolve())])
    meta = read_meta(checkpoint)
    job = ToHf(
        checkpoint=checkpoint,
        arch=meta.architecture,
        step=meta.step,
        source=find_source(checkpoint, args.source, args.without_tokenizer),
        out=args.out,
        fmt=args.format or "fp8-block",
        max_shard_bytes=int(args.max_shard_gb * 1e9),
        threads=args.threads,
        host=args.host_index,
        num_hosts=args.num_hosts,
        tensor_parallel=args.tensor_parallel,
        is_trusted=args.trust_checkpoint,
    )
    conversion = ToHfConversion(job)
    started = time.monotonic()
    with conversion.held(), _progress(console) as progress:
        checking = progress.add_task("check", total=None)
        task = progress.add_task("convert", total=conversion.prepare())
        progress.remove_task(checking)
        try:
            exported = conversion.run(lambda nbytes: progress.advance(task, nbytes))
        except KeyboardInterrupt:
            console.print("files that are done are kept: the same command goes on from there", highlight=False)
            raise
    console.print(kinds_table(job.arch, job.fmt, exported.tally.kinds))
    below = export_lines(exported, job, time.monotonic() - started)
    for line in (*plain_lines(job.arch, job.fmt), *below):
        console.print(line, markup=False, highlight=False)
    if exported.missing:
        waiting = f"{len(exported.missing)} of {conversion.num_files} files are missing: the other hosts write them"
        console.print(f"waiting   {waiting}", markup=False, highlight=False)
    else:
        console.print(f"wrote     {args.out} (policy step {job.step})", markup=False, highlight=False)
    return 0


def _found(path: Path) -> Path:
    try:
        return find_checkpoint(path)
    except ConfigError as error:
        raise ConfigError([f"--checkpoint {fault}" for fault in error.faults]) from error


def _inside(out: Path, checkpoint: Path) -> str | None:
    """Return a fault if `out` would lie among the checkpoints, which their run sets aside and removes."""
    folder = checkpoint.parent if checkpoint.parent.name == FOLDER else checkpoint
    return f"--out {out}: lies in {folder}; name a directory outside" if out.is_relative_to(folder) else None


def _from_hf(args: argparse.Namespace, console: Console) -> int:
    fmt = args.format or "float32"
    if fmt not in DTYPES:
        raise ConfigError([f"--format {fmt}: a checkpoint holds one of {', '.join(DTYPES)}"])
    if not args.without_tokenizer and not (args.from_hf / "tokenizer.json").is_file():
        fault = f"--from-hf {args.from_hf}: has no tokenizer.json; give --without-tokenizer for weights alone"
        raise ConfigError([fault])
    arch = read_architecture(args.from_hf)
    meta = Meta(step=0, architecture=arch, config_hash="", versions=versions(), holds="weights")
    job = FromHf(
        source=args.from_hf,
        files=check_tensors(args.from_hf, arch),
        arch=arch,
        out=args.out,
        checkpoint=Path(FOLDER) / "step_000000",
        meta=json.dumps(dataclasses.asdict(meta)),
        dtype=DTYPES[fmt],
        threads=args.threads,
    )
    started = time.monotonic()
    with _progress(console) as progress:
        task = progress.add_task("convert", total=source_bytes(job.files, arch))
        stored = convert_from_hf(job, lambda nbytes: progress.advance(task, nbytes))
    for line in stored_lines(stored, time.monotonic() - started):
        console.print(line, markup=False, highlight=False)
    console.print(f"wrote     {args.out} (name it in model.path or --policy)", markup=False, highlight=False)
    return 0


def _progress(console: Console) -> Progress:
    speed, left = TransferSpeedColumn(), TimeRemainingColumn()
    return Progress(TextColumn("{task.description}"), BarColumn(), DownloadColumn(), speed, left, console=console)


if __name__ == "__main__":
    sys.exit(main())
