"""Ahead-of-time compilation: every variant that ships keeps its promises, and the checks find what breaks them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from conftest import DEVICE
from kernels import aot
from kernels.aot import Outcome, Variant
from kernels.gate.cases import VARIANTS

ROOT = Path(aot.__file__).parent.parent
GOOD = {"registers": 64, "stack": 0, "shared": 1024, "wide_loads": 4, "loads": 9, "wide_stores": 1, "stores": 2}
GOOD = {**GOOD, "spills": 0, "wgmma": 0, "mma": 2, "redux": 5, "instructions": 700}


def variant(**changes) -> Variant:
    fields = {"op": "gate", "name": "one", "fn": VARIANTS[0].fn, "signature": {}, "constexprs": {}}
    return Variant(**{**fields, **changes})


@pytest.mark.skipif(DEVICE != "cpu", reason="a GPU compiles by itself")
def test_every_variant_that_ships_keeps_its_promises_on_sm_90():
    command = [sys.executable, "-c", "import sys; from kernels import aot; sys.exit(aot.main())"]
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(Path.home())}  # without TRITON_INTERPRET
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    print(run.stdout, run.stderr)  # shown when the test fails: the table and its difference to RESOURCES.csv
    assert run.returncode == 0 and "0 variants at fault" in run.stdout and "0 differences" in run.stdout


SABOTAGE = """
import dataclasses, sys
from kernels import aot
from kernels.grouped_matmul.cases import VARIANTS as matmuls
from kernels.permute.cases import VARIANTS as permutes

def spoiled(variant, **changes):
    constexprs = {**variant.constexprs, **changes.pop("constexprs", {})}
    return dataclasses.replace(variant, constexprs=constexprs, **changes)

large = next(v for v in matmuls if "rows128" in v.name)
for variant in (
    spoiled(large, constexprs={"BLOCK_F": 256}, num_warps=4),
    spoiled(permutes[0], multiples_of_16=()),
    spoiled(large, num_stages=9),
    spoiled(large, constexprs={"BLOCK_F": 96}),
):
    print(aot.outcome_of(variant, "sm_90").faults)
"""


@pytest.mark.skipif(DEVICE != "cpu", reason="a GPU compiles by itself")
def test_what_spills_is_narrow_or_does_not_fit_is_found_by_the_true_compiler():
    """Kernels that ship, spoiled: sums beyond the registers, rows of unknown alignment, stages beyond shared memory."""
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(Path.home())}
    command = [sys.executable, "-c", SABOTAGE]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    spills, narrow, shared, error = run.stdout.splitlines()
    assert "bytes of stack" in spills
    assert "loads are 16 bytes wide, promised 1" in narrow
    assert "shared memory" in shared and "> 232448" in shared
    assert "BLOCK_F" in error or "power of 2" in error


TICKET = """
from kernels import aot
from kernels.align.cases import VARIANTS as counts
from kernels.gate_align.cases import VARIANTS as fused

for variant in (counts[0], fused[0]):
    text = aot.compile_variant(variant, "sm_90").asm["ptx"]
    before, after = text.split("atom.global.gpu.acq_rel.add.u32")
    written, read = before[before.rindex("st.global"):], after[: after.index("ld.global")]
    print("bar.sync" in written, "bar.sync" in read, "ld.global.cg" in after, text.count("atom.global"), "ld.global.nc" in text)
"""


@pytest.mark.skipif(DEVICE != "cpu", reason="reads what a GPU would run")
def test_the_last_program_sees_what_the_others_wrote():
    """In the machine's own words, which no interpreter runs: all threads write, a barrier, one atomic that releases and
    acquires on the whole GPU, a barrier, and only then loads, past the first-level cache and never through the
    read-only one."""
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(Path.home())}
    command = [sys.executable, "-c", TICKET]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.splitlines() == ["True True True 1 False"] * 2


@pytest.mark.skipif(DEVICE != "cpu", reason="what a GPU launches, it compiles")
def test_every_launch_of_what_ships_is_a_variant_of_the_table():
    """Recorded with Triton's own rules: else the gate would prove, and the warm cache hold, what never runs."""
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(Path.home())}
    command = [sys.executable, str(Path(__file__).with_name("launches.py"))]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0 and " 0 missing" in run.stdout, run.stdout + run.stderr


