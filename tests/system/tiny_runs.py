"""Starts the entries on the tiny config, each in a process of its own, and reads what they left."""

import json
import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import jax
import numpy as np
import psutil

from rl_jax.checkpoint import CheckpointConfig, Checkpointer
from rl_jax.cli import RunConfig
from rl_jax.config import load
from rl_jax.mesh import MeshConfig, make_mesh
from rl_jax.optim import make_optimizer
from rl_jax.trainer.state import abstract_state, weight_roles

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "tests" / "system" / "tiny.toml"
MODEL = ROOT / "tests" / "system" / "tiny_model.toml"
PATIENCE_S = 300.0
"""A run takes some 10 s if its programs are in the cache of the tests, a minute if not."""


def options(configs: Sequence[Path], settings: Sequence[str]) -> list[str]:
    """Return the options of an entry for these config files and `--set` values."""
    return [
        *(word for config in configs for word in ("--config", str(config))),
        *(word for setting in settings for word in ("--set", setting)),
    ]


def tiny(parent: Path, *settings: str) -> list[str]:
    """Return the options of the tiny config, made from scratch, with its run folder in `parent`."""
    return options([TINY, MODEL], [f"run.dir={parent}", *settings])


@contextmanager
def started(entry: str, *args: str | Path, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """Start an entry in a process group of its own, as a shell does; its output comes through pipes.

    Whatever happens inside the block, the process is gone after it.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", f"rl_jax.{entry}", *map(str, args)],
        cwd=ROOT,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def finish(process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    """Wait for the end and print the output: whoever fails a test sees it."""
    try:
        out, err = process.communicate(timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise AssertionError(f"{process.args} took more than {PATIENCE_S} s:\n{out}\n{err}") from None
    print(process.args, f"exit code {process.returncode}", out, err, sep="\n")
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def run(entry: str, *args: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run an entry to its end."""
    with started(entry, *args, **environment) as process:
        return finish(process)


def folder_in(parent: Path) -> Path:
    """Return the only run folder in `parent`."""
    (folder,) = parent.iterdir()
    return folder


def steps_of(parent: Path) -> list[int]:
    """Return the steps of the whole lines of metrics.jsonl in the run folder in `parent`; none before there is one."""
    return [json.loads(line)["step"] for file in parent.glob("*/metrics.jsonl") for line in whole_lines(file)]


def whole_lines(file: Path) -> list[str]:
    return file.read_text().split("\n")[:-1]


def state_of(folder: Path) -> dict[str, np.ndarray]:
    """Return every array of the newest checkpoint by name: weights, optimizer state, step."""
    config = load(RunConfig, [folder / "config.toml"])
    arch = config.model.resolve()
    optimizer = make_optimizer(config.optim, weight_roles(arch))
    with Checkpointer(folder, CheckpointConfig(), arch) as checkpoints:
        state = checkpoints.restore(abstract_state(arch, optimizer, make_mesh(MeshConfig()))).state
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree.leaves_with_path(state)}


def rows_of(folder: Path, query: str) -> list[tuple]:
    """Return the rows of a query to the run's ledger."""
    connection = sqlite3.connect(folder / "ledger.sqlite")
    try:
        return connection.execute(query).fetchall()
    finally:
        connection.close()


def trained_of(folder: Path) -> list[tuple]:
    """Return what was trained: step, group, member, environment, task, reward; in order."""
    columns = "step, group_id, member, env, task_id, reward"
    return rows_of(folder, f"SELECT {columns} FROM rollouts WHERE status = 'trained' ORDER BY 1, 2, 3")


def dropped_of(folder: Path) -> dict[str, int]:
    """Return the number of dropped rollouts by reason."""
    return dict(rows_of(folder, "SELECT reason, count(*) FROM rollouts WHERE status = 'dropped' GROUP BY 1"))


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Wait for what a running process is expected to bring about."""
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        if process.poll() is not None or time.monotonic() > end_s:
            process.kill()
            raise AssertionError(f"it never came: {finish(process)}")
        time.sleep(0.02)


def workers_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """Return the environment workers that a run has started."""
    return psutil.Process(process.pid).children(recursive=True)


def are_gone(workers: Sequence[psutil.Process]) -> bool:
    """Whether all have ended within a moment: they see that the run is gone when their socket closes."""
    _, alive = psutil.wait_procs(workers, timeout=5)
    return not alive
