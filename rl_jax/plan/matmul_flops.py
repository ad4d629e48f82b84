"""FLOPs of one dot or convolution of compiled HLO. The TPU compiler writes dots as convolutions."""

import math
import re
from dataclasses import dataclass

from rl_jax.plan.hlo import Computation, Instruction


def dot_flops(instruction: Instruction, table: Computation) -> float:
    """Return 2 * output * contracted."""
    left = table[instruction.operands[0]].dims
    found = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.attributes)
    contracted = [left[int(d)] for d in (found[1] if found else "").split(",") if d]
    return 2.0 * math.prod(instruction.dims) * math.prod(contracted)


def convolution_flops(instruction: Instruction, table: Computation) -> float:
    """Return 2 * output * contracted features * window taps that meet the input; padding and dilation do not count."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.attributes)
    if not labels:
        raise ValueError(f"convolution {instruction.name}: no dim_labels")
    left, right, out = (dict(zip(label, range(len(label)), strict=True)) for label in labels.groups())
    left_dims, right_dims = (table[name].dims for name in instruction.operands[:2])
    flops = 2.0 * math.prod(instruction.dims) * right_dims[right["i"]]
    windows = _windows(instruction.attributes)
    for place, key in enumerate(sorted(label for label in out if label.isdigit())):
        if place < len(windows):
            size_out = instruction.dims[out[key]]
            flops *= windows[place].taps(size_out, left_dims[left[key]]) / size_out
    return flops


@dataclass(frozen=True, kw_only=True)
class _Window:
    size: int = 1
    stride: int = 1
    low: int = 0
    """Padding before the first element."""
    input_dilation: int = 1
    window_dilation: int = 1

    def taps(self, num_out: int, num_in: int) -> int:
        """Count over all outputs the taps that fall on an element of the input."""
        if self.size == 1:
            return num_out
        last = (num_in - 1) * self.input_dilation
        starts = (o * self.stride - self.low for o in range(num_out))
        return sum(self._on_input(start, last) for start in starts)

    def _on_input(self, start: int, last: int) -> int:
        if self.window_dilation == 1:  # closed form: windows of the TPU compiler have thousands of taps
            low, high = max(start, 0), min(start + self.size - 1, last)
            first = -(-low // self.input_dilation)
            return max(0, high // self.input_dilation - first + 1) if high >= low else 0
        places = (start + tap * self.window_dilation for tap in range(self.size))
        return sum(0 <= place <= last and place % self.input_dilation == 0 for place in places)


def _windows(attributes: str) -> list[_Window]:
    found = re.search(r"window=\{([^}]*)\}", attributes)
    if not found:
        return []
    fields = dict(field.split("=") for field in found[1].split())
    num_dims = len(next(iter(fields.values())).split("x"))

    def of(name: str, default: str) -> list[str]:
        return fields[name].split("x") if name in fields else [default] * num_dims

    rows = zip(
        of("size", "1"), of("stride", "1"), of("pad", "0_0"), of("lhs_dilate", "1"), of("rhs_dilate", "1"), strict=True
    )
    return [
        _Window(
            size=int(size),
            stride=int(stride),
            low=int(pad.split("_")[0]),
            input_dilation=int(left),
            window_dilation=int(right),
        )
        for size, stride, pad, left, right in rows
    ]
