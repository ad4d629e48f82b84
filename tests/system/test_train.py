"""A run from its start to its end: repeated bit by bit, killed, interrupted, resumed; and it learns."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from tiny_runs import (
    are_gone,
    dropped_of,
    finish,
    folder_in,
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

ASYNC = ("orchestrator.max_staleness=1", "checkpoint.interval_steps=1")


def assert_accounted(folder: Path, steps: int) -> None:
    """The account balances, each step was trained on one whole batch, nothing twice, and its metrics are there once."""
    account = run("account", folder, "--json")
    assert account.returncode == 0
    told = json.loads(account.stdout)
    assert told["balances"] and not told["in_flight"]
    trained = trained_of(folder)
    members = [(group_id, member) for _, group_id, member, *_ in trained]
    assert len(set(members)) == len(members)
    assert [step for step, *_ in trained] == [step for step in range(1, steps + 1) for _ in range(8)]
    assert steps_of(folder.parent) == list(range(steps + 1))


# ---- synchronous: bit by bit


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a synchronous run of four steps that nothing disturbs."""
    parent = tmp_path_factory.mktemp("whole")
    assert run("train", *tiny(parent)).returncode == 0
    return folder_in(parent)


def assert_same(folder: Path, other: Path) -> None:
    """Weights, optimizer state and trained rollouts are the same to the last bit."""
    assert trained_of(folder) == trained_of(other)
    found, expected = state_of(folder), state_of(other)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert array.dtype == found[name].dtype
        np.testing.assert_array_equal(found[name], array, err_msg=name)


def test_run_leaves_what_it_promises(whole: Path) -> None:
    assert_accounted(whole, steps=4)
    names = {path.name for path in whole.iterdir()}
    expected = {"config.toml", "environment-1.json", "metrics.jsonl", "ledger.sqlite", "curves.png", "run.log"}
    assert expected <= names
    command = json.loads((whole / "environment-1.json").read_text())["command"]
    assert command[1:4] == ["-m", "rl_jax.train", "--config"]
    assert [path.name for path in sorted((whole / "rollouts").iterdir())] == [
        f"step_{step:06d}.txt" for step in range(1, 5)
    ]


def test_same_seed_twice_is_the_same_run(whole: Path, tmp_path: Path) -> None:
    assert run("train", *tiny(tmp_path)).returncode == 0
    assert_same(folder_in(tmp_path), whole)


def test_killed_and_resumed_is_the_same_as_uninterrupted(whole: Path, tmp_path: Path) -> None:
    # Judgements: 3 held-out tasks, two steps of 8, 3 held-out tasks; the 25th is in the middle of the third step.
    is_saved = f"{tmp_path}/*/checkpoints/step_000002"
    patient = tiny(tmp_path, "pool.deadline_s=100")  # the judge that waits for the checkpoint is the one that kills
    assert run("train", *patient, KILL_AT="25", KILL_AFTER=is_saved).returncode == -signal.SIGKILL
    folder = folder_in(tmp_path)
    assert not list(folder.glob("checkpoints/step_000004"))
    resumed = run("train", "--resume", folder)
    assert resumed.returncode == 0
    assert "resumed after step 2" in resumed.stdout
    assert_same(folder, whole)
    assert_accounted(folder, steps=4)
    assert dropped_of(folder) == {"rewound": 8}
    # The summary still compares the end with the beginning, which another process has seen.
    first, last = (json.loads((whole / "metrics.jsonl").read_text().splitlines()[i]) for i in (0, -1))
    values = f"{first['eval/heldout/avg@1']:.3f} (step 0) -> {last['eval/heldout/avg@1']:.3f} (step 4)"
    assert values in resumed.stdout


def test_a_damaged_checkpoint_is_named_and_is_no_dead_end(whole: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / "a run"))
    file = max((folder / "checkpoints/step_000004/params/d").iterdir(), key=lambda path: path.stat().st_size)
    file.write_bytes(file.read_bytes()[:-3] + b"odd")
    ended = run("train", "--resume", folder)
    assert ended.returncode == 2
    assert f"{file}: damaged or gone since it was written" in ended.stderr
    assert "Traceback" not in ended.stdout + ended.stderr
    older = shlex.split(ended.stderr.rpartition("--resume ")[2])[0]
    again = run("train", "--resume", older)
    assert again.returncode == 0
    assert "resumed after step 2" in again.stdout
    assert_same(folder, whole)
    assert_accounted(folder, steps=4)


