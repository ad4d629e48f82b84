"""Compiles every kernel that ships for a GPU that is not there, and refuses what would be slow on one that is.

    python -m kernels.aot [--target sm_90] [--op gate] [--write]

Each operation's cases.py lists `VARIANTS`: the operation x dtype x shape table that ships. On sm_90 a variant fails on a
compile error, on spilled registers, on shared memory above the limit (which Triton checks only on a device), and on
fewer 16-byte accesses or matrix instructions than it promises. sm_100 and gfx942 are reports. The measured resources
are committed as RESOURCES.csv; a difference to it is printed and fails as well (but with another Triton than the one it
was made with), and --write renews it, so that no change of registers goes unseen.
"""

import argparse
import csv
import importlib
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels import versions

ROOM = Path(__file__).parent
RESOURCES = ROOM / "RESOURCES.csv"
TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
TARGETS = {
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
SHARED_LIMIT_BYTES = 232_448  # a block of sm_90 may have 227 KiB
INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_]+(?:\.[A-Za-z0-9_]+)*)", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One kernel with one choice of types, constants and warps: what one launch of the library compiles.

    Example: Variant(op="gate", name="E128 bf16", fn=kernel.gate, signature={"logits_pointer": "*bf16", "T": "i32"},
    constexprs={"E": 128}, num_warps=4, min_wide_loads=1).
    """

    op: str
    """Name of the operation's folder."""
    name: str
    """Unique inside the operation; shape and dtype for people."""
    fn: Any
    """The @triton.jit function."""
    signature: Mapping[str, str]
    """Type of every argument that is no constexpr: "*bf16", "*fp8e4nv", "*i32", "*i64", "i32", "fp32"."""
    constexprs: Mapping[str, Any]
    """Value of every constexpr argument; with `signature` it covers all arguments of `fn`."""
    multiples_of_16: tuple[str, ...] = ()
    """Integer arguments that a launch finds divisible by 16 (strides), as Triton does unless told not to specialise.
    Pointers are taken to be aligned to 16 bytes; a launch with one that is not compiles a kernel of its own, narrower."""
    num_warps: int = 4
    num_stages: int = 3
    min_wide_loads: int = 0
    """Loads of 16 bytes for each thread (LDG.128 or LDGSTS.128) that the machine code must hold."""
    min_wide_stores: int = 0
    """Stores of 16 bytes (STG.128) that the machine code must hold."""
    needs: tuple[str, ...] = ()
    """Beginnings of instructions that must occur, such as "HGMMA" or "REDUX"."""


@dataclass(frozen=True)
class Outcome:
    """What the compiler made of one variant: one row of RESOURCES.csv, or why there is none."""

    op: str
    name: str
    row: Mapping[str, int] = field(default_factory=dict)
    faults: tuple[str, ...] = ()


def source_of(variant: Variant) -> ASTSource:
    """Return what Triton compiles for `variant`, the same as a launch does, so that the caches agree.

    Raises:
        ValueError: an argument of the kernel has no type and no value, or the variant names one that it lacks.
    """
    given = {**variant.signature, **variant.constexprs}
    arguments = list(variant.fn.arg_names)
    if set(given) != set(arguments):
        raise ValueError(
            f"{variant.op} {variant.name}: lacks {sorted(set(arguments) - set(given))}, "
            f"has unknown {sorted(set(given) - set(arguments))}; the kernel takes {arguments}"
        )
    signature = {name: variant.signature.get(name, "constexpr") for name in arguments}
    aligned = {n for n, kind in signature.items() if kind.startswith("*")} | set(variant.multiples_of_16)
    attributes = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(arguments) if n in aligned}
    constants = {(i,): variant.constexprs[n] for i, n in enumerate(arguments) if n in variant.constexprs}
    return ASTSource(variant.fn, signature, constants, attributes)


def compile_variant(variant: Variant, target: str) -> Any:
    """Return the compiled kernel; a cache at TRITON_CACHE_DIR is read and filled."""
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages}
    return triton.compile(source_of(variant), target=TARGETS[target], options=options)


