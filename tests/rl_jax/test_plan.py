"""The plan without a compiler: shapes and their faults, times on links, formulas, verdicts, files, messages."""

import csv
import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest

from rl_jax import train
from rl_jax.config import ConfigError, load, to_toml
from rl_jax.mesh import MeshConfig
from rl_jax.models.architecture import Architecture
from rl_jax.models.schema import num_params
from rl_jax.models.transformer import ForwardConfig
from rl_jax.packing import PackingConfig
from rl_jax.plan import __main__ as plan
from rl_jax.plan import compiled, report, topology
from rl_jax.plan.chips import CHIPS, chip_of, gpu_target, num_devices
from rl_jax.plan.config import PlanConfig, run_of, with_mesh
from rl_jax.plan.groups import Group
from rl_jax.plan.links import Place, wire_seconds
from rl_jax.plan.outcome import Memory, Outcome, memory_of, outcome_of
from rl_jax.plan.roofline import Roofline
from rl_jax.plan.shapes import all_shapes, prior, shape_faults, sweep
from rl_jax.plan.step_flops import expected_scopes, micro_batch_flops
from rl_jax.plan.worker import needed_bytes
from rl_jax.trainer.report import step_flops
from rl_jax.types import Batch

CONFIGS = sorted(path for path in Path("configs/plan").glob("*.toml") if "[plan]" in path.read_text())
GIB = 2**30


def config_of(name: str = "qwen3_30b_v5p", *overrides: str) -> PlanConfig:
    return load(PlanConfig, [f"configs/plan/{name}.toml"], overrides)


@pytest.mark.parametrize("num", [1, 6, 64])
def test_all_shapes_are_the_ordered_factorisations(num: int) -> None:
    shapes = list(all_shapes(num))
    assert len(set(shapes)) == len(shapes)
    assert all(shape.num_devices == num for shape in shapes)
    expected = {1: 1, 6: 5 * 5, 64: math.comb(6 + 4, 4)}  # a prime factor goes to any of five axes
    assert len(shapes) == expected[num]


def test_faults_of_a_shape_name_what_does_not_divide() -> None:
    config = with_mesh(config_of(), MeshConfig(fsdp=6, expert=3, context=8, tensor=3))
    faults = "\n".join(shape_faults(config, config.model.resolve()))
    assert "mesh.fsdp=6 must divide model.width=2048; try 4 or 8" in faults
    assert "mesh.expert*context=24 must divide model.num_experts=128; try 16 or 32" in faults
    assert "mesh.tensor=3 must divide model.num_kv_heads=4" in faults
    assert "plan.batch=256: the mesh takes micro-batches of 18 rows" in faults
    assert "try 252 or 270" in faults


def test_a_sweep_leaves_out_what_is_illegal_or_cannot_fit_and_says_why() -> None:
    config = config_of("qwen3_30b_v5p", 'plan.chip="v5e"', 'plan.topology="8x8"')
    arch = config.model.resolve()
    legal, refused = sweep(config, arch, chip_of("v5e"))
    assert len(legal) + len(refused) == math.comb(6 + 4, 4)
    assert not [one for one in legal if shape_faults(with_mesh(config, one.mesh), arch)]
    reasons = dict(refused)
    assert "tensor=8 must divide model.num_kv_heads=4" in reasons[MeshConfig(fsdp=8, tensor=8)]
    # 16 bytes a parameter, on each device all of them.
    assert "alone need" in reasons[MeshConfig(data=64)]
    assert [one.wire_bytes for one in legal] == sorted(one.wire_bytes for one in legal)


def test_least_memory_is_sixteen_bytes_a_parameter_and_the_layers_inputs() -> None:
    config = with_mesh(config_of(), MeshConfig(fsdp=64))
    arch = config.model.resolve()
    norms = arch.width * (2 * arch.num_layers + 1) + 2 * arch.num_layers * arch.head_width
    held = 16 * ((num_params(arch) - norms) / 64 + norms - norms * 0)
    found = prior(config, arch).least_bytes
    inputs = 2 * arch.num_layers * 131072 * arch.width
    assert found == pytest.approx(held + inputs, rel=2e-3)


V5P, H200 = CHIPS["v5p"], CHIPS["h200"]
TORUS = [Place((x, y, z), 0) for x in range(4) for y in range(4) for z in range(2)]


