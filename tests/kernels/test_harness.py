"""The benchmarks without a GPU: percentiles, rows, bars, comparisons, skews, the CSV file, failures, the refusal."""

import csv
import math

import pytest
import torch

from conftest import DEVICE
from kernels import harness, measure
from kernels.harness import Ceilings, Point, Times


def test_percentiles_interpolate():
    assert harness.percentiles([5.0, 1.0, 2.0, 4.0, 3.0, 6.0]) == Times(3.5, 2.0, 5.0)
    assert harness.percentiles([7.0]) == Times(7.0, 7.0, 7.0)
    for bad in ([], [1.0, math.nan], [-1.0]):
        with pytest.raises(ValueError, match="must be finite"):
            harness.percentiles(bad)


def point(**changes) -> Point:
    fields = {"op": "permute", "shape": "T3", "dtype": "bf16", "num_bytes": 8_600_000, "make": lambda i: (i,)}
    return Point(**{**fields, "providers": {}, **changes})


def test_row_divides_by_what_the_card_does():
    ceilings = Ceilings(copy_bytes_per_s=4.3e12, matmul_flops=800e12, launch_us=1.5)
    best = {"triton": 4.0, "torch": 10.0, "vllm": 5.0, "other": 8.0}
    row = harness.row_of(point(num_flops=400_000_000), "triton", Times(4.0, 3.9, 4.2), best, ceilings)
    # 8.6 MB at 4.3 TB/s is 2 us; 0.4 GFLOP at 800 TFLOP/s is 0.5 us
    assert row["copy_percent"] == 50.0 and row["floor_us"] == 2.0
    assert row["gb_per_s"] == 2150.0 and row["tflops"] == 100.0
    assert row["vs_torch"] == 2.5 and row["vs_best_peer"] == 1.25
    tiny = harness.row_of(point(num_bytes=8), "torch", Times(10.0, 9.0, 11.0), {"torch": 10.0}, ceilings)
    assert tiny["floor_us"] == 1.5 and tiny["vs_torch"] == 1.0 and tiny["vs_best_peer"] == ""


def test_bars_are_of_this_run():
    ceilings = Ceilings(copy_bytes_per_s=4e12, matmul_flops=800e12, launch_us=1.5)
    best = {"triton": 4.0, "gate": 2.0, "torch": 10.0}
    for bar, us, is_met in (
        (harness.at_most(4.0), 4.0, True),
        (harness.at_most(3.9), 3.9, False),
        (harness.share_of_copy(8_000_000, 0.5), 4.0, True),  # 2 us at the speed of the copy
        (harness.a_launch_above("gate"), 3.5, False),
    ):
        row = harness.row_of(point(bar=bar), "triton", Times(4.0, 3.9, 4.2), best, ceilings)
        assert (row["bar_us"], row["bar"]) == (us, "met" if is_met else "missed")
        assert harness.row_of(point(bar=bar), "torch", Times(4.0, 3.9, 4.2), best, ceilings)["bar"] == ""


def test_ring_outgrows_the_cache_within_bounds():
    assert measure.num_copies(2**20) * 2**20 >= measure.RING_BYTES
    assert measure.num_copies(10**10) == 4 and measure.num_copies(1) == measure.MAX_CALLS
    ring = measure.make_ring(point(make=lambda i: (torch.full((2**20,), i, dtype=torch.int32), "name", 3)))
    assert len(ring) == measure.num_copies(2**22) and [int(m[0][0]) for m in ring[:3]] == [0, 1, 2]


def test_comparison_is_strict_for_integers_and_relative_for_floats():
    compare = harness.largest_difference(1e-3)
    a = (torch.tensor([100.0, 0.5]), torch.tensor([1, 2]))
    assert compare(a, (torch.tensor([100.05, 0.5]), torch.tensor([1, 2]))) == pytest.approx(5e-4, rel=1e-3)
    with pytest.raises(AssertionError, match="largest difference"):
        compare(a, (torch.tensor([100.0, 0.502]), torch.tensor([1, 2])))
    for bad in (torch.tensor([1, 3]), torch.tensor([1, 2, 3]), torch.tensor([1.0, 2.0])):
        with pytest.raises(AssertionError, match="inf"):
            compare(a, (a[0], bad))
    codes = torch.tensor([1.0, -2.0]).to(torch.float8_e4m3fn)
    assert compare(codes, codes.clone()) == 0
    with pytest.raises(AssertionError):
        compare(codes, torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn))
    nan = torch.tensor([math.nan])
    assert compare(nan, nan.clone()) == 0
    with pytest.raises(AssertionError):
        compare(nan, torch.tensor([0.0]))


