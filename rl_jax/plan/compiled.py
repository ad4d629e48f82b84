"""Compiles in processes of their own, kept on disk: the same config, code, compiler and machine compile once."""

import concurrent.futures
import gzip
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import rl_jax
from rl_jax.config import ConfigError, to_toml
from rl_jax.plan.config import PlanConfig, run_of
from rl_jax.plan.topology import ENVIRONMENT, versions

REFUSED = 3
"""Exit code of the worker where the request cannot be compiled; a JSON list of faults is on its standard output."""

CACHE = Path("runs/plan/cache")

_SECTIONS = ("model", "mesh", "forward", "packing", "trainer", "optim", "loss")
"""Sections of a run that its step is made from."""

_SOURCES = (
    *("axes.py", "losses.py", "mesh.py", "optim.py", "models/*.py", "trainer/balance.py", "trainer/state.py"),
    *("trainer/step.py", "plan/program.py", "plan/topology.py", "plan/chips.py"),
)
"""Files that decide what is compiled."""


class CompileFailed(RuntimeError):
    """A compile ended without a result; the message holds the end of what it said."""


def compile_all(configs: Sequence[PlanConfig], cache: Path) -> Iterator[tuple[PlanConfig, Path | CompileFailed]]:
    """Yield for each config the folder of its compiled step (compiled.json and texts), as soon as it is there."""
    if not configs:
        return
    with concurrent.futures.ThreadPoolExecutor(configs[0].plan.jobs) as pool:
        waiting = {pool.submit(compiled, config, cache): config for config in configs}
        for future in concurrent.futures.as_completed(waiting):
            error = future.exception()
            if error is not None and not isinstance(error, CompileFailed):
                raise error
            yield waiting[future], error or future.result()


def compiled(config: PlanConfig, cache: Path) -> Path:
    """Return the folder of the compiled step of a config: from the cache, or compiled now.

    Raises:
        CompileFailed: the compiler died, took too long, or refused the program.
        ConfigError: there is no such topology.
    """
    folder = cache / key_of(config)
    if (folder / "compiled.json").is_file():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix="unfinished-") as name:
        unfinished = Path(name) / "step"
        unfinished.mkdir()
        (unfinished / "run.toml").write_text(to_toml(run_of(config)))
        (unfinished / "request.json").write_text(json.dumps(_machine(config)))
        _run_worker(unfinished, config.plan.timeout_s)
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.rename(folder)
    return folder


def _run_worker(folder: Path, timeout_s: float) -> None:
    command = [sys.executable, "-m", "rl_jax.plan.worker", str(folder)]
    try:
        done = subprocess.run(
            command, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, timeout=timeout_s
        )
    except subprocess.TimeoutExpired as error:
        raise CompileFailed(f"not compiled within plan.timeout_s={timeout_s:g}") from error
    if done.returncode == REFUSED:
        raise ConfigError(json.loads(done.stdout))
    if done.returncode:
        raise CompileFailed(f"the compiler ended with exit code {done.returncode}: {_cause(done.stderr)}")


def _cause(said: str) -> str:
    """Return the line of a compiler's last words that says why, before the stack trace; the last lines if none does."""
    lines = [line for line in said.splitlines() if line.strip()]
    causes = [line for line in lines if re.search(r"LLVM ERROR|Check failed|RET_CHECK|Error: ", line)]
    return causes[0][:500] if causes else " | ".join(lines[-3:])[-500:]


def read(folder: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Return compiled.json of a folder, and the text of each program that compiled."""
    texts = {path.name.split(".")[0]: gzip.decompress(path.read_bytes()).decode() for path in folder.glob("*.hlo.gz")}
    return json.loads((folder / "compiled.json").read_text()), texts


def _machine(config: PlanConfig) -> dict[str, Any]:
    plan = config.plan
    options = {"compiler_options": plan.compiler_options} if plan.compiler_options else {}
    return {"chip": plan.chip, "topology": plan.topology, "num_slices": plan.num_slices} | options


def key_of(config: PlanConfig) -> str:
    parts = {name: asdict(getattr(config, name)) for name in _SECTIONS}
    if not config.model.architecture:
        parts["model"] = asdict(config.model.resolve())
    parts |= {"machine": _machine(config), "versions": versions(), "source": source_digest()}
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def source_digest() -> str:
    """Return a digest of the code that decides what is compiled."""
    root = Path(rl_jax.__file__).parent
    digest = hashlib.sha256()
    for pattern in _SOURCES:
        for path in sorted(root.glob(pattern)):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
