"""Which grouped matmuls ship, and the tile table."""

from dataclasses import dataclass

from kernels.aot import Variant
from kernels.grouped_matmul import kernel

GROUP = 8
"""Blocks of rows that share a block of columns before the next; see kernel.py."""


@dataclass(frozen=True)
class Tile:
    """Columns and depth of a program's block, warps and pipeline stages."""

    columns: int
    depth: int
    num_warps: int
    num_stages: int


TILES = {  # (dtype of weights, rows of a block); chosen by registers and shared memory, not yet tuned on a card
    ("bfloat16", 16): Tile(128, 128, 4, 4),
    ("bfloat16", 32): Tile(128, 64, 4, 4),
    ("bfloat16", 64): Tile(128, 64, 4, 4),
    ("bfloat16", 128): Tile(128, 64, 8, 3),
    ("float8_e4m3fn", 16): Tile(128, 128, 4, 4),
    ("float8_e4m3fn", 32): Tile(128, 128, 4, 4),
    ("float8_e4m3fn", 64): Tile(128, 128, 4, 3),
    ("float8_e4m3fn", 128): Tile(128, 128, 8, 3),
    **{("float32", rows): Tile(64, 32, 4, 2) for rows in (16, 32, 64, 128)},
}
SHAPES = {"qwen3-235b": ((4096, 3072), (1536, 4096)), "deepseek-v3": ((7168, 4096), (2048, 7168))}
"""Model -> (D, F) of the fused gate and up projection, and of the down projection."""


def tile_for(dtype: str, rows: int) -> Tile:
    """Return the tile for weights of this dtype and blocks of so many rows; float16 takes that of bfloat16."""
    return TILES["bfloat16" if dtype == "float16" else dtype, rows]


def variant(model: str, depth: int, width: int, num_active: int, dtype: str, rows: int) -> Variant:
    """Return one compiled matmul; 64 rows and more must use Hopper's wide matrix instruction."""
    tile = tile_for(dtype, rows)
    kind = {"bfloat16": "bf16", "float8_e4m3fn": "fp8e4nv"}[dtype]
    return Variant(
        op="grouped_matmul",
        name=f"{model} D{depth} F{width} {kind} rows{rows}{' gather' * bool(num_active)}",
        fn=kernel.grouped_matmul,
        signature={
            "x_pointer": f"*{kind}",
            "w_pointer": f"*{kind}",
            "out_pointer": "*bf16",
            "x_scale_pointer": "*fp32" if kind == "fp8e4nv" else "*bf16",
            "w_scale_pointer": "*fp32" if kind == "fp8e4nv" else "*bf16",
            **dict.fromkeys(("routed_pointer", "expert_pointer", "num_rows_pointer"), "*i32"),
            **dict.fromkeys(("R", "num_blocks"), "i32"),
        },
        constexprs={
            "D": depth,
            "F": width,
            "NUM_ACTIVE": num_active,
            "IS_FP8": kind == "fp8e4nv",
            "BLOCK_M": rows,
            "BLOCK_F": tile.columns,
            "BLOCK_D": tile.depth,
            "GROUP": GROUP,
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        min_wide_loads=1,
        needs=("HGMMA",) if rows >= 64 else ("HMMA",) if kind == "bf16" else (),
    )


VARIANTS = tuple(
    variant(model, depth, width, 8 if index == 0 and dtype == "bfloat16" else 0, dtype, rows)
    for model, shapes in SHAPES.items()
    for index, (depth, width) in enumerate(shapes)
    for dtype, rows in TILES
    if dtype != "float32"
)
