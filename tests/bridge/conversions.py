"""Conversions for the tests of bridge.convert, and a disk that is full."""

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from references import MOE

from bridge import convert
from rl_jax.models.architecture import Architecture

ONE_MB = ["--max-shard-gb", "0.0001"]  # 100 kB, several files


def run(*args: object) -> int:
    return convert.main([str(arg) for arg in args])


def bf16_directory(runs: dict[Architecture, Path], tmp_path: Path) -> Path:
    assert run("--checkpoint", runs[MOE], "--out", tmp_path / "hf", "--format", "bf16", *ONE_MB) == 0
    return tmp_path / "hf"


@contextmanager
def full_disk(num_bytes: int) -> Iterator[None]:
    """Let no file grow beyond this size: whoever writes hears of it as of a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
