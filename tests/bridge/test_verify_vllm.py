"""bridge/verify_vllm.py: which programs can be asked, what their answers become, and that nothing outlives a check."""

import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
from conversions import full_disk
from exports import EXPERT, edit, with_value, without
from references import load_safetensors

from bridge import verify, verify_vllm
from bridge.safetensors_reader import TensorFiles
from bridge.verify_files import open_folder

ROOT = Path(__file__).resolve().parents[2]
FLEET_PYTHON = ROOT / ".venv-fleet/bin/python"
INSTEAD = "`make fleet` builds .venv-fleet/bin/python, --no-vllm leaves these steps out"


def program(path: Path, text: str, mode: int = 0o755) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def answers(path: Path, **given: object) -> Path:
    """Make a program that answers as the fleet's Python would, and keeps its arguments beside it."""
    full = {"load_fault": "", "max_difference": 0.0, "worst_prompt": 0, "worst_token": 0} | given
    return program(path, f'#!/bin/sh\necho "$@" >"$0.asked"\necho \'{json.dumps(full)}\' >"$6"\n')


def run_verify(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str]:
    """Return exit code and all that is printed, as one line."""
    code = verify.main([str(arg) for arg in args])
    printed = capsys.readouterr()
    return code, " ".join((printed.out + printed.err).split())


def until(is_true: Callable[[], object], limit_s: float = 60.0) -> None:
    end = time.monotonic() + limit_s
    while not is_true():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("answer", "code", "words"),
    [
        ({"load_fault": "ValueError: w2_weight: 4 of 9 elements"}, 1, "strict load: .* w2_weight: 4 of 9 elements"),
        (
            {"max_difference": 0.25, "worst_prompt": 2, "worst_token": 31},
            1,
            "parity: .* 2.50e-01 at token 31 of prompt 2",
        ),
        ({"max_difference": 1.9e-5}, 0, r"vLLM: no fault\(s\)"),
    ],
)
def test_what_the_fleet_answers_becomes_findings(copy: Path, capsys, answer: dict, code: int, words: str):
    """The fleet's Python is a program that answers as told."""
    found, text = run_verify(capsys, copy, "--fleet-python", answers(copy.parent / "python", **answer))
    assert found == code
    assert re.search(words, text), text
    assert " --answer " in (copy.parent / "python.asked").read_text()
    assert sorted(path.name for path in copy.parent.iterdir()) == ["model", "python", "python.asked"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("#!/bin/sh\necho no such module; exit 3", r"\(exit code 3\)\D.*; its last lines: no such module"),
        ("#!/bin/sh\nexit 0", r"\(exit code 0\)\D.*; it printed nothing"),
        ("#!/bin/sh\nkill -9 $$", r"\(ended by SIGKILL\)\D.*; it printed nothing"),
        ("no program", r"\(exit code 1\)\D.*; its last lines: .*Exec format error"),
        (f"#!{sys.executable} -I\n", r"\(exit code \d\)\D.*; it printed nothing"),
    ],
)
def test_a_program_that_does_not_answer_is_named_with_its_last_lines(copy: Path, capsys, text: str, words: str):
    python = program(copy.parent / "python", text)
    code, printed = run_verify(capsys, copy, "--fleet-python", python)
    assert code == 2
    assert f"--fleet-python {python}: vLLM did not run (" in printed
    assert INSTEAD in printed
    assert re.search(words, printed), printed
    assert sorted(path.name for path in copy.parent.iterdir()) == ["model", "python"]


def test_a_program_that_never_answers_is_given_up(copy: Path, capsys, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(verify_vllm, "TIMEOUT_S", 0.5)
    python = program(copy.parent / "python", "#!/bin/sh\necho loading\nexec sleep 600\n")
    code, printed = run_verify(capsys, copy, "--fleet-python", python)
    assert code == 2
    assert "vLLM did not run (no answer within 0 s)" in printed
    assert printed.endswith("its last lines: loading")


def make_nothing(path: Path) -> None:
    pass


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (make_nothing, "no such file"),
        (lambda path: path.symlink_to("/nowhere/python3"), "a link to /nowhere/python3, which is not there"),
        (lambda path: path.mkdir(), "is a directory; name the program"),
        (lambda path: program(path, "", 0o644), "is no program that you may execute"),
    ],
)
def test_what_is_no_program_is_refused_before_any_check(copy: Path, capsys, make, words: str):
    python = copy.parent / "python"
    make(python)
    code, printed = run_verify(capsys, copy, "--fleet-python", python)
    assert code == 2
    assert f"--fleet-python {python}: {words}" in printed
    assert printed.endswith(INSTEAD)
    assert "headers" not in printed


