"""Compiled HLO text -> computations of instructions. Knows what a line says, not what it costs."""

import math
import re
from dataclasses import dataclass

ITEM_BYTES = {
    "pred": 1.0,
    **dict.fromkeys(("s4", "u4"), 0.5),
    **dict.fromkeys(("s8", "u8", "f8e4m3fn", "f8e5m2", "f8e4m3", "f8e4m3b11fnuz", "f8e8m0fnu"), 1.0),
    **dict.fromkeys(("bf16", "f16", "s16", "u16"), 2.0),
    **dict.fromkeys(("f32", "s32", "u32"), 4.0),
    **dict.fromkeys(("f64", "s64", "u64"), 8.0),
}
"""Bytes of one number."""

_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\](\{[^}]*\})?")
_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = ")


@dataclass(frozen=True, slots=True)
class Array:
    """One array of a shape, for example bf16[8,128]{1,0:T(8,128)(2,1)S(1)}."""

    dtype: str
    dims: tuple[int, ...]
    is_on_chip: bool
    """In the memory of the core (layout S(1) and up), not in HBM."""

    @property
    def num_bytes(self) -> float:
        """Bytes without padding."""
        return math.prod(self.dims) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Instruction:
    """One line: %name = shape opcode(operands), attributes."""

    name: str
    opcode: str
    shape: str
    operands: tuple[str, ...]
    attributes: str
    """What follows the operands; of constants and parameters the value or number in parentheses, too."""
    is_root: bool

    @property
    def arrays(self) -> list[Array]:
        """Arrays of the result; several if it is a tuple."""
        return arrays_of(self.shape)

    @property
    def dims(self) -> tuple[int, ...]:
        """Dimensions of the only, or first, array of the result."""
        return self.arrays[0].dims

    def called(self, key: str) -> str:
        """Return the computation that an attribute names, for example called("body")."""
        found = re.search(rf"{key}=%?([\w.\-]+)", self.attributes)
        if not found:
            raise ValueError(f"HLO instruction {self.name} ({self.opcode}): no attribute {key}")
        return found[1]

    @property
    def op_name(self) -> str:
        """Where in the traced program it comes from: names of functions and scopes, separated by slashes."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found[1] if found else ""


Computation = dict[str, Instruction]


@dataclass(frozen=True)
class Module:
    """A compiled program."""

    computations: dict[str, Computation]
    entry: str


def arrays_of(shape: str) -> list[Array]:
    """Return the arrays of a shape; tokens and the like are none."""
    return [
        Array(dtype, tuple(int(n) for n in dims.split(",") if n), bool(re.search(r"S\([1-9]", layout or "")))
        for dtype, dims, layout in _ARRAY.findall(shape)
        if dtype in ITEM_BYTES
    ]


def num_bytes(shape: str, hbm_only: bool = False) -> float:
    """Return the bytes of all arrays of a shape."""
    return sum(array.num_bytes for array in arrays_of(shape) if not (hbm_only and array.is_on_chip))


def parse(text: str) -> Module:
    """Parse the text of a compiled program.

    Raises:
        ValueError: it has no entry computation.
    """
    computations: dict[str, Computation] = {}
    entry = ""
    name, pending = "", ""

    def finish() -> None:
        nonlocal pending
        instruction = _instruction(pending) if pending and name else None
        if instruction:
            computations[name][instruction.name] = instruction
        pending = ""

    for line in text.split("\n"):
        if line and not line[0].isspace() and (head := _COMPUTATION.match(line)):
            finish()
            name = head[2]
            computations[name] = {}
            entry = name if head[1] else entry
        elif line == "}":
            finish()
            name = ""
        elif _INSTRUCTION.match(line):
            finish()
            pending = line
        elif pending:
            pending += " " + line  # a value with line breaks
    if not entry:
        raise ValueError("no ENTRY computation in the HLO text; expected compiled.as_text()")
    return Module(computations=computations, entry=entry)


def _instruction(line: str) -> Instruction | None:
    head = _INSTRUCTION.match(line)
    if head is None:
        return None
    rest = line[head.end() :]
    end = _closing(rest) + 1 if rest.startswith("(") else rest.index(" ")
    shape, rest = rest[:end], rest[end:].lstrip()
    opcode = re.match(r"([\w\-]+)\(", rest)
    if not opcode:
        return None
    rest = rest[opcode.end() - 1 :]
    end = _closing(rest) + 1
    operands = tuple(re.findall(r"%([\w.\-]+)", rest[:end]))
    attributes = rest if opcode[1] in ("constant", "parameter") else rest[end:]
    return Instruction(head[2], opcode[1], shape, operands, attributes, bool(head[1]))


def _closing(text: str) -> int:
    """Return where the parenthesis that opens the text is closed."""
    depth = 0
    for i, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return i
    return len(text) - 1
