"""A measured program as a process of its own that answers line by line, so that rivals take turns on the same cores.

Standard library only: it runs in the trainer environment and in the fleet's.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

ROOT = Path(__file__).parent.parent
Values = dict[str, object]


class Worker:
    """A process that runs `serve`. A context: leaving it ends the process.

    Args:
        log: file that gets what the program prints.
        env: environment variables on top of ours.
    """

    def __init__(self, python: Path, script: Path, log: Path, env: Mapping[str, str] | None = None):
        if not python.exists():
            raise SystemExit(f"{python}: no such interpreter; make it with: make fleet")
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **(env or {})}
        self._log = log
        self._process = subprocess.Popen(
            [python, script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("w"),
            text=True,
            env=environment,
            cwd=ROOT,
        )

    def __enter__(self) -> "Worker":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def ask(self, command: str, **arguments: object) -> Values:
        """Send a command, wait for its answer."""
        assert self._process.stdin and self._process.stdout
        print(json.dumps([command, arguments]), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            tail = "\n".join(self._log.read_text().splitlines()[-30:])
            raise SystemExit(
                f"{command} ended its process (exit code {self._process.wait()}). It printed last:\n{tail}"
            )
        return json.loads(line)


def serve(commands: Mapping[str, Callable[..., Values]]) -> None:
    """Answer commands until standard input ends; whatever libraries print goes to standard error."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    for line in sys.stdin:
        command, arguments = json.loads(line)
        print(json.dumps(commands[command](**arguments)), file=answers, flush=True)
