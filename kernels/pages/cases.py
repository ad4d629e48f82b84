"""Page sizes that ship, and how one program moves them."""

from dataclasses import dataclass

import triton.language as tl

from kernels.aot import Variant
from kernels.pages import kernel

BLOCK_BYTES = 8192
"""Bytes that one program moves: four loads of 16 bytes in flight for each of 128 threads."""
NUM_WARPS = 4


@dataclass(frozen=True)
class Shape:
    """One kind of page: bytes of one layer's page, as vLLM lays it out."""

    name: str
    page_bytes: int
    num_layers: int


SHAPES = (
    Shape("16x8x128 K+V bf16", 65536, 36),
    Shape("16x8x128 K+V fp8", 32768, 36),
    Shape("64x4x128 K+V bf16", 131072, 94),
    Shape("64xMLA576 bf16", 73728, 61),
    Shape("64xMLA656 fp8", 41984, 61),
)
NUM_PAGES = (1, 16, 64, 256, 1024)
"""Pages of one move, for the bench; PCIe against multiprocessors crosses inside this range."""


def variant(name: str, fn, pointers: dict[str, str], unit_bytes: int, **constexprs) -> Variant:
    """Return one row of the table: whole words, and 16-byte accesses where the unit is 16 bytes."""
    word_bytes, is_wide = min(unit_bytes, 8), unit_bytes == 16
    word = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}[word_bytes]
    wide = BLOCK_BYTES // 16 // (32 * NUM_WARPS) if is_wide else 0
    return Variant(
        op="pages",
        name=name,
        fn=fn,
        signature={"bases_L": "*i64", **pointers, "num_pages": "i32", "page_units": "i32", "step_units": "i32"},
        constexprs={"WORD": word, "UNIT": unit_bytes // word_bytes, "BLOCK": BLOCK_BYTES // word_bytes, **constexprs},
        multiples_of_16=("page_units", "step_units") if is_wide else (),
        num_warps=NUM_WARPS,
        min_wide_loads=wide,
        min_wide_stores=wide,
    )


def variants() -> list[Variant]:
    """Return copy, gather and scatter, with 16-byte units and with the narrower ones of odd pages."""
    rows = []
    for unit_bytes, word in ((16, "i64"), (8, "i64"), (2, "i16")):
        lists = {"from_N": "*i64", "to_N": "*i64"}
        rows.append(variant(f"copy unit {unit_bytes}", kernel.copy_pages, lists, unit_bytes))
        for is_gather in (True, False):
            name = f"{'gather' if is_gather else 'scatter'} unit {unit_bytes}"
            pointers = {"pages_N": "*i64", "buffer_NLW": f"*{word}"}
            rows.append(variant(name, kernel.move_pages, pointers, unit_bytes, TO_BUFFER=is_gather))
    return rows


VARIANTS = variants()
