"""What a lowered program launches: reads the custom calls that jax-triton writes into StableHLO.

jaxlib ships no schema for their message, TritonAnyKernelCall, so the fields are taken by number.
"""

import zlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax

Fields = dict[int, list[Any]]


@dataclass(frozen=True)
class Launch:
    """One launch of a Triton kernel."""

    kernel: str
    grid: tuple[int, int, int]
    num_warps: int
    shared_bytes: int
    compute_capability: int
    zeroed_bytes: tuple[int, ...]
    """Of each array: how much is set to zero before the launch."""
    ptx: str


def launches(lowered: jax.stages.Lowered) -> list[Launch]:
    """Return the launches of a program in the order of its text."""
    calls = [
        op for op in _operations(lowered.compiler_ir("stablehlo").operation) if _target(op) == "triton_kernel_call"
    ]
    return [_launch(zlib.decompress(op.attributes["backend_config"].value_bytes)) for op in calls]


def _operations(operation: Any) -> Iterator[Any]:
    for region in operation.regions:
        for block in region:
            for inner in block:
                yield inner.operation
                yield from _operations(inner.operation)


def _target(operation: Any) -> str:
    return operation.attributes["call_target_name"].value if operation.name == "stablehlo.custom_call" else ""


def _launch(message: bytes) -> Launch:
    call = _fields(_fields(message)[1][0])
    kernel = _fields(call[1][0])
    arrays = [_fields(_fields(parameter)[1][0]) for parameter in call[5]]
    return Launch(
        kernel=kernel[1][0].decode(),
        grid=(_first(call, 2), _first(call, 3), _first(call, 4)),
        num_warps=_first(kernel, 2),
        shared_bytes=_first(kernel, 3),
        compute_capability=_first(kernel, 6),
        zeroed_bytes=tuple(_first(array, 1) for array in arrays),
        ptx=kernel[4][0].decode(),
    )


def _first(fields: Fields, number: int) -> int:
    return fields[number][0] if fields[number] else 0  # zeros are not written


def _fields(message: bytes) -> Fields:
    """Decode the wire format of protocol buffers: numbers and length-delimited bytes."""
    found: Fields = defaultdict(list)
    position = 0

    def number() -> int:
        nonlocal position
        value = shift = 0
        while True:
            byte = message[position]
            position += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while position < len(message):
        key = number()
        if key & 7 == 0:
            found[key >> 3].append(number())
        else:
            assert key & 7 == 2, f"field {key >> 3} has wire type {key & 7}"
            size = number()
            found[key >> 3].append(message[position : position + size])
            position += size
    return found
