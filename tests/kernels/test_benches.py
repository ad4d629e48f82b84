"""Every bench.py without a GPU: its points are well-formed, its peers in torch agree with the reference, bytes by hand."""

import csv
import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch

from conftest import DEVICE
from kernels import device_bench, harness, measure, peers
from kernels.align import bench as align_bench
from kernels.align.ref import align_ref
from kernels.gate import bench as gate_bench
from kernels.gate.cases import MODELS
from kernels.gate.ref import gate_ref
from kernels.grouped_matmul import bench as matmul_bench
from kernels.permute import bench as permute_bench
from kernels.permute.ref import permute_ref, unpermute_ref
from kernels.router import Router


@pytest.mark.parametrize("name", device_bench.benches())
def test_points_are_well_formed(name):
    points = list(device_bench.benches()[name]())
    keys = {(p.op, p.shape, p.dtype, p.routing) for p in points}
    assert len(keys) == len(points) > 0
    assert all("triton" in p.providers and p.num_bytes > 0 and p.num_flops >= 0 for p in points)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_torch_gate_chooses_as_the_reference(model, rng):
    logits_TE = torch.randn(5, model.num_experts, generator=rng)
    bias_E = torch.randn(model.num_experts, generator=rng) * 0.1 if model.has_bias else None
    ours = gate_bench.with_torch(logits_TE, model.router, bias_E)
    expected = gate_ref(logits_TE, model.router, bias_E)
    assert torch.equal(ours[1], expected[1])
    assert gate_bench.compare(ours, expected) < 1e-6


@pytest.mark.parametrize("routing", ["uniform", "zipf", "one"])
def test_torch_align_is_the_reference(routing):
    ids_TA = harness.routed_ids(37, 3, 11, routing, seed=1)
    expected = align_ref(ids_TA, 11, 16)
    assert align_bench.compare(align_bench.with_torch(ids_TA, 11, 16, torch.zeros(1)), expected) == 0
    wrong = align_ref(ids_TA.flip(0), 11, 16)
    with pytest.raises(AssertionError):
        align_bench.compare(wrong, expected)


def test_torch_permutes_and_combines_as_the_reference(rng):
    T, A, E, D = 9, permute_bench.ACTIVE, 13, 256
    order = align_ref(harness.routed_ids(T, A, E, "zipf", seed=1), E, 16)
    x_TD = torch.randn(T, D, generator=rng).bfloat16()
    for ours, is_quantised in ((permute_bench.torch_permute, False), (permute_bench.torch_quantise, True)):
        expected = (permute_ref(x_TD, order, quantise=is_quantised), order)
        assert permute_bench.compare((ours(x_TD, order), order), expected) == 0
        with pytest.raises(AssertionError):
            permute_bench.compare((ours(-x_TD, order), order), expected)
    y_MD = torch.randn(order.routed_M.numel(), D, generator=rng).bfloat16()
    weights_TA = torch.rand(T, A, generator=rng)
    compare = harness.largest_difference(2**-7)
    ours = permute_bench.torch_unpermute(y_MD, order, weights_TA)
    assert compare(ours, unpermute_ref(y_MD, order, weights_TA)) <= 2**-7


def test_bytes_and_similarity_by_hand():
    # 2 tokens of 8 choices among 3 experts, block 64: 16 ids, 16 positions, 192 rows, 3 blocks, 1 number
    assert align_bench.num_bytes(2, 3) == 4 * (16 + 16 + 192 + 3 + 1)
    point = permute_bench.permute_point(1024, 4096, "uniform", True)
    # a token is read once; each of its 8 rows is 4,096 codes, 32 scales and a position of 4 bytes
    assert point.num_bytes == 1024 * (8192 + 8 * (4096 + 128 + 4))
    order = align_ref(torch.tensor([[0], [1]]), 2, 16)
    out_MF = torch.zeros(32, 4)
    out_MF[0], out_MF[16] = 1.0, 2.0
    assert matmul_bench.compare((out_MF, order), (out_MF.clone(), order)) == pytest.approx(0, abs=1e-12)
    with pytest.raises(AssertionError, match="1 - similarity"):
        matmul_bench.compare((out_MF * 1.1, order), (out_MF, order))


