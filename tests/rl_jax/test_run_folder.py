"""The folder of a run: never one that was used, always with a whole config, and a log while it runs."""

import json
import logging
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from rl_jax.config import ConfigError
from rl_jax.run_folder import RunFolder

ROOT = Path(__file__).parents[2]


def test_two_runs_of_one_second_get_two_folders(tmp_path: Path) -> None:
    folders = [RunFolder.create(str(tmp_path / "runs"), "a").path for _ in range(5)]
    assert len(set(folders)) == 5
    assert all(folder.is_dir() and folder.name.startswith("a-2") for folder in folders)


def test_a_parent_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    with pytest.raises(ConfigError, match=r"run\.dir='.*runs': cannot make .*runs/a-"):
        RunFolder.create(str(tmp_path / "runs"), "a")


def test_only_a_folder_with_a_config_is_a_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is no run folder, it has no config\.toml"):
        RunFolder.existing(tmp_path)
    (tmp_path / "config.toml").write_text("steps = 1")
    assert RunFolder.existing(str(tmp_path)).ledger == tmp_path / "ledger.sqlite"


def test_resume_names_a_run_or_one_of_its_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.toml").write_text("steps = 1")
    (tmp_path / "checkpoints" / "step_000002").mkdir(parents=True)
    assert RunFolder.resumed(tmp_path)[1] is None
    folder, step = RunFolder.resumed(f"{tmp_path}/checkpoints/step_000002/")
    assert (folder.path, step) == (tmp_path, 2)
    monkeypatch.chdir(tmp_path / "checkpoints")
    assert RunFolder.resumed("step_000002")[0].path == tmp_path


def test_one_run_at_a_time(tmp_path: Path) -> None:
    script = "import sys; from pathlib import Path; from rl_jax.run_folder import RunFolder\n"
    script += "with RunFolder(Path(sys.argv[1])).locked(): print('locked', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", script, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) as other:
        assert other.stdout is not None and other.stdout.readline() == b"locked\n"
        refused = pytest.raises(ConfigError, match=rf"another run uses this folder \(pid {other.pid}\)")
        with refused, RunFolder(tmp_path).locked():
            pass
        other.kill()
    with RunFolder(tmp_path).locked():  # a killed run leaves no lock
        pass


def test_log_that_cannot_be_written_is_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = RunFolder(tmp_path)
    folder.log.symlink_to("/dev/full")
    logger = logging.getLogger("rl_jax.test")
    with folder.logged():
        for i in range(5):
            logger.info("line %d", i)
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "run.log: cannot be written (No space left on device), the log ends here" in told


def test_each_attempt_keeps_its_config_and_its_surroundings(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for attempt in (1, 2, 3):
        folder.record(f"steps = {attempt}\n", ["python", "-m", "rl_jax.train", f"--attempt={attempt}"])
    assert folder.config.read_text() == "steps = 3\n"
    assert [(tmp_path / f"config-{n}.toml").read_text() for n in (1, 2)] == ["steps = 1\n", "steps = 2\n"]
    records = [json.loads((tmp_path / f"environment-{n}.json").read_text()) for n in (1, 2, 3)]
    assert [record["attempt"] for record in records] == [1, 2, 3]
    assert [record["command"][-1] for record in records] == ["--attempt=1", "--attempt=2", "--attempt=3"]
    assert records[0]["versions"]["jax"] == jax.__version__
    assert records[0]["devices"] == [str(device) for device in jax.devices()]


def test_log_records_of_the_project_go_to_the_log_meanwhile(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    before = logging.getLogger("rl_jax").handlers[:]
    with pytest.raises(ZeroDivisionError), folder.logged():
        logging.getLogger("rl_jax.room").info("inside")
        logging.getLogger("elsewhere").error("not ours")
        raise ZeroDivisionError
    logging.getLogger("rl_jax.room").info("after")
    (line,) = folder.log.read_text().splitlines()
    assert line.endswith("INFO rl_jax.room: inside")
    assert logging.getLogger("rl_jax").handlers == before
