"""The planner with the real compilers: a tiny step for TPUs that are not here. Skipped without them."""

import csv
import importlib.util
import math
from pathlib import Path

import pytest

from rl_jax.models.architecture import Architecture
from rl_jax.models.schema import num_params
from rl_jax.plan import __main__ as plan

pytestmark = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs requirements/compilers.txt")

ARCH = {
    "vocab_size": 512,
    "width": 256,
    "num_layers": 3,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_width": 128,
    "num_experts": 8,
    "num_active_experts": 2,
    "expert_width": 128,
    "tie_embeddings": False,
}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Plan a tiny mixture for four v5e; returns the exit code and the rows of the CSV."""
    monkeypatch.setattr(plan, "CACHE", tmp_path / "cache")
    words = ["--chip", "v5e", "--topology", "2x2", "--seq", "1024", "--out", str(tmp_path / "out")]
    words += [f"--set=model.architecture.{key}={str(value).lower()}" for key, value in ARCH.items()]

    def planned(*more: str) -> tuple[int, list[dict[str, str]]]:
        (tmp_path / "run.toml").write_text('[run]\nname = "tiny"\n')
        code = plan.main(["--config", str(tmp_path / "run.toml"), *words, *more])
        table = tmp_path / "out" / "shapes.csv"
        return code, list(csv.DictReader(table.read_text().splitlines())) if table.exists() else []

    return planned


SHAPE = [
    *("--set=mesh.fsdp=2", "--set=mesh.context=2", "--set=forward.compute_dtype=bfloat16"),
    *("--set=forward.attention=splash", "--set=forward.attention_block_tokens=256"),
    *("--set=forward.dispatch=all_to_all", "--set=forward.expert_block_rows=256", "--set=forward.remat=full"),
]


def test_a_step_for_a_tpu_that_is_not_here(run, capsys: pytest.CaptureFixture[str]) -> None:
    code, rows = run(*SHAPE, "--batch", "4")
    assert code == 0, capsys.readouterr()
    row = rows[0]
    assert (row["verdict"], row["micro_batches"], row["limit"] != "") == ("fits", "2", True)
    # Every weight but the norms is split over both fsdp shards, experts over both context shards too.
    arch = Architecture(**ARCH)  # type: ignore[arg-type]
    experts = 3 * arch.num_layers * arch.num_experts * arch.width * arch.expert_width
    norms = arch.width * (2 * arch.num_layers + 1) + 2 * arch.num_layers * arch.head_width
    held = (num_params(arch) - experts) / 2 + experts / 4
    assert float(row["params_gb"]) * 1e9 == pytest.approx(4 * held, abs=4 * norms + 1e6)
    assert math.isclose(float(row["counted_over_formula"]), 1, abs_tol=0.02)
    assert float(row["fsdp all-gather gb"]) > 0
    assert float(row["context all-to-all gb"]) > 0
    assert row["warnings"] == "0"
    before = capsys.readouterr().out
    assert run(*SHAPE, "--batch", "4")[0] == 0  # from the cache
    assert capsys.readouterr().out == before


def test_what_does_not_fit_is_a_verdict(run) -> None:
    code, rows = run(*SHAPE[:3], "--set=packing.seq_len=131072", "--set=forward.remat=none")
    assert code == 0
    assert rows[0]["verdict"] == "out of memory"
    assert float(rows[0]["headroom_gib"]) < 0


def test_a_topology_that_does_not_exist(run, capsys: pytest.CaptureFixture[str]) -> None:
    code, _ = run("--topology", "3x5", "--set=mesh.data=15")
    said = capsys.readouterr().err
    assert code == 2
    assert "plan.topology='3x5'" in said
    assert "known are 1x1, 2x2" in said