@pytest.mark.parametrize("routing", ["uniform", "zipf", "one"])
def test_routed_ids_are_distinct_and_skewed_as_named(routing):
    T, A, E = 3000, 3, 16
    ids_TA = harness.routed_ids(T, A, E, routing, seed=1)
    assert ids_TA.dtype == torch.int32 and ids_TA.shape == (T, A)
    assert all(len(set(row)) == A for row in ids_TA.tolist())
    share_E = torch.bincount(ids_TA.flatten(), minlength=E) / T
    sigma = (A / E / T) ** 0.5
    if routing == "uniform":
        assert (share_E - A / E).abs().max() < 5 * sigma
    elif routing == "one":
        assert share_E[0] == 1 and (share_E[1:] - (A - 1) / (E - 1)).abs().max() < 5 * sigma
    else:
        first = torch.bincount(harness.routed_ids(T, 1, E, routing, seed=2).flatten(), minlength=E) / T
        weight_E = 1 / torch.arange(1, E + 1)
        assert (first - weight_E / weight_E.sum()).abs().max() < 5 * (0.25 / T) ** 0.5
    assert torch.equal(ids_TA, harness.routed_ids(T, A, E, routing, seed=1))
    with pytest.raises(ValueError, match="routing='skew'"):
        harness.routed_ids(1, 1, 2, "skew", 0)


def test_rows_are_appended_and_other_columns_refused(tmp_path):
    path = tmp_path / "results.csv"
    harness.append_rows([{"op": "gate", "p50_us": 2.5}], path)
    harness.append_rows([{"op": "align", "p50_us": 3.5}, {"op": "permute", "p50_us": 4.5}], path)
    with path.open() as file:
        assert [row["op"] for row in csv.DictReader(file)] == ["gate", "align", "permute"]
    with pytest.raises(ValueError, match="has columns"):
        harness.append_rows([{"op": "gate", "p99_us": 1.0}], path)


def test_without_a_gpu_it_refuses_to_measure(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="no CUDA device: benchmarks measure a GPU only; TRITON_INTERPRET=1 and"):
        measure.run([point()], tmp_path / "results.csv")
    assert not (tmp_path / "results.csv").exists()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(measure.triton.knobs.runtime, "interpret", True)
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET"):
        measure.require_gpu()


def test_conditions_name_versions_and_never_fail():
    where = measure.conditions()
    assert where["torch"] == torch.__version__ and set(where) >= {"card", "triton", "commit", "date"}
    assert measure.query("no-such-program") == "unknown"


@pytest.mark.skipif(DEVICE != "cpu", reason="rehearses on a CPU")
def test_a_point_that_fails_costs_no_other(tmp_path, capsys):
    """However it fails: a wrong result, an error of its maker, of ours; a peer that fails is left out alone."""
    path = tmp_path / "results.csv"
    ones = {"make": lambda seed: (torch.ones(3),), "num_bytes": 24, "reference": lambda x: x + 1}

    def broken(*_):
        raise NotImplementedError("no such kernel")

    points = [
        point(**ones, shape="wrong", providers={"triton": lambda x: x}),
        point(**{**ones, "make": broken}, shape="maker", providers={"triton": lambda x: x + 1}),
        point(**ones, shape="ours", providers={"triton": broken}),
        point(**ones, shape="right", providers={"triton": lambda x: x + 1, "peer": broken, "torch": lambda x: 1 + x}),
        point(**ones, shape="bar", providers={"triton": lambda x: x + 1}, bar=harness.at_most(1e9)),
    ]
    faults = measure.run(points, path, is_rehearsal=True)
    assert [fault.split()[1] for fault in faults] == ["wrong", "maker", "ours"]
    assert "largest difference 0.5" in faults[0] and "NotImplementedError: no such kernel" in faults[2]
    assert "peer is left out, NotImplementedError" in capsys.readouterr().out
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["shape"], row["provider"]) for row in rows] == [
        ("bar", "triton"),
        ("right", "triton"),
        ("right", "torch"),
    ]
    assert all("no measurement" in row["card"] and float(row["p50_us"]) > 0 for row in rows)
    [line] = measure.bars_of(path)
    assert line.startswith("met    permute bar bf16 none: ") and measure.bars_of(path, first_row=1) == []
    assert measure.run(points[-1:], path, seconds=-1, is_rehearsal=True) == [
        "permute bar bf16 none: not measured, the time was up"
    ]