def test_a_place_that_cannot_hold_the_twin_is_named(copy: Path, capsys, monkeypatch: pytest.MonkeyPatch):
    python = program(copy.parent / "python", "#!/bin/sh\n")
    instead = "name a directory with room by --scratch, or leave these steps out by --no-vllm"
    for place in (copy / "config.json", copy.parent / "absent"):
        code, printed = run_verify(capsys, copy, "--fleet-python", python, "--scratch", place)
        assert code == 2
        assert re.search(rf"--scratch {place}: cannot be written \(.*\); {instead}", printed), printed
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1234))
    code, printed = run_verify(capsys, copy, "--fleet-python", python)
    assert code == 2
    assert re.search(rf"--scratch {copy.parent}: [\d.]+ MB are needed for the twin and 1.23 kB are free", printed)
    assert sorted(path.name for path in copy.parent.iterdir()) == ["model", "python"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without(EXPERT + "up_proj.weight_scale_inv"), "up_proj.weight is FP8 without a scale"),
        (with_value(EXPERT + "up_proj.weight_scale_inv", lambda scale: scale[:, :0]), r"scale has shape \(1, 0\)"),
    ],
)
def test_what_has_no_twin_is_loaded_and_not_compared(copy: Path, capsys, change, words: str):
    edit(copy, change)
    python = answers(copy.parent / "python", load_fault="ValueError: some scale")
    code, printed = run_verify(capsys, copy, "--fleet-python", python)
    assert code == 1
    assert re.search(f"parity: prompt log-probabilities expected those of the twin got no twin: .*{words}", printed)
    assert "strict load: " in printed
    assert "--twin" not in (copy.parent / "python.asked").read_text()


def test_the_twin_has_the_values_in_pieces_of_bounded_size(copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(verify_vllm, "_PIECE_BYTES", 1000)
    folder = open_folder(copy)
    largest = max(folder.tensors.values(), key=lambda stored: stored.nbytes * (4 if stored.dtype == "F8_E4M3" else 1))
    tracemalloc.start()
    verify_vllm.write_twin(folder, tmp_path / "twin")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # Codes, scales as wide as they, the product, and headers: of one tensor, not of a file.
    assert peak < 14 * largest.nbytes + 300_000 < sum(path.stat().st_size for path in (tmp_path / "twin").iterdir())
    files = TensorFiles(copy)
    made = {n: a for f in (tmp_path / "twin").glob("*.safetensors") for n, a in load_safetensors(f).items()}
    assert made.keys() == set(files.weights())
    for name, array in made.items():
        expected = files.read(name)
        assert array.dtype == expected.dtype, name
        np.testing.assert_array_equal(array, expected)


def test_a_disk_that_fills_up_under_the_twin_is_the_scratch_option(copy: Path, capsys):
    python = program(copy.parent / "python", "#!/bin/sh\n")
    with full_disk(50_000):
        code, printed = run_verify(capsys, copy, "--fleet-python", python)
    assert code == 2
    assert f"--scratch {copy.parent}: the twin cannot be written (File too large); name a directory with" in printed
    assert sorted(path.name for path in copy.parent.iterdir()) == ["model", "python"]


def start(copy: Path) -> tuple[subprocess.Popen[str], list[psutil.Process]]:
    """Start a check whose vLLM loads for ever, and does not end when it is asked to; return it and what it started."""
    started = copy.parent / "started"
    python = program(copy.parent / "python", f"#!/bin/sh\ntrap '' TERM\nsleep 600 &\ntouch {started}\nsleep 600\n")
    command = [sys.executable, "-m", "bridge.verify", str(copy), "--fleet-python", str(python)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    until(started.exists)
    return process, psutil.Process(process.pid).children(recursive=True)


def running(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Return those that run; one that is over may wait for its new parent to look at it."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            found += [process] if process.status() != psutil.STATUS_ZOMBIE else []
    return found


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_check_leaves_neither_folder_nor_process(copy: Path, number: signal.Signals):
    process, children = start(copy)
    try:
        assert len(children) >= 3, "the leash, vLLM and what it started"
        process.send_signal(number)
        assert process.communicate(timeout=60)[0].splitlines()[-1] == "stopped"
    finally:
        process.kill()
    assert process.returncode == 130
    assert not running(children)
    assert sorted(path.name for path in copy.parent.iterdir()) == ["model", "python", "started"]


def test_a_killed_check_leaves_no_process_and_its_folder_to_the_next(copy: Path, capsys):
    process, children = start(copy)
    process.kill()
    process.communicate()
    until(lambda: not running(children))
    (left,) = copy.parent.glob(".verify-*")
    (copy.parent / ".verify-held").mkdir()
    with (copy.parent / ".verify-held/lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another check is at work
        run_verify(capsys, copy, "--fleet-python", program(copy.parent / "python", "#!/bin/sh\n"))
    assert not left.exists()
    assert [path.name for path in copy.parent.glob(".verify-*")] == [".verify-held"]


@pytest.mark.skipif(not FLEET_PYTHON.is_file(), reason="needs the fleet environment: make fleet")
def test_vllm_loads_every_element_and_computes_what_the_twin_does(copy: Path, run_folder: Path, capsys):
    code, printed = run_verify(capsys, copy, "--against", run_folder, "--fleet-python", FLEET_PYTHON)
    assert code == 0, printed
    assert "vLLM: no fault(s)" in printed
    assert [path.name for path in copy.parent.iterdir()] == ["model"], "the twin is gone"


@pytest.mark.skipif(not FLEET_PYTHON.is_file(), reason="needs the fleet environment: make fleet")
def test_a_python_without_vllm_is_told_by_what_it_says(copy: Path, capsys):
    code, printed = run_verify(capsys, copy, "--fleet-python", os.path.realpath(sys.executable))
    assert code == 2
    assert "No module named" in printed