def test_resume_with_another_optimizer_is_refused_and_changes_nothing(whole: Path) -> None:
    before = (whole / "config.toml").read_text()
    ended = run("train", "--resume", whole, "--set", "optim.type=muon")
    assert ended.returncode == 2
    assert "is of another optimizer or model than this config's" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert (whole / "config.toml").read_text() == before
    again = run("train", "--resume", whole)
    assert again.returncode == 0
    assert "finished 4 of 4 steps" in again.stdout
    assert_accounted(whole, steps=4)


# ---- asynchronous: nothing twice, nothing lost


def test_killed_at_any_moment_it_trains_nothing_twice_and_loses_nothing(tmp_path: Path) -> None:
    """Killed before its first checkpoint, in the middle of groups, and from outside; then finished."""
    assert run("train", *tiny(tmp_path, "run.steps=8", *ASYNC), KILL_AT="2").returncode == -signal.SIGKILL
    folder = folder_in(tmp_path)
    again = run("train", "--resume", folder, KILL_AT="30")
    assert again.returncode == -signal.SIGKILL
    before = len(steps_of(tmp_path))
    with started("train", "--resume", folder) as process:
        wait_until(lambda: len(steps_of(tmp_path)) > before + 1, process)
        workers = workers_of(process)
        process.kill()
    assert are_gone(workers)
    assert run("train", "--resume", folder).returncode == 0
    assert_accounted(folder, steps=8)
    ((groups,),) = rows_of(folder, "SELECT count(DISTINCT group_id) FROM rollouts")
    ((ended,),) = rows_of(
        folder,
        "SELECT count(DISTINCT group_id) FROM rollouts WHERE status = 'trained' OR reason IN ('run_ended', 'stale')",
    )
    assert ended == groups  # a group that a kill cost was played again, not forgotten


# ---- Ctrl-C


def press_ctrl_c(process: subprocess.Popen[str]) -> None:
    """Do what a terminal does: interrupt the whole process group."""
    os.killpg(process.pid, signal.SIGINT)


def test_ctrl_c_once_finishes_the_step_and_saves_it(tmp_path: Path) -> None:
    settings = ("run.steps=100000", "checkpoint.interval_steps=100000", *ASYNC[:1])
    with started("train", *tiny(tmp_path, *settings)) as process:
        wait_until(lambda: len(steps_of(tmp_path)) > 2, process)
        workers = workers_of(process)
        assert workers
        press_ctrl_c(process)
        ended = finish(process)
    assert ended.returncode == 0
    assert are_gone(workers)
    folder, last_step = folder_in(tmp_path), steps_of(tmp_path)[-1]
    assert f"stopped after step {last_step}, checkpoint written" in ended.stdout
    assert "Traceback" not in ended.stdout + ended.stderr
    resumed = run("train", "--resume", folder, "--set", f"run.steps={last_step + 2}")
    assert resumed.returncode == 0
    assert f"resumed after step {last_step}" in resumed.stdout
    assert_accounted(folder, steps=last_step + 2)


def test_ctrl_c_twice_stops_now_and_can_be_resumed(tmp_path: Path) -> None:
    # From the 4th judgement on, the first one of the first step, each takes 3 s: the step could not be finished soon.
    with started("train", *tiny(tmp_path, "run.steps=5", *ASYNC), SLOW_FROM="4") as process:
        wait_until(lambda: bool(list(tmp_path.glob("*/checkpoints/step_000000"))), process)
        time.sleep(0.5)  # by now it waits for the batch of the first step
        workers = workers_of(process)
        press_ctrl_c(process)
        wait_until(lambda: "stopping:" in (process.stdout.readline() if process.stdout else ""), process)
        press_ctrl_c(process)
        pressed_s = time.monotonic()
        ended = finish(process)
    assert ended.returncode == 130
    assert time.monotonic() - pressed_s < 30  # the run would take minutes
    assert are_gone(workers)
    assert "stopped at once; continue with" in ended.stdout
    assert "Traceback" not in ended.stdout + ended.stderr
    folder = folder_in(tmp_path)
    assert run("train", "--resume", folder).returncode == 0
    assert_accounted(folder, steps=5)


# ---- learning


def test_tiny_policy_learns_to_write_letters(tmp_path: Path) -> None:
    learning = (
        'envs=[{id = "tests/system/tiny_envs.py:letters"}]',
        "evaluate.envs=[]",
        "run.steps=40",
        "orchestrator.batch_size=32",
        "optim.lr=1e-2",
        *ASYNC[:1],
    )
    assert run("train", *tiny(tmp_path, *learning)).returncode == 0
    lines = [json.loads(line) for line in (folder_in(tmp_path) / "metrics.jsonl").read_text().splitlines()]
    rewards = [line["train/agg/effective/reward/mean"] for line in lines[1:]]
    assert np.mean(rewards[:5]) < 0.3  # 52 of 264 tokens are letters
    assert np.mean(rewards[-5:]) > 0.8
