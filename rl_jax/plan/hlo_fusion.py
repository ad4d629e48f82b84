"""HBM bytes of a fusion: what crosses its border, where a slice of an operand counts as the slice.

The TPU compiler nests fusions: an operand may be sliced in a fusion inside the fusion.
"""

import re
from collections.abc import Mapping

from rl_jax.plan.hlo import Computation, Instruction, num_bytes

_SLICING = ("dynamic-slice", "gather", "slice")
_PASSING = ("bitcast", "copy")


def fusion_bytes(fusion: Instruction, table: Computation, computations: Mapping[str, Computation]) -> float:
    """Return the bytes that a fusion reads and writes.

    An operand that is only sliced counts as its slices, one that is only updated in place does not count; a result that
    is an update in place counts as the update.
    """
    body = computations[fusion.called("calls")]
    read = 0.0
    for place, name in enumerate(fusion.operands):
        if name in table:
            whole = num_bytes(table[name].shape, hbm_only=True)
            sliced = _sliced_bytes(_parameter(body, place), body, computations)
            read += whole if sliced is None else min(whole, sliced)
    whole = num_bytes(fusion.shape, hbm_only=True)
    return read + min(whole, _written_bytes(body, computations))


def _parameter(body: Computation, place: int) -> str:
    found = (i.name for i in body.values() if i.opcode == "parameter" and re.match(rf"\({place}\)", i.attributes))
    return next(found, "")


def _sliced_bytes(name: str, body: Computation, computations: Mapping[str, Computation]) -> float | None:
    """Return the bytes of the slices that are taken of a value; None where all of it is used."""
    total = 0.0
    for i in body.values():
        for place, operand in enumerate(i.operands):
            part = _use(i, place, body, computations) if operand == name else 0.0
            if part is None:
                return None
            total += part
    return total


def _use(i: Instruction, place: int, body: Computation, computations: Mapping[str, Computation]) -> float | None:
    """Return the bytes that an instruction needs of an operand; None for all."""
    if i.opcode in _PASSING and not i.is_root:
        return _sliced_bytes(i.name, body, computations)
    if i.opcode in _SLICING and place == 0:
        return num_bytes(i.shape)
    if i.opcode == "dynamic-update-slice" and place == 0:
        return 0.0
    if i.opcode == "fusion":
        inner = computations[i.called("calls")]
        return _sliced_bytes(_parameter(inner, place), inner, computations)
    return None


def _written_bytes(body: Computation, computations: Mapping[str, Computation]) -> float:
    root = next(i for i in body.values() if i.is_root)
    results = [body[name] for name in root.operands if name in body] if root.opcode == "tuple" else [root]
    return sum(_result_bytes(i, body, computations) for i in results)


def _result_bytes(i: Instruction, body: Computation, computations: Mapping[str, Computation]) -> float:
    shape = i.shape
    while i.opcode in _PASSING and i.operands and i.operands[0] in body:
        i = body[i.operands[0]]
    if i.opcode == "dynamic-update-slice" and i.operands[1] in body:
        return num_bytes(body[i.operands[1]].shape)
    if i.opcode == "fusion":
        return _written_bytes(computations[i.called("calls")], computations)
    return num_bytes(shape)