@pytest.mark.parametrize(
    ("row", "promise", "fault"),
    [
        ({"stack": 8}, {}, "spills: 8 bytes of stack, 0 local accesses"),
        ({"spills": 3}, {}, "spills: 0 bytes of stack, 3 local accesses"),
        ({"shared": 232_449}, {}, "shared memory 232449 > 232448"),
        ({}, {"min_wide_loads": 5}, "4 of 9 loads are 16 bytes wide, promised 5"),
        ({}, {"min_wide_stores": 2}, "1 of 2 stores are 16 bytes wide, promised 2"),
        ({}, {"needs": ("HGMMA",)}, "no HGMMA instruction"),
        ({"redux": 0}, {"needs": ("REDUX",)}, "no REDUX instruction"),
    ],
)
def test_a_broken_promise_is_a_fault(row, promise, fault):
    assert aot.faults_of(variant(**promise), {**GOOD, **row}) == [fault]


def test_kept_promises_are_no_fault():
    kept = variant(min_wide_loads=4, min_wide_stores=1, needs=("HMMA", "REDUX"))
    assert aot.faults_of(kept, GOOD) == []


def test_a_variant_must_name_every_argument():
    first = VARIANTS[0]
    with pytest.raises(ValueError, match=r"gate one: lacks \['T'.*has unknown \['typo'\]"):
        short = {name: kind for name, kind in first.signature.items() if name != "T"}
        aot.source_of(variant(signature={**short, "typo": "i32"}, constexprs=first.constexprs))


def test_an_unknown_operation_is_refused():
    with pytest.raises(ValueError, match=r"op='gates': must be one of .*gate"):
        aot.variants_of("gates")
    assert {"gate", "align", "gate_align", "permute", "grouped_matmul"} <= set(aot.operations())


def test_table_round_trip_and_differences(tmp_path, monkeypatch):
    monkeypatch.setattr(aot, "RESOURCES", tmp_path / "RESOURCES.csv")
    aot.write_table({("gate", "b"): GOOD, ("gate", "a"): GOOD, ("align", "c"): GOOD})
    assert [line.split(",")[:2] for line in aot.RESOURCES.read_text().splitlines()[1:]] == [
        ["align", "c"],
        ["gate", "a"],
        ["gate", "b"],
    ]
    assert aot.read_table()["gate", "a"] == GOOD
    outcomes = [Outcome("gate", "a", {**GOOD, "registers": 80}), Outcome("gate", "new", GOOD)]
    lines = aot.differences(outcomes, ["gate"])
    assert "- gate a: registers 64 -> 80" in lines and "- gate b: no longer there" in lines
    assert any(line.startswith("- gate new: registers none -> 64") for line in lines) and len(lines) == 3


def test_a_difference_to_the_committed_table_is_a_failure_until_it_is_renewed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(aot, "RESOURCES", tmp_path / "RESOURCES.csv")
    aot.write_table({("gate", "a"): GOOD, ("align", "c"): GOOD})
    outcomes = [Outcome("gate", "a", {**GOOD, "registers": 80})]
    assert aot.compare(outcomes, ["gate"], is_renewed=False)
    assert "registers 64 -> 80" in capsys.readouterr().out
    monkeypatch.setattr(aot.versions, "TRITON", "3.5.0")
    assert not aot.compare(outcomes, ["gate"], is_renewed=False)
    assert "differences are a warning here" in capsys.readouterr().out
    monkeypatch.undo()
    monkeypatch.setattr(aot, "RESOURCES", tmp_path / "RESOURCES.csv")
    assert not aot.compare(outcomes, ["gate"], is_renewed=True)
    assert not aot.compare(outcomes, ["gate"], is_renewed=False)
    assert aot.read_table() == {("gate", "a"): {**GOOD, "registers": 80}, ("align", "c"): GOOD}


def die(*_: object) -> None:
    os._exit(1)


def test_a_compiler_that_dies_is_a_fault_and_not_the_end(monkeypatch):
    monkeypatch.setattr(aot, "examine", die)
    monkeypatch.setattr(aot, "variants_of", lambda op: VARIANTS[:2])
    outcomes = aot.examine_all(["gate"], "sm_90", num_workers=1)
    assert [o.name for o in outcomes] == [v.name for v in VARIANTS[:2]]
    assert all("the compiler died" in o.faults[0] for o in outcomes)


def test_every_shipped_variant_is_in_the_committed_table():
    shipped = {(op, v.name) for op in aot.operations() for v in aot.variants_of(op)}
    assert shipped == set(aot.read_table()), "run python -m kernels.aot --write"


def test_compiling_while_interpreting_is_refused(capsys):
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled here")
    with pytest.raises(SystemExit):
        aot.main([])
    assert "TRITON_INTERPRET is set" in capsys.readouterr().err