@pytest.mark.parametrize(
    ("kind", "members", "expected_s"),
    [
        ("all-gather", range(0, 32, 8), 1 / (2 * 90e9)),  # all of x: a ring, both ways
        ("all-gather", range(0, 16, 8), 1 / 90e9),  # half of x: a line
        ("all-reduce", range(0, 32, 2), 1 / (4 * 90e9)),  # x and y: two rings
        ("all-to-all", range(0, 32, 8), 4 / (8 * 90e9)),  # a quarter of all goes through the middle, over two links
        ("all-to-all", range(0, 2), 2 / (4 * 90e9)),
        ("all-gather", range(1), 0.0),
    ],
)
def test_time_on_a_torus(kind: str, members: range, expected_s: float) -> None:
    group = Group(("fsdp",), len(members), tuple(members))
    assert wire_seconds(V5P, "4x4x2", TORUS, kind, group, 1.0) == pytest.approx(expected_s)


@pytest.mark.parametrize(
    ("kind", "members", "expected_s"),
    [
        ("all-gather", range(8), 1 / 450e9),  # one host
        ("all-gather", (0, 8), 1 / 50e9),  # one GPU of each of two hosts
        ("all-gather", range(16), 1 / (8 * 50e9)),  # all adapters of both hosts work
        ("all-to-all", range(16), 0.5 / 50e9),  # half of it leaves the host
    ],
)
def test_time_between_gpus(kind: str, members: object, expected_s: float) -> None:
    places = [Place((gpu,), host) for host in range(2) for gpu in range(8)]
    group = Group(("fsdp",), len(tuple(members)), tuple(members))  # type: ignore[arg-type]
    assert wire_seconds(H200, "2x8", places, kind, group, 1.0) == pytest.approx(expected_s)


ARCH = Architecture(
    vocab_size=300,
    width=32,
    num_layers=3,
    num_heads=6,
    num_kv_heads=2,
    head_width=8,
    num_experts=10,
    num_active_experts=2,
    expert_width=12,
    shared_expert_width=20,
    tie_embeddings=False,
)


def test_model_flops_are_those_of_the_trainers_mfu() -> None:
    rows, length = 4, 64
    positions_BT = np.broadcast_to(np.arange(length, dtype=np.int32), (rows, length))
    fields = {field.name: np.zeros((rows, length), np.float32) for field in dataclasses.fields(Batch)}
    batch = Batch(**fields | {"positions_BT": positions_BT, "segments_BT": positions_BT * 0 + 1})
    packing = PackingConfig(rows=rows, seq_len=length)
    found = micro_batch_flops(ARCH, ForwardConfig(), packing, MeshConfig(fsdp=2, context=2))
    assert found.model * 4 == pytest.approx(step_flops(ARCH, [batch]), rel=1e-12)


def test_executed_flops_without_recomputation_are_three_passes() -> None:
    packing = PackingConfig(rows=2, seq_len=64)
    forward = ForwardConfig(attention="blockwise", attention_block_tokens=1, grouped_matmul="ragged")
    found = micro_batch_flops(ARCH, forward, packing, MeshConfig())
    # Of attention 2 forward and 5 backward matmuls where the model has 2 and 4; of the head 4 passes: chunks are made again.
    attention = 12 * 3 * 6 * 8 * 65 / 2 * 128
    head = 2 * 32 * 300 * 128
    assert found.attention == pytest.approx(attention * 7 / 6)
    norms = 6 * (32 * (2 * 3 + 1) + 2 * 3 * 8) * 128  # the model's count has them, they are no matmuls
    assert found.experts + found.rest == pytest.approx(found.model - attention - norms + head)
    full = micro_batch_flops(ARCH, dataclasses.replace(forward, remat="full"), packing, MeshConfig())
    assert full.attention == pytest.approx(attention * 9 / 6)
    assert full.experts == pytest.approx(found.experts * 4 / 3)
    # The loop over blocks: 3 matmuls forward, 3 again, 8 backward; half a block of each expert is padding.
    blocks = dataclasses.replace(forward, remat="full", grouped_matmul="blocks", expert_block_rows=16)
    padded = micro_batch_flops(ARCH, blocks, packing, MeshConfig())
    assert padded.experts == pytest.approx(found.experts * 14 / 9 * (1 + 10 * 16 / 2 / 256))


