"""Check a directory that vLLM is to serve: python -m bridge.verify DIR [--against RUN_OR_CHECKPOINT]

Config, headers, index, ignore list, manifest, checksums and values of the files; with --against also every tensor
against the checkpoint; then, in the fleet environment, vLLM's own loader and log-probabilities. Exit code 0: as it
should be; 1: it is not; 2: the command cannot be carried out; 130: stopped.
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import jax
from rich.console import Console

from bridge.verify_config import check_config, check_ignore_list
from bridge.verify_files import EXPORT_AGAIN, Finding, Folder, check_headers, check_index, check_values, open_folder
from bridge.verify_manifest import check_checksums, check_manifest
from bridge.verify_source import check_against
from bridge.verify_vllm import Fleet, check_in_vllm, fleet_fault
from rl_jax import cli
from rl_jax.checkpoint import find_checkpoint, read_meta
from rl_jax.config import ConfigError, refuse
from rl_jax.interrupt import sigterm_as_interrupt
from rl_jax.rollout import leash

CHECKS = (
    check_config,
    check_headers,
    check_index,
    check_ignore_list,
    check_manifest,
    check_checksums,
    check_values,
)
"""What the files alone can show; causes before what they cause."""
EXIT_FAULTS = 1
_MAX_SHOWN = 20


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and check; returns the exit code."""
    args = argparse.ArgumentParser(prog="python -m bridge.verify", description="Check a directory for vLLM.")
    args.add_argument("directory", type=Path, metavar="DIR", help="Hugging Face directory of bridge.convert")
    args.add_argument("--against", type=Path, metavar="DIR", help="run folder or checkpoint that it was made from")
    args.add_argument("--fleet-python", type=Path, default=Path(".venv-fleet/bin/python"), metavar="FILE")
    args.add_argument("--scratch", type=Path, metavar="DIR", help="place of the twin (default: beside the directory)")
    args.add_argument("--no-vllm", action="store_true", help="leave out the steps that load the model in vLLM")
    found = cli.arguments(args, argv)
    with sigterm_as_interrupt():
        return cli.run_entry(_run, found)


def _run(args: argparse.Namespace) -> int:
    jax.config.update("jax_platforms", "cpu")  # an accelerator of this host belongs to the trainer
    console = Console(soft_wrap=True)
    checkpoint = _bad_input(args)
    try:
        folder = open_folder(args.directory)
    except ConfigError as error:
        _report(
            console,
            [Finding("headers", str(args.directory), "readable files", f, EXPORT_AGAIN) for f in error.faults],
        )
        return EXIT_FAULTS
    findings = []
    console.print(f"{args.directory}: {folder.format}, {len(folder.tensors)} tensors", highlight=False)
    for name, check in _steps(args, checkpoint):
        found = list(check(folder))
        findings += found
        console.print(f"  {name}: {len(found) or 'no'} fault(s)", highlight=False)
    _report(console, findings)
    if checkpoint is None and not findings:
        console.print("The files agree with their own manifest. Whether they are the checkpoint's: --against RUN")
    return EXIT_FAULTS if findings else 0


def _bad_input(args: argparse.Namespace) -> Path | None:
    """Return the checkpoint of --against, None without it.

    Raises:
        ConfigError: with every fault of the command line, before the first long check.
    """
    faults, checkpoint = [], None
    if not args.directory.is_dir() or not any(args.directory.iterdir()):
        faults.append(f"{args.directory}: no such directory, or nothing in it; give the one that bridge.convert wrote")
    if args.against is not None:
        try:
            checkpoint = find_checkpoint(args.against)
        except ConfigError:
            advice = "give the folder of the run that DIR was converted from, or one of its checkpoints (step_...)"
            faults.append(f"--against {args.against}: no whole checkpoint in there; {advice}")
    if not args.no_vllm:
        faults.append(fleet_fault(args.fleet_python.absolute()))
    refuse(faults)
    return checkpoint


def _steps(
    args: argparse.Namespace, checkpoint: Path | None
) -> Iterator[tuple[str, Callable[[Folder], Iterable[Finding]]]]:
    yield from ((check.__name__.removeprefix("check_").replace("_", " "), check) for check in CHECKS)
    if checkpoint is not None:
        arch = read_meta(checkpoint).architecture
        yield f"against {checkpoint.name}", lambda folder: check_against(folder, checkpoint, arch)
    if not args.no_vllm:
        fleet = Fleet(python=args.fleet_python.absolute(), leash=Path(leash.__file__))
        place = (args.scratch or args.directory.resolve().parent).absolute()
        yield "vLLM", lambda folder: check_in_vllm(folder, fleet, place)


def _report(console: Console, findings: Sequence[Finding]) -> None:
    if not findings:
        console.print("[bold green]as it should be[/]")
        return
    for one in findings[:_MAX_SHOWN]:
        # Lines, not a table: the name of a tensor must stay whole in a narrow window or a file.
        console.print(f"\n{one.check}: {one.where}", markup=False, highlight=False)
        lines = (("expected", one.expected), ("got", one.got), ("what to do", one.remedy))
        for heading, text in lines:
            if text:
                console.print(f"  {heading:<11}{text}", markup=False, highlight=False)
    if len(findings) > _MAX_SHOWN:
        console.print(f"and {len(findings) - _MAX_SHOWN} more")
    console.print(f"[bold red]{len(findings)} fault(s)[/]: do not serve this directory", highlight=False)


if __name__ == "__main__":
    sys.exit(main())
