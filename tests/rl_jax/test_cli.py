"""What the entry modules tell a person to type next."""

import subprocess
from pathlib import Path

import pytest

from rl_jax import cli


@pytest.mark.parametrize("name", ["plain", "two words", "it's", 'a"b', "$HOME", "a;b", "*", "-x"])
def test_a_shown_command_reaches_the_program_as_it_was_meant(tmp_path: Path, name: str) -> None:
    program = tmp_path / "python"
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    program.chmod(0o755)
    command = cli.shown("rl_jax.train", "--resume", Path("runs") / name)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": "/elsewhere"}
    told = subprocess.run(["sh", "-c", command], cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    assert told.stdout.splitlines() == ["-m", "rl_jax.train", "--resume", f"runs/{name}"]
