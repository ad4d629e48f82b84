"""The folder of a run: resolved config, environment record, logs, checkpoints, metrics, rollouts, plots."""

import contextlib
import fcntl
import importlib.metadata
import json
import logging
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax

from rl_jax.config import ConfigError

RECORDED = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "tensorstore", "numpy", "tokenizers", "safetensors")


class RunFolder:
    """Paths inside one run's folder. Example: runs/reverse_text-20260830-141503/config.toml."""

    def __init__(self, path: Path):
        self.path = path
        self.config = path / "config.toml"
        self.checkpoints = path / "checkpoints"
        self.ledger = path / "ledger.sqlite"
        self.tokenizer = path / "tokenizer"
        self.plot = path / "curves.png"
        self.log = path / "run.log"

    @classmethod
    def create(cls, parent: str, name: str) -> "RunFolder":
        """Make a folder that nobody has used.

        Raises:
            ConfigError: `parent` cannot be written.
        """
        stamp = time.strftime("%Y%m%d-%H%M%S")
        for suffix in ("", *(f"-{i}" for i in range(2, 100))):
            path = Path(parent) / f"{name}-{stamp}{suffix}"
            try:
                path.mkdir(parents=True)
            except FileExistsError:
                continue
            except OSError as error:
                raise ConfigError([f"run.dir={parent!r}: cannot make {path} ({error.strerror})"]) from error
            return cls(path)
        raise ConfigError([f"run.dir={parent!r}: cannot find a free folder name for {name}-{stamp}"])

    @classmethod
    def existing(cls, path: str | Path) -> "RunFolder":
        """Open the folder of an earlier run.

        Raises:
            ConfigError: there is none.
        """
        folder = cls(Path(path))
        if not folder.config.is_file():
            raise ConfigError([f"{path}: is no run folder, it has no config.toml; give runs/<name>-<time>"])
        return folder

    @classmethod
    def resumed(cls, path: str | Path) -> tuple["RunFolder", int | None]:
        """Open what --resume names: a run, or one checkpoint of it; return the step to go on from, None = the newest.

        Raises:
            ConfigError: there is none.
        """
        absolute = Path(path).absolute()
        match = re.fullmatch(r"step_(\d{6,})", absolute.name)
        if match and absolute.parent.name == "checkpoints":
            return cls.existing(absolute.parents[1]), int(match[1])
        return cls.existing(path), None

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep the folder to this process meanwhile.

        Raises:
            ConfigError: another run uses it.
        """
        with (self.path / "run.lock").open("a+") as file:  # the lock ends with the process, the file stays
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                file.seek(0)
                pid = file.read() or "unknown"
                raise ConfigError(
                    [f"{self.path}: another run uses this folder (pid {pid}); wait for its end, or stop it"]
                ) from error
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
            yield

    def record(self, config_toml: str, command: Sequence[str]) -> None:
        """Write the resolved config and what it runs on; an earlier attempt's record keeps its number."""
        attempt = 1 + len(list(self.path.glob("environment-*.json")))
        record = {
            "attempt": attempt,
            "command": list(command),
            "commit": commit(),
            "python": platform.python_version(),
            "platform": platform.platform(),
            "devices": [str(device) for device in jax.devices()],
            "versions": {name: importlib.metadata.version(name) for name in RECORDED},
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }
        (self.path / f"environment-{attempt}.json").write_text(json.dumps(record, indent=1) + "\n")
        if self.config.is_file():
            shutil.copy(self.config, self.path / f"config-{attempt - 1}.toml")
        aside = self.path / ".config.toml.writing"
        aside.write_text(config_toml)
        aside.replace(self.config)  # a kill here leaves a whole config: the folder stays resumable

    @contextlib.contextmanager
    def logged(self) -> Iterator[None]:
        """Send the project's log records to run.log meanwhile."""
        handler = _LogFile(self.log, encoding="utf-8")
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        handler.setLevel(logging.INFO)
        logger = logging.getLogger("rl_jax")
        logger.setLevel(logging.INFO)
        logger.addHandler(handler)
        try:
            yield
        finally:
            logger.removeHandler(handler)
            with contextlib.suppress(OSError):  # it was told
                handler.close()


class _LogFile(logging.FileHandler):
    """Gives up, in one line, when the file cannot be written: the run has its own message of a full disk."""

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif self.level <= logging.CRITICAL:
            self.setLevel(logging.CRITICAL + 1)
            print(f"{self.baseFilename}: cannot be written ({error.strerror}), the log ends here", file=sys.stderr)


def commit() -> str:
    """Return the commit of the code, marked if the tree has changes; "unknown" outside a git checkout."""
    root = Path(__file__).parent.parent
    ask = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(ask, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"