def nvidia_resources(kernel: Any) -> dict[str, int]:
    """Return registers, stack and the count of each kind of instruction that tells speed."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = run_tool("cuobjdump", "-res-usage", file.name)
        code = run_tool("nvdisasm", "-c", file.name)
    numbers = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", usage)
    if numbers is None:
        raise ValueError(f"cuobjdump -res-usage printed no usage: {usage[-200:]!r}")
    counts = Counter(INSTRUCTION.findall(code))

    def count(*patterns: str) -> int:
        return sum(n for name, n in counts.items() if any(re.match(p, name) for p in patterns))

    return {
        "registers": int(numbers[1]),
        "stack": int(numbers[2]),
        "shared": kernel.metadata.shared,
        "wide_loads": count(r"LDG\..*128", r"LDGSTS\..*128"),
        "loads": count("LDG"),
        "wide_stores": count(r"STG\..*128"),
        "stores": count("STG"),
        "spills": count("LDL", "STL"),
        "wgmma": count("HGMMA", "QGMMA", "UTC.*MMA"),
        "mma": count("HMMA", "QMMA", "IMMA"),
        "redux": count("REDUX", "CREDUX"),
        "instructions": sum(counts.values()),
    }


def amd_resources(kernel: Any) -> dict[str, int]:
    """Return registers, spills and matrix instructions from the assembler text."""
    text = kernel.asm["amdgcn"]

    def number(name: str) -> int:
        found = re.search(rf"\.{name}:\s+(\d+)", text)
        return int(found[1]) if found else 0

    return {
        "registers": number("vgpr_count"),
        "stack": number("private_segment_fixed_size"),
        "shared": kernel.metadata.shared,
        "spills": number("vgpr_spill_count") + number("sgpr_spill_count"),
        "mma": len(re.findall("v_mfma", text)),
        "instructions": text.count("\n"),
    }


def run_tool(name: str, *arguments: str) -> str:
    """Return the output of a program that ships inside the triton wheel."""
    return subprocess.run([TOOLS / name, *arguments], capture_output=True, text=True, check=True).stdout


def faults_of(variant: Variant, row: Mapping[str, int]) -> list[str]:
    """Return what breaks the promise of `variant`, each with the number found."""
    faults = []
    if row["stack"] or row["spills"]:
        faults.append(f"spills: {row['stack']} bytes of stack, {row['spills']} local accesses")
    if row["shared"] > SHARED_LIMIT_BYTES:
        faults.append(f"shared memory {row['shared']} > {SHARED_LIMIT_BYTES}")
    for kind in ("loads", "stores"):
        promised = getattr(variant, f"min_wide_{kind}")
        if row[f"wide_{kind}"] < promised:
            faults.append(f"{row[f'wide_{kind}']} of {row[kind]} {kind} are 16 bytes wide, promised {promised}")
    columns = {"HGMMA": "wgmma", "HMMA": "mma", "REDUX": "redux"}
    faults += [f"no {name} instruction" for name in variant.needs if not row[columns[name]]]
    return faults


def examine(op: str, index: int, target: str) -> Outcome:
    """Compile variant `index` of `op` and read its resources. Runs in a worker, which imports the table itself."""
    return outcome_of(variants_of(op)[index], target)


def outcome_of(variant: Variant, target: str) -> Outcome:
    """Compile a variant and read its resources; on sm_90 hold it to its promises."""
    try:
        kernel = compile_variant(variant, target)
    except Exception as error:  # noqa: BLE001 - whatever the compiler raises is this variant's fault, and is reported
        return Outcome(variant.op, variant.name, faults=(f"{type(error).__name__}: {str(error).strip()[-300:]}",))
    row = amd_resources(kernel) if target.startswith("gfx") else nvidia_resources(kernel)
    faults = faults_of(variant, row) if target == "sm_90" else []
    return Outcome(variant.op, variant.name, row, tuple(faults))


def operations() -> list[str]:
    """Return the names of all operations: folders with a cases.py."""
    return sorted(path.parent.name for path in ROOM.glob("*/cases.py"))


def variants_of(op: str) -> Sequence[Variant]:
    """Return the table of `op` that ships.

    Raises:
        ValueError: no such operation, or two of its variants share a name.
    """
    if op not in operations():
        raise ValueError(f"op={op!r}: must be one of {', '.join(operations())}")
    variants = importlib.import_module(f"kernels.{op}.cases").VARIANTS
    twice = [name for name, n in Counter(v.name for v in variants).items() if n > 1]
    if twice:
        raise ValueError(f"kernels/{op}/cases.py: variants of one name: {twice}")
    return variants


def examine_all(ops: Sequence[str], target: str, num_workers: int = 2) -> list[Outcome]:
    """Compile all variants of `ops` in worker processes; results in the order of the tables.

    A compiler that takes its process down with it is a fault of every variant that has no result by then.
    """
    jobs = [(op, index) for op in ops for index in range(len(variants_of(op)))]
    outcomes = []
    with ProcessPoolExecutor(num_workers) as pool:
        futures = [pool.submit(examine, op, index, target) for op, index in jobs]
        for (op, index), future in zip(jobs, futures, strict=True):
            try:
                outcomes.append(future.result())
            except BrokenProcessPool:
                name = variants_of(op)[index].name
                outcomes.append(Outcome(op, name, faults=("the compiler died here or in a variant beside it",)))
    return outcomes


def read_table() -> dict[tuple[str, str], dict[str, int]]:
    """Return the committed resources by (operation, variant)."""
    if not RESOURCES.exists():
        return {}
    with RESOURCES.open() as file:
        rows = list(csv.DictReader(file))
    return {(row.pop("op"), row.pop("name")): {key: int(value) for key, value in row.items()} for row in rows}


def write_table(table: Mapping[tuple[str, str], Mapping[str, int]]) -> None:
    """Write the resources, sorted, so that a change shows as a small difference."""
    lines = [{"op": op, "name": name, **row} for (op, name), row in sorted(table.items())]
    with RESOURCES.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(lines[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)


def differences(outcomes: Sequence[Outcome], ops: Sequence[str]) -> list[str]:
    """Return one line for each variant whose resources are not the committed ones."""
    committed = {key: row for key, row in read_table().items() if key[0] in ops}
    found = {(o.op, o.name): dict(o.row) for o in outcomes if o.row}
    lines = [f"- {op} {name}: no longer there" for op, name in committed.keys() - found.keys()]
    for key, row in found.items():
        old = committed.get(key, {})
        changed = [f"{c} {old.get(c, 'none')} -> {n}" for c, n in row.items() if old.get(c) != n]
        lines += [f"- {key[0]} {key[1]}: {', '.join(changed)}"] if changed else []
    return sorted(lines)


def show(outcome: Outcome) -> str:
    """Return one line: the variant, its resources, its faults."""
    numbers = " ".join(f"{key} {value}" for key, value in outcome.row.items())
    return f"{outcome.op:15s} {outcome.name:44s} {numbers} {'; '.join(outcome.faults)}".rstrip()


def main(argv: Sequence[str] | None = None) -> int:
    """Compile, print, compare; return 1 when a variant breaks its promise."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--target", choices=TARGETS, default="sm_90")
    parser.add_argument("--op", action="append", help="only this operation; may be repeated")
    parser.add_argument("--write", action="store_true", help="renew RESOURCES.csv (sm_90 only)")
    options = parser.parse_args(argv)
    if triton.knobs.runtime.interpret:
        parser.error("TRITON_INTERPRET is set: kernels are interpreted, not compiled; unset it")
    ops = options.op or operations()
    outcomes = examine_all(ops, options.target)
    print(f"triton {triton.__version__}, {options.target}, {len(outcomes)} variants")
    print("\n".join(map(show, outcomes)))
    faulty = [o for o in outcomes if o.faults]
    print(f"{len(faulty)} variants at fault")
    return int(bool(faulty) | compare(outcomes, ops, options.write and not faulty)) if options.target == "sm_90" else 0


def compare(outcomes: Sequence[Outcome], ops: Sequence[str], is_renewed: bool) -> bool:
    """Print what differs from the committed table, or renew it; return whether that is a failure."""
    changes = differences(outcomes, ops)
    print(f"{len(changes)} differences to {RESOURCES.name}", *changes, sep="\n")
    if is_renewed:
        kept = {key: row for key, row in read_table().items() if key[0] not in ops}
        write_table({**kept, **{(o.op, o.name): o.row for o in outcomes}})
        return False
    if triton.__version__ != versions.TRITON:
        print(f"{RESOURCES.name} was made with triton {versions.TRITON}: differences are a warning here")
        return False
    if changes:
        print(f"look at them, then renew {RESOURCES.name}: python -m kernels.aot --write")
    return bool(changes)


if __name__ == "__main__":
    sys.exit(main())