def test_scopes_that_depend_on_data_are_expected_for_even_routing() -> None:
    forward = ForwardConfig(attention="blockwise", attention_block_tokens=16, dispatch="all_to_all")
    found = expected_scopes(ARCH, forward, PackingConfig(rows=2, seq_len=64), MeshConfig(expert=2))
    assert found["attention_pair"] == (1 + 2 + 3 + 4) / 16
    assert found["dispatch_round"] == 1
    rows = 64 * 2  # of one device; blocks of 32 rows of one of five experts, each half a block over
    assert found["expert_block"] == pytest.approx(rows / 32 + 5 / 2)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("required for HLO temporaries (68.19G) exceeds available HBM (31.24G). HLO module: jit_step.", 68.19 * GIB),
        ("Ran out of memory in memory space hbm. Used 105.5G of 95.74G hbm. Exceeded hbm capacity", 105.5 * GIB),
        ("something else", 0),
    ],
)
def test_needed_bytes_of_a_message(message: str, expected: float) -> None:
    assert needed_bytes(message) == int(expected)


def result(peak: float = 40, temp: float = 50, **accumulate: object) -> dict[str, object]:
    """What the worker writes, sizes in GiB: 4 of parameters, 8 of optimizer, 4 of gradient."""
    sizes = {"argument_bytes": 9, "output_bytes": 4.5, "alias_bytes": 4, "temp_bytes": temp, "peak_bytes": peak}
    timing = {"compile_s": 3.0, "compile_cpu_s": 5.0}
    apply = {"argument_bytes": 16, "output_bytes": 12, "alias_bytes": 12, "temp_bytes": 1, "peak_bytes": 17}
    programs = {"accumulate": sizes | accumulate, "apply": apply}
    held = {"params_bytes": 4 * GIB, "optimizer_bytes": 8 * GIB, "gradient_bytes": 4 * GIB}
    scaled = {
        name: {k: int(v * GIB) if isinstance(v, int | float) else v for k, v in program.items()} | timing
        for name, program in programs.items()
    }
    return {"held": held, "programs": scaled, "rss_bytes": GIB, "places": []}


def test_memory_of_a_step_holds_the_optimizer_beside_the_gradient_program() -> None:
    found = memory_of(result())
    assert (found.peak, found.bound) == ((40 + 8) * GIB, (9 + 50 + 0.5 + 8) * GIB)
    assert found.temporaries == (48 - 4 - 8 - 4) * GIB


def test_out_of_memory_is_a_verdict() -> None:
    config = config_of()
    arch = config.model.resolve()
    said = {"out_of_memory": "RESOURCE_EXHAUSTED: no room\nmore", "needed_bytes": 150}
    by_compiler = outcome_of(config, arch, V5P, result(**said), {})
    assert by_compiler.verdict == "out of memory"
    assert by_compiler.reason == "RESOURCE_EXHAUSTED: no room"
    assert by_compiler.headroom_bytes == V5P.memory_bytes - 158 * GIB
    # A GPU's compiler only logs it, and on a TPU it does not know of the optimizer: the plan compares by itself.
    by_plan = outcome_of(config, arch, V5P, result(peak=90, temp=95), {})
    assert (by_plan.verdict, by_plan.time) == ("out of memory", None)
    assert by_plan.headroom_bytes == V5P.memory_bytes - int((9 + 95 + 0.5 + 8) * GIB)


def outcome(mesh: MeshConfig, verdict: str, step_s: float = 1.0) -> Outcome:
    memory = Memory(params=1, optimizer=2, gradient=1, temporaries=5, peak=9, bound=11)
    time = Roofline(compute_s=step_s, hbm_s=step_s / 2, wire_s=step_s / 4) if verdict in ("fits", "tight") else None
    wire = {("fsdp", "all-gather"): 3e9} if time else {}
    return Outcome(
        mesh=mesh,
        rows=8,
        num_micro_batches=2,
        verdict=verdict,  # type: ignore[arg-type]
        memory=memory,
        time=time,
        wire_bytes=wire,
        headroom_bytes=-5 if verdict == "out of memory" else 7,
    )


def test_shapes_that_fit_come_first_the_fastest_first() -> None:
    slow, fast = outcome(MeshConfig(fsdp=64), "fits", 3.0), outcome(MeshConfig(fsdp=8, context=8), "fits", 2.0)
    tight, none = outcome(MeshConfig(data=2, fsdp=32), "tight", 1.0), outcome(MeshConfig(data=64), "out of memory")
    assert report.ranked([none, tight, slow, fast]) == [fast, slow, tight, none]