@pytest.mark.skipif(DEVICE != "cpu", reason="measured there")
@pytest.mark.parametrize("name", device_bench.benches())
def test_the_smallest_point_of_every_bench_is_rehearsed_whole(name, tmp_path, capsys):
    """Inputs, every provider against the reference, times, bars, the CSV file: all but the graphs."""
    path = tmp_path / "rehearsal.csv"
    assert measure.main(device_bench.benches()[name], ["--rehearse", "--output", str(path)]) == 0, (
        capsys.readouterr().out
    )
    assert "left out" not in capsys.readouterr().out
    chosen = measure.smallest(device_bench.benches()[name]())
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["provider"] for row in rows] == [
        p for point in sorted(chosen, key=lambda p: p.bar is None) for p in point.providers
    ]
    assert all(row["max_error"] != "" and float(row["floor_us"]) > 0 for row in rows)


def test_the_bars_of_the_issue_are_all_there():
    """At least one point each, of the sizes that were promised."""
    bars = {
        (p.op, p.shape, p.dtype) for points in device_bench.benches().values() for p in points() if p.bar is not None
    }
    assert {s.split()[1] for op, s, _ in bars if op == "gate"} == {"T1", "T16384"}
    assert {s.split()[1] for op, s, _ in bars if op == "gate_align"} == {"T1", "T16", "T64", "T256", "T1024"}
    assert {d for op, _, d in bars if op == "permute"} == {"bf16", "bf16 to fp8"}
    assert {s.split()[0] for op, s, _ in bars if op == "pages"} == {"copy", "gather"}
    assert {d for op, _, d in bars if op == "kv_write"} == {"bf16 to bf16", "bf16 to fp8"}


@dataclass
class Argument:
    """As torch describes an operator's."""

    name: str
    type: str
    default_value: float | None = None

    def has_default_value(self) -> bool:
        return self.default_value is not None


def test_peers_are_left_out_where_no_library_is_loaded(monkeypatch):
    assert peers.aligns() == {} and peers.unpermutes() == {}
    assert all(peers.gates(model.router, model.has_bias) == {} for model in MODELS)

    class Packet:
        def __call__(self, *arguments):
            return arguments

        class default:
            class _schema:
                arguments = (Argument("weights", "Tensor"), Argument("ids", "Tensor"))

    monkeypatch.setattr(torch.ops._moe_C, "topk_softmax", Packet(), raising=False)
    choose = peers.operator("topk_softmax")
    assert choose is not None and choose(1, 2, 3) == (1, 2)
    Packet.default._schema.arguments += (Argument("padding", "Optional[Tensor]"), Argument("scale", "float", 1.5))
    choose = peers.operator("topk_softmax")
    assert choose is not None and choose(1, 2) == (1, 2, None, 1.5) and choose(1, 2, 3) == (1, 2, 3, 1.5)
    Packet.default._schema.arguments += (Argument("kind", "int"),)
    with pytest.raises(ValueError, match=r"topk_softmax: .* wants 'kind', an int"):
        peers.operator("topk_softmax")(1, 2)
    assert list(peers.gates(Router(num_active=2), False)) == ["vllm"]


COLUMNS = ("op", "shape", "dtype", "routing", "p50_us", "bar_us", "bar", "copy_percent")


def test_a_device_run_needs_a_device(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="no CUDA device"):
        device_bench.main(["--output", str(tmp_path / "results.csv")])


def test_a_device_run_goes_on_after_a_crash_and_a_hang(monkeypatch, tmp_path, capfd):
    """Every operation is a process: one dies, one hangs and is killed, the third writes its row; bars are listed."""
    output = tmp_path / "results.csv"
    harness.append_rows([dict.fromkeys(COLUMNS, "before") | {"bar": "met"}], output)
    row = ",".join(("gate", "T1", "bf16", "none", "3", "2", "missed", "7"))
    programs = {
        "align": "import os; os._exit(7)",
        "gate": "import time; time.sleep(60)",
        "pages": f"print({row!r}, file=open({str(output)!r}, 'a'))",
    }
    run = subprocess.run

    def started(command, **options):
        name = command[2].split(".")[1]
        return run([sys.executable, "-c", programs[name]], **options)

    monkeypatch.setattr(device_bench, "benches", lambda: dict.fromkeys(programs))
    monkeypatch.setattr(device_bench.measure, "require_gpu", lambda: None)
    monkeypatch.setattr(device_bench, "TESTS", tmp_path / "none")
    monkeypatch.setattr(device_bench, "GRACE_S", 1.0)
    monkeypatch.setattr(device_bench.subprocess, "run", started)
    assert device_bench.main(["--output", str(output), "--seconds", "4"]) == 1
    printed = capfd.readouterr().out
    assert "align: returned 7" in printed and "gate: killed after" in printed and "2 faults" in printed
    assert printed.count("missed gate") == 1 and "met    before" not in printed  # of this run alone
