"""What the entry modules tell a person to type next."""

import argparse
import asyncio
import io
import logging
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


@pytest.mark.parametrize(("package", "num_lines"), [("orbax", 0), ("another", 1)])
def test_tasks_that_failed_unheard_show_no_traceback(
    package: str, num_lines: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    space: dict = {}
    source = "async def write(i):\n    raise ValueError(f'no room for {i}')"
    exec(compile(source, f"/packages/{package}/write.py", "exec"), space)  # a task says where its code is

    async def write_unheard() -> None:
        task = asyncio.create_task(space["write"](0))
        task.itself = task  # type: ignore[attr-defined]  # only a collection frees it
        await asyncio.wait([task])

    def entry(args: argparse.Namespace) -> int:
        asyncio.run(write_unheard())
        return 1

    others = io.StringIO()  # where a package's own handler writes
    monkeypatch.setattr(logging.getLogger(), "handlers", [logging.StreamHandler(others)])
    assert cli.run_entry(entry, argparse.Namespace()) == 1
    said = capsys.readouterr().err
    assert "Traceback" not in said + others.getvalue()
    assert said.count("never retrieved") == num_lines
    assert not others.getvalue()
