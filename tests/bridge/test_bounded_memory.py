"""A conversion holds a few slices, not the model: peak memory of a process of its own."""

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from references import MOE

from bridge.orbax_writer import WeightWriter
from rl_jax.checkpoint import Meta
from rl_jax.models.architecture import Architecture
from rl_jax.models.schema import flat_table

ROOT = Path(__file__).resolve().parents[2]
MIB = 2**20
WIDTH = 1024
LARGE = dataclasses.replace(MOE, width=WIDTH, expert_width=896, num_experts=16, num_layers=4, vocab_size=90_001)
"""724 MB of weights in bfloat16: experts in slices of 1.8 MB, embedding and head of 184 MB each."""
SMALL = dataclasses.replace(LARGE, num_layers=1, num_experts=2, vocab_size=37)


def write(run: Path, arch: Architecture) -> None:
    table = flat_table(arch)
    checkpoint = run / "checkpoints" / "step_000001"
    largest = max(int(np.prod(param.sizes[len(param.stacked) :])) for param in table.values())
    values = np.random.default_rng(0).standard_normal(largest, np.float32).astype(ml_dtypes.bfloat16)
    with WeightWriter(checkpoint / "params", table, dict.fromkeys(table, values.dtype)) as writer:
        for key, param in table.items():
            inner = param.sizes[len(param.stacked) :]
            for index in np.ndindex(*param.sizes[: len(param.stacked)]):
                writer.write(key, index, values[: int(np.prod(inner))].reshape(inner))
    (checkpoint / "meta").mkdir()
    meta = Meta(step=1, architecture=arch, config_hash="", holds="weights")
    (checkpoint / "meta" / "metadata").write_text(json.dumps(dataclasses.asdict(meta)))


def peak_bytes(*args: object) -> float:
    """Return the peak resident memory that a conversion reports."""
    command = [sys.executable, "-m", "bridge.convert", *map(str, args)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    (found,) = re.findall(r"peak memory ([0-9.]+) GiB", done.stdout)
    return float(found) * 1024 * MIB


@pytest.mark.parametrize("fmt", ["fp8-block"])
def test_memory_does_not_grow_with_the_model(fmt: str, tmp_path: Path):
    options = ["--without-tokenizer", "--format", fmt, "--threads", 2]
    peaks = []
    for name, arch in (("small", SMALL), ("large", LARGE)):
        write(tmp_path / name, arch)
        peaks.append(peak_bytes("--checkpoint", tmp_path / name, "--out", tmp_path / f"{name}-out", *options))
    back = peak_bytes("--from-hf", tmp_path / "large-out", "--out", tmp_path / "back", "--format", "bf16", *options[:1])
    # 724 MB are converted. On the way there: four slices or pieces of the embedding under way, each three times in memory,
    # which are 200 MB. On the way back: what waits for a commit.
    assert peaks[1] - peaks[0] < 220 * MIB, [peak / MIB for peak in peaks]
    assert back - peaks[0] < 400 * MIB, [peak / MIB for peak in (*peaks, back)]
