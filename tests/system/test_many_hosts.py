"""Several processes that train together, on this machine: the run of one, what the loss of one does, and Ctrl-C.

Devices of one mesh of 4, held by one process, by two, or by four: the numbers are the same to the last bit, since XLA
adds up what is sharded in the order of the mesh, wherever the devices are.
"""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
from tiny_runs import (
    MODEL,
    ROOT,
    TINY,
    are_gone,
    finish,
    folder_in,
    options,
    rows_of,
    run,
    started,
    state_of,
    steps_of,
    tiny,
    trained_of,
    wait_until,
    workers_of,
)

SFT = ROOT / "tests" / "system" / "tiny_sft.toml"
MESH = ("mesh.fsdp=2", "mesh.expert=2")
NUM_DEVICES = 4
EXIT_LOST = 3
GRACE_S = 2.0
"""What docs/hosts.md promises on top of hosts.timeout_s."""
SLOW_S = 20.0
"""What a loaded machine may add to a time that is measured from outside."""
ENDLESS = ("run.steps=100000", "orchestrator.max_staleness=1", "evaluate.envs=[]", "checkpoint.interval_steps=2")
Processes = list[subprocess.Popen[str]]


@contextmanager
def processes(
    entry: str, count: int, *args: str | Path, own: Sequence[Sequence[str]] = (), **environment: str
) -> Iterator[Processes]:
    """Start an entry on `count` processes, with the same command and what a launcher puts into the environment of each.

    Args:
        own: options that each process has on top of the others', to make them differ.
    """
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    told = environment | {
        "JAX_NUM_CPU_DEVICES": str(NUM_DEVICES // count),
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_NUM_PROCESSES": str(count),
    }
    with ExitStack() as stack:
        extra = own or [()] * count
        yield [
            stack.enter_context(started(entry, *args, *extra[i], **told, JAX_PROCESS_ID=str(i))) for i in range(count)
        ]


def launched(*settings: str) -> list[str]:
    return [word for setting in ("hosts.launcher=jax", *settings) for word in ("--set", setting)]


def finish_all(group: Processes) -> list[subprocess.CompletedProcess[str]]:
    ended = [finish(process) for process in group]
    assert not any("Traceback" in one.stdout + one.stderr for one in ended)
    return ended


def values_of(folder: Path) -> list[dict[str, float]]:
    """Return the metrics of a run that say what was computed, not how fast."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    timed = ("time/", "perf/", "inference/", "unix_time_s")
    return [{name: value for name, value in line.items() if not name.startswith(timed)} for line in lines]


def assert_same(folder: Path, other: Path) -> None:
    """Weights, optimizer state, metrics and trained rollouts are the same to the last bit."""
    assert trained_of(folder) == trained_of(other)
    assert values_of(folder) == values_of(other)
    found, expected = state_of(folder), state_of(other)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


def assert_accounted(folder: Path) -> None:
    told = json.loads(run("account", folder, "--json").stdout)
    assert told["balances"] and not told["in_flight"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run of four steps by one process with all devices."""
    parent = tmp_path_factory.mktemp("alone")
    assert run("train", *tiny(parent, *MESH), JAX_NUM_CPU_DEVICES=str(NUM_DEVICES)).returncode == 0
    return folder_in(parent)


def test_killed_processes_end_the_run_and_two_go_on_as_one_would(alone: Path, tmp_path: Path) -> None:
    """Four processes lose one; the run goes on with two, from the last checkpoint, and is that of one process."""
    # Judgements: 3 held-out tasks, two steps of 8, 3 held-out tasks; the third step does not come to an end.
    slow = ("pool.deadline_s=100", "hosts.timeout_s=30")
    with processes("train", 4, *tiny(tmp_path, *MESH, *slow), *launched(), SLOW_FROM="23") as group:
        wait_until(lambda: bool(list(tmp_path.glob("*/checkpoints/step_000002/checksums.json"))), group[0])
        workers = workers_of(group[0])
        group[2].kill()
        killed_s = time.monotonic()
        codes = [group[i].wait(GRACE_S + SLOW_S) for i in (0, 1, 3)]
        assert time.monotonic() - killed_s < GRACE_S + SLOW_S
        assert codes == [EXIT_LOST] * 3
        ended = finish_all(group)
    folder = folder_in(tmp_path)
    for i in (0, 1, 3):
        assert re.search(r"process 2 \(host .*, pid \d+\) is lost: its connection was closed", ended[i].stderr)
        assert shlex.join(["python", "-m", "rl_jax.train", "--resume", str(folder)]) in ended[i].stderr
    assert are_gone(workers)
    with processes("train", 2, "--resume", folder) as group:
        first, second = finish_all(group)
    assert (first.returncode, second.returncode) == (0, 0)
    assert "resumed after step 2" in first.stdout
    assert "process 1 has ended with the run" in second.stdout
    assert_same(folder, alone)
    assert_accounted(folder)


def test_ctrl_c_on_any_host_ends_all_after_a_checkpoint(tmp_path: Path) -> None:
    with processes("train", 2, *tiny(tmp_path, *MESH, *ENDLESS), *launched()) as group:
        wait_until(lambda: len(steps_of(tmp_path)) > 2, group[0])
        os.killpg(group[1].pid, signal.SIGINT)
        first, second = finish_all(group)
    assert (first.returncode, second.returncode) == (0, 0)
    assert "stopping, as process 1 (host" in first.stdout
    folder, last_step = folder_in(tmp_path), steps_of(tmp_path)[-1]
    assert f"stopped after step {last_step}, checkpoint written" in first.stdout
    assert (folder / "checkpoints" / f"step_{last_step:06d}").is_dir()
    assert_accounted(folder)
    trained = rows_of(folder, "SELECT count(*), max(step) FROM rollouts WHERE status = 'trained'")
    assert trained == [(8 * last_step, last_step)]


# ---- supervised runs, which start sooner


def sft(parent: Path, *settings: str) -> list[str]:
    return options([TINY, MODEL, SFT], [f"run.dir={parent}", *MESH, "hosts.launcher=jax", *settings])


def test_supervised_run_of_two_is_that_of_one(tmp_path: Path) -> None:
    single, double = tmp_path / "single", tmp_path / "double"
    assert run("sft", *sft(single), JAX_NUM_CPU_DEVICES=str(NUM_DEVICES)).returncode == 0
    with processes("sft", 2, *sft(double)) as group:
        assert [one.returncode for one in finish_all(group)] == [0, 0]
    one, two = folder_in(single), folder_in(double)
    assert values_of(two) == values_of(one)
    assert (two / "hf/model.safetensors").read_bytes() == (one / "hf/model.safetensors").read_bytes()


@pytest.mark.parametrize("lost", [0, 1])
def test_a_process_that_hangs_is_lost_after_the_time(tmp_path: Path, lost: int) -> None:
    timeout_s = 8.0  # no process of a busy machine is silent for so long
    endless = ("sft.steps=1000000", f"hosts.timeout_s={timeout_s}")
    with processes("sft", 2, *sft(tmp_path, *endless)) as group:
        wait_until(lambda: len(steps_of(tmp_path)) > 2, group[0])
        os.kill(group[lost].pid, signal.SIGSTOP)
        stopped_s = time.monotonic()
        other = group[1 - lost]
        assert other.wait(timeout_s + GRACE_S + SLOW_S) == EXIT_LOST
        assert time.monotonic() - stopped_s > timeout_s / 2
        os.kill(group[lost].pid, signal.SIGCONT)  # it hears that it was given up
        assert group[lost].wait(GRACE_S + SLOW_S) == EXIT_LOST
        ended = finish_all(group)
    for i, one in enumerate(ended):
        told = f"process {i} \\(host .*\\) ends: process {lost} \\(host .*\\) is lost: it has been silent for hosts.timeout_s={timeout_s:g}"
        assert re.search(told, one.stderr)
    assert "rl_jax.sft --resume" in ended[1 - lost].stderr


def test_the_death_of_process_0_is_told_by_the_other(tmp_path: Path) -> None:
    """In the middle of a step: a collective fails at once, and JAX's own coordinator is gone with process 0."""
    with processes("sft", 2, *sft(tmp_path, "sft.steps=1000000")) as group:
        wait_until(lambda: len(steps_of(tmp_path)) > 2, group[0])
        group[0].kill()
        assert group[1].wait(GRACE_S + SLOW_S) == EXIT_LOST
        ended = finish_all(group)
    assert "is lost: its connection was closed" in ended[1].stderr
    assert "rl_jax.sft --resume" in ended[1].stderr


def test_who_does_not_fit_ends_all_with_the_reason(tmp_path: Path) -> None:
    """A number of devices that is not the mesh's; a host whose config differs."""
    own = [["--set", "mesh.fsdp=1"], ["--set", "mesh.fsdp=1"]]
    with processes("sft", 2, *sft(tmp_path), own=own) as group:
        ended = finish_all(group)
    assert [one.returncode for one in ended] == [2, 2]
    for one in ended:
        assert "needs 2 devices, but the 2 processes together have 4 (process 0: 2, process 1: 2)" in one.stderr
    with processes("sft", 2, *sft(tmp_path), own=[[], ["--set", "run.seed=6"]]) as group:
        ended = finish_all(group)
    assert [one.returncode for one in ended] == [2, 2]
    for one in ended:
        assert "run.seed=6, process 0 has 5" in one.stderr
    assert not list(tmp_path.iterdir())
