"""Conversions for the tests of bridge.convert."""

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
