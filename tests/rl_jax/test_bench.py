"""The benchmark command: the rollouts that it makes up, its CSV, and its refusals; one small run of it."""

import csv
from pathlib import Path

import numpy as np
import pytest

from rl_jax import bench
from rl_jax.cli import RunConfig
from rl_jax.config import load
from rl_jax.models.schema import num_active_params

ROOT = Path(__file__).parents[2]
TINY = [str(ROOT / "tests" / "system" / name) for name in ("tiny.toml", "tiny_model.toml")]
CONFIGS = [word for name in TINY for word in ("--config", name)]


def read(file: Path) -> list[dict[str, str]]:
    with file.open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


def test_rows_are_full_and_their_second_half_is_trained() -> None:
    config = load(RunConfig, TINY, ["packing.rows=3", "packing.seq_len=7"])
    first, second = bench.full_batches(config.model.resolve(), config, 2)
    assert first.tokens_BT.shape == (3, 7)
    np.testing.assert_array_equal(first.segments_BT, 1)
    np.testing.assert_array_equal(first.positions_BT, np.tile(np.arange(7), (3, 1)))
    np.testing.assert_array_equal(first.mask_BT, np.tile(np.arange(7) >= 2, (3, 1)) & (np.arange(7) < 6))
    assert not np.array_equal(first.tokens_BT, second.tokens_BT)


def test_two_runs_append_two_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "new" / "bench.csv"
    assert bench.main([*CONFIGS, "--steps", "2", "--csv", str(file)]) == 0
    assert bench.main([*CONFIGS, "--steps", "1", "--micro-batches", "3", "--no-sampler", "--csv", str(file)]) == 0
    first, second = read(file)
    assert list(first) == bench.COLUMNS
    config = load(RunConfig, TINY)
    size = config.packing.rows * config.packing.seq_len
    assert [int(row["tokens_a_step"]) for row in (first, second)] == [size, 3 * size]
    assert int(first["active_parameters"]) == num_active_params(config.model.resolve())
    for row in (first, second):
        assert float(row["step_s_min"]) <= float(row["step_s"]) <= float(row["step_s_max"])
        np.testing.assert_allclose(float(row["tokens_s"]) * float(row["step_s"]), int(row["tokens_a_step"]), rtol=1e-9)
    assert float(first["sampler_tokens_s"]) > 0 == float(second["sampler_tokens_s"])
    assert "appended to" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--steps", "0"], "--steps 0: expected at least 1"),
        (["--micro-batches", "-1"], "--micro-batches -1: expected at least 1"),
        (["--set", "sampler.max_len=16"], "sampler.max_len=16: bench asks with 16 tokens"),
        (["--set", "mesh.data=3"], "mesh"),
    ],
)
def test_what_cannot_be_measured_is_refused(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main([*CONFIGS, *words]) == 2
    assert told in capsys.readouterr().err


def test_a_csv_of_other_columns_is_refused_and_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "other.csv"
    file.write_text("step,reward\n1,0.5\n")
    assert bench.main([*CONFIGS, "--csv", str(file)]) == 2
    assert "its columns are ['step', 'reward']" in capsys.readouterr().err
    assert file.read_text() == "step,reward\n1,0.5\n"
