"""What a compiled program does on one device: FLOPs, HBM bytes, bytes on the wire; loop bodies times their trip counts.

The compiler's own cost analysis counts a loop body once. Here a loop counts as often as it runs, a loop or branch that
depends on data as often as the caller expects (`expected`), and what cannot be counted becomes a warning.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from rl_jax.plan.groups import Group, group_of
from rl_jax.plan.hlo import Computation, Instruction, Module, num_bytes
from rl_jax.plan.hlo_fusion import fusion_bytes
from rl_jax.plan.matmul_flops import convolution_flops, dot_flops

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute")
"""Collectives; each also comes as an asynchronous <kind>-start."""

FREE = frozenset(
    [
        "parameter",
        "constant",
        "get-tuple-element",
        "tuple",
        "bitcast",
        "after-all",
        "partition-id",
        "iota",
        "broadcast",
        "opt-barrier",
    ]
)
"""Opcodes that move nothing."""

Wire = tuple[str, Group]
"""Kind of a collective and the devices that take part."""


@dataclass
class Cost:
    """Sums over one run of a computation on one device.

    Example: a loop of 48 layers, each with one all-gather of 3 MB over 8 devices, has collectives
    {("all-gather", group): 48 * 7 * 3e6}.
    """

    matmul_flops: float = 0.0
    """Of dots and convolutions."""
    kernel_flops: float = 0.0
    """That kernels (custom calls) declare."""
    hbm_bytes: float = 0.0
    """Read and written."""
    collectives: Counter[Wire] = field(default_factory=Counter)
    """Bytes that one device sends."""
    num_collectives: Counter[Wire] = field(default_factory=Counter)
    kernels: Counter[str] = field(default_factory=Counter)
    """Calls of kernels that declare no FLOPs, by name."""
    warnings: set[str] = field(default_factory=set)

    def add(self, other: "Cost", times: float = 1.0) -> None:
        """Add `other`, `times` times."""
        self.matmul_flops += other.matmul_flops * times
        self.kernel_flops += other.kernel_flops * times
        self.hbm_bytes += other.hbm_bytes * times
        for mine, theirs in (
            (self.collectives, other.collectives),
            (self.num_collectives, other.num_collectives),
            (self.kernels, other.kernels),
        ):
            for key, value in theirs.items():
                mine[key] += value * times  # type: ignore[assignment]
        self.warnings |= other.warnings


def cost_of(module: Module, mesh: Mapping[str, int], expected: Mapping[str, float]) -> Cost:
    """Count a program.

    Args:
        mesh: axis -> size, in order.
        expected: name of a jax.named_scope -> how often a loop inside it runs whose length depends on data, or the
            share of its conditionals that take the costly branch.
    """
    return _Counting(module, mesh, expected).cost(module.entry, is_fused=False)


class _Counting:
    def __init__(self, module: Module, mesh: Mapping[str, int], expected: Mapping[str, float]):
        self._computations = module.computations
        self._mesh = mesh
        self._expected = expected
        self._known: dict[tuple[str, bool], Cost] = {}

    def cost(self, name: str, is_fused: bool) -> Cost:
        """Return the cost of a computation; inside a fusion nothing but its border is HBM traffic."""
        if (name, is_fused) not in self._known:
            total, table = Cost(), self._computations[name]
            for instruction in table.values():
                self._visit(total, instruction, table, is_fused)
            self._known[name, is_fused] = total
        return self._known[name, is_fused]

    def _visit(self, total: Cost, i: Instruction, table: Computation, is_fused: bool) -> None:
        kind = _kind(i.opcode)
        if i.opcode == "while":
            times, warning = self._trips(i)
            total.add(self.cost(i.called("body"), False), times)
            total.warnings |= warning
        elif i.opcode == "conditional":
            share, warning = self._share(i)
            total.add(max(map(self._branch, _branches(i)), key=_size), share)
            total.warnings |= warning
        elif i.opcode in ("call", "async-start"):
            total.add(self.cost(i.called("(?:to_apply|calls|called_computation)"), False))
        elif i.opcode == "fusion":
            self._fusion(total, i, table)
        elif i.opcode == "custom-call":
            _kernel(total, i, table)
        else:
            if i.opcode in ("dot", "convolution"):
                total.matmul_flops += (dot_flops if i.opcode == "dot" else convolution_flops)(i, table)
            if kind:
                self._collective(total, kind, i, table)
            if not is_fused and i.opcode not in FREE and not i.opcode.endswith(("-done", "-update")):
                total.hbm_bytes += _border(i, table)

    def _branch(self, name: str) -> Cost:
        return self.cost(name, False)

    def _fusion(self, total: Cost, i: Instruction, table: Computation) -> None:
        name = i.called("calls")
        body = self._computations[name]
        if "all-reduce-scatter" in name:  # the TPU compiler's reduce-scatter
            reduce = next(one for one in body.values() if one.opcode == "all-reduce")
            self._collective(total, "reduce-scatter", reduce, body)
        else:
            inner = self.cost(name, True)
            total.add(
                Cost(
                    matmul_flops=inner.matmul_flops,
                    kernel_flops=inner.kernel_flops,
                    collectives=inner.collectives,
                    num_collectives=inner.num_collectives,
                )
            )
        total.hbm_bytes += fusion_bytes(i, table, self._computations)

    def _collective(self, total: Cost, kind: str, i: Instruction, table: Computation) -> None:
        wire = (kind, group_of(i, self._mesh))
        total.collectives[wire] += wire_bytes(kind, i, table, wire[1].size)  # type: ignore[assignment]
        total.num_collectives[wire] += 1

    def _trips(self, loop: Instruction) -> tuple[float, set[str]]:
        known = re.search(r'known_trip_count"?:\{"n":"(\d+)"', loop.attributes)
        if known:
            return int(known[1]), set()
        scope = self._scope(loop)
        if scope:
            return self._expected[scope], set()
        constants = list(self._constants(loop.called("condition")))
        if constants:  # the TPU compiler's text has no trip counts; loops of scan count from 0 by 1
            return max(constants), set()
        return 1, {f"loop of unknown length, counted once: {loop.op_name or loop.name}"}

    def _share(self, conditional: Instruction) -> tuple[float, set[str]]:
        scope = self._scope(conditional)
        if scope:
            return self._expected[scope], set()
        return 1, {f"conditional, costliest branch counted: {conditional.op_name or conditional.name}"}

    def _scope(self, i: Instruction) -> str | None:
        """Return the innermost expected scope that the instruction stands directly in, loops and branches apart."""
        words = [word for part in i.op_name.split("/") for word in re.findall(r"[\w.]+", part)]
        return next((word for word in reversed(words) if word in self._expected), None)

    def _constants(self, name: str) -> Iterator[int]:
        for i in self._computations[name].values():
            if (
                i.opcode == "constant"
                and i.shape.startswith("s32[]")
                and (value := re.match(r"\((-?\d+)\)", i.attributes))
            ):
                yield int(value[1])
            for called in re.findall(r"calls=%?([\w.\-]+)", i.attributes):
                yield from self._constants(called)


def wire_bytes(kind: str, i: Instruction, table: Computation, size: int) -> float:
    """Return the bytes that each of `size` devices sends; of a ragged all-to-all at most, the text has no counts."""
    operands = [num_bytes(table[name].shape) for name in i.operands if name in table]
    if kind == "all-gather":
        return sum(operands) * (size - 1)
    if kind == "collective-permute":
        return operands[0]
    moved = min(operands[:2]) if kind == "ragged-all-to-all" else sum(operands)
    return moved * (size - 1) / size * (2 if kind == "all-reduce" else 1)


def _kind(opcode: str) -> str | None:
    plain = opcode.removesuffix("-start")
    return plain if plain in KINDS else None


def _branches(i: Instruction) -> list[str]:
    listed = re.search(r"branch_computations=\{([^}]*)\}", i.attributes)
    if listed:
        return re.findall(r"%?([\w.\-]+)", listed[1])
    return re.findall(r"(?:true|false)_computation=%?([\w.\-]+)", i.attributes)


def _size(cost: Cost) -> tuple[float, float]:
    return cost.matmul_flops + cost.kernel_flops, cost.hbm_bytes


def _kernel(total: Cost, i: Instruction, table: Computation) -> None:
    estimate = re.search(r'"cost_estimate":\{"flops":"?(\d+)"?.*?"bytes_accessed":"?(\d+)"?', i.attributes)
    if estimate:
        total.kernel_flops += int(estimate[1])
        total.hbm_bytes += int(estimate[2])
        return
    target = re.search(r'custom_call_target="([^"]*)"', i.attributes)
    if not target or target[1] in ("Sharding", "AllocateBuffer", "AssumeGatherIndicesInBound"):
        return
    total.kernels[f"{target[1]}: {i.op_name}"] += 1
    total.hbm_bytes += _border(i, table)


def _border(i: Instruction, table: Computation) -> float:
    # The result of an asynchronous start is a tuple of its operand and what it will make.
    shape = i.shape.split("),")[0] if i.opcode.endswith("-start") else i.shape
    operands = (table[name] for name in i.operands if name in table)
    return num_bytes(shape, hbm_only=True) + sum(
        num_bytes(o.shape, hbm_only=True) for o in operands if o.opcode != "tuple"
    )
