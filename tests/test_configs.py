"""Every TOML file in configs/ loads, and says at its top what it is for a person who has not run it."""

import re
from pathlib import Path

import pytest

from rl_jax.cli import RunConfig
from rl_jax.config import load
from rl_jax.plan.config import PlanConfig
from rl_jax.plan.sampler import TABLES, SamplerPlanFile

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = sorted((ROOT / "configs").glob("**/*.toml"))
SAYS = ("Command", "Devices", "Duration", "Expected")


def header_of(text: str) -> dict[str, str]:
    """Return what the comment lines before the first key define: `# Command: make demo` defines Command."""
    lines = text.splitlines()
    end = next((i for i, line in enumerate(lines) if not line.startswith("#")), len(lines))
    return dict(re.findall(r"^# (\w+): +(\S.*)$", "\n".join(lines[:end]), re.MULTILINE))


def test_header_ends_at_the_first_key():
    text = "# Command: make demo  # quick\n# Devices:\n#\n# Duration: 1 s\nsteps = 1\n# Expected: late\n"
    assert header_of(text) == {"Command": "make demo  # quick", "Duration": "1 s"}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_config_says_command_devices_duration_and_expected_result(path: Path):
    missing = set(SAYS) - header_of(path.read_text()).keys()
    assert not missing, f"{path.name} must begin with lines `# Command: ...` and so on; missing: {missing}"


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_command_of_a_config_names_it_and_its_files_load(path: Path):
    command = header_of(path.read_text())["Command"]
    files = re.findall(r"--config (\S+\.toml)", command)
    assert path.relative_to(ROOT).as_posix() in files
    if "rl_jax.plan.sampler" in command:
        load(SamplerPlanFile, [ROOT / file for file in files], only=TABLES)
    else:
        load(PlanConfig if "rl_jax.plan" in command else RunConfig, [ROOT / file for file in files])