def test_files_of_a_plan_and_the_winner_is_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_of()
    best = outcome(MeshConfig(fsdp=16, context=4), "fits")
    outcomes = [best, outcome(MeshConfig(data=64), "out of memory")]
    said = report.text(outcomes, config, config.model.resolve(), V5P)
    assert "fsdp 16, context 4" in said
    written = report.write(tmp_path, outcomes, config, said)
    assert {path.name for path in written} == {"plan.txt", "shapes.csv", "shapes.png", "winner.toml"}
    rows = list(csv.DictReader((tmp_path / "shapes.csv").read_text().splitlines()))
    assert [(row["verdict"], row["fsdp"], row["fsdp all-gather gb"]) for row in rows] == [
        ("fits", "16", "3.0"),
        ("out of memory", "1", "0.0"),
    ]
    assert train.main(["--config", str(tmp_path / "winner.toml"), "--dry-run"]) == 0
    assert "fsdp = 16" in capsys.readouterr().out


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_configs_are_legal_runs_of_their_topology(path: Path) -> None:
    config = load(PlanConfig, [path])
    assert config.mesh.num_devices == config.plan.num_devices
    assert shape_faults(with_mesh(config, config.mesh), config.model.resolve()) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--topology", "4x4"], "a topology of v5p is NxNxN; known are 2x2x1"),
        (["--topology", "4x4x8"], "plan.topology='4x4x8' of v5p has 128 devices"),
        (["--batch", "20"], "plan.batch=20: the mesh takes micro-batches of 8 rows"),
        (["--chip", "v7"], "plan.chip='v7': expected one of"),
        (["--set", "plan.jobs=0"], "plan.jobs=0: must be at least 1"),
    ],
)
def test_bad_input_is_refused_with_a_message(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan.main(["--config", "configs/plan/qwen3_30b_v5p.toml", "--dry-run", *words]) == 2
    assert message in capsys.readouterr().err


def test_dry_run_names_the_shapes_of_a_sweep(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--config", "configs/plan/qwen3_30b_v5p.toml", "--sweep", "--max-shapes", "3", "--dry-run"]
    assert plan.main(words) == 0
    shown = capsys.readouterr()
    assert shown.out.count("# would compile MeshConfig") == 3
    assert "legal shapes were not compiled" in shown.err


def test_the_key_of_the_cache_is_what_decides_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    key, config = compiled.key_of, config_of()
    assert key(config) == key(config_of("qwen3_30b_v5p", "run.seed=5", "plan.jobs=3", "envs=[]"))
    others = [
        config_of("qwen3_30b_v5p", "optim.lr=1e-3"),
        config_of("qwen3_30b_v5p", "packing.rows=16"),
        config_of("qwen3_30b_v5p", 'plan.topology="2x2x16"'),
        config_of("qwen3_30b_v5p", "forward.head_chunk_tokens=512"),
    ]
    keys = {key(config), *map(key, others)}
    monkeypatch.setattr(compiled, "versions", lambda: {"libtpu": "1.2.3"})
    assert len(keys | {key(config)}) == 6


def test_a_worker_that_dies_is_a_failure_with_its_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dying = tmp_path / "python"
    dying.write_text("#!/bin/sh\necho hello >&2; echo 'LLVM ERROR: no space' >&2; echo '@ 0x7fe trace' >&2; exit 134\n")
    dying.chmod(0o755)
    monkeypatch.setattr(compiled.sys, "executable", str(dying))
    with pytest.raises(compiled.CompileFailed, match=r"exit code 134: LLVM ERROR: no space$"):
        compiled.compiled(config_of(), tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


def test_what_the_worker_refuses_is_a_fault_of_the_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refusing = tmp_path / "python"
    refusing.write_text("#!/bin/sh\necho '[\"plan.topology: there is none\"]'; exit 3\n")
    refusing.chmod(0o755)
    monkeypatch.setattr(compiled.sys, "executable", str(refusing))
    with pytest.raises(ConfigError, match="there is none"):
        compiled.compiled(config_of(), tmp_path / "cache")


def test_a_missing_compiler_is_named_with_its_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topology.importlib.util, "find_spec", lambda name: None)
    (fault,) = topology.compiler_faults(V5P)
    assert "libtpu" in fault
    assert "make compilers" in fault


def test_topologies_and_targets() -> None:
    assert num_devices(CHIPS["tpu7x"], "8x8x16") == 2048
    assert num_devices(CHIPS["h200"], "8x8") == 64
    for name in ("0x4x4", "axbxc", "4x4", ""):
        with pytest.raises(ConfigError, match="known are"):
            num_devices(V5P, name)
    assert "device_memory_size: 151397597184" in gpu_target(CHIPS["h200"])
    assert "device_memory_size: 84942979072" in gpu_target(CHIPS["h100"])


def test_run_of_a_plan_is_the_config_without_its_section() -> None:
    config = config_of()
    assert "[plan]" in to_toml(config)
    assert "[plan]" not in to_toml(run_of(config))
