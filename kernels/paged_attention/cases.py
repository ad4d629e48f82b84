"""Attention layers that ship, and the tiles they run with: data, not autotuning, so that what compiles is what runs."""

from dataclasses import dataclass

import triton

from kernels.aot import Variant
from kernels.paged_attention import kernel

BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8e4nv": 1}
COMBINE_COLUMNS = 128
"""Value columns that one program of stage two adds up: MAX_SPLITS x 128 float32 stay in registers."""
MAX_SPLITS = 32
MIN_KEYS_A_SPLIT = 256
"""Below this a split is more launch than work."""
PROGRAMS = 2 * 132
"""Programs to aim at when keys are split: two on each multiprocessor of an H200."""


@dataclass(frozen=True)
class Tile:
    """Heads and keys of one step of stage one. Spill-free on sm_90 with triton 3.6.0 (RESOURCES.csv)."""

    heads: int
    keys: int
    num_warps: int
    num_stages: int


# (key has a rope part, bytes of a query element, of a cache element) -> (padded key width up to, tile) ...
# Heads are 16, the rows of one matrix instruction: a wider block would compute heads that are not there.
TILES = {
    (False, 2, 2): ((128, Tile(16, 64, 4, 2)), (256, Tile(16, 32, 4, 2))),
    (False, 2, 1): ((128, Tile(16, 64, 4, 2)), (256, Tile(16, 32, 4, 2))),
    (False, 4, 4): ((256, Tile(16, 16, 8, 1)),),
    (True, 2, 2): ((512, Tile(16, 32, 4, 2)),),
    (True, 2, 1): ((512, Tile(16, 32, 8, 2)),),
    (True, 4, 4): ((512, Tile(16, 16, 8, 1)),),
}


def tile_of(key_padded: int, has_rope: bool, query_bytes: int, cache_bytes: int) -> Tile | None:
    """Return the tile for a key width (a power of two), or None where none is known to fit."""
    fitting = (tile for limit, tile in TILES.get((has_rope, query_bytes, cache_bytes), ()) if key_padded <= limit)
    return next(fitting, None)


@dataclass(frozen=True)
class Shape:
    """Heads and widths of one attention layer on one GPU; rope_width > 0 is MLA, whose value is the latent."""

    name: str
    num_heads: int
    num_kv_heads: int
    key_width: int
    value_width: int
    page_size: int
    rope_width: int = 0


SHAPES = (
    Shape("GQA 64/4x128", 64, 4, 128, 128, 16),
    Shape("GQA 96/8x128", 96, 8, 128, 128, 16),
    Shape("GQA 8/1x128", 8, 1, 128, 128, 16),  # one of eight GPUs
    Shape("GQA 32/8x64", 32, 8, 64, 64, 16),
    Shape("GQA 32/8x96", 32, 8, 96, 96, 16),
    Shape("GQA 16/2x256", 16, 2, 256, 256, 16),
    Shape("MLA 128x512+64", 128, 1, 512, 512, 64, 64),
    Shape("MLA 16x512+64", 16, 1, 512, 512, 64, 64),  # one of eight GPUs
)
LENGTHS = ((1, 8192), (16, 8192), (64, 8192), (64, 32768))
"""(sequences, keys of each) for the bench."""


def padded(width: int) -> int:
    """Return the width of a tile: a power of two, and at least the 16 that a matrix instruction takes."""
    return max(16, triton.next_power_of_2(width))


def constexprs(shape: Shape, tile: Tile, is_exact: bool) -> dict:
    """Return the constants of a launch of attend_split that do not depend on scales."""
    return {
        "N": shape.num_heads,
        "K": shape.num_kv_heads,
        "M": shape.page_size,
        "KEY_WIDTH": shape.key_width,
        "ROPE_WIDTH": shape.rope_width,
        "VALUE_WIDTH": shape.value_width,
        "KEY_PADDED": padded(shape.key_width),
        "ROPE_PADDED": padded(shape.rope_width),
        "VALUE_PADDED": padded(shape.value_width),
        "HEADS": tile.heads,
        "KEYS": tile.keys,
        # float32 is asked for to be exact: the default would round its products to tf32.
        "PRECISION": "ieee" if is_exact else "tf32",
    }


def attend_variant(shape: Shape, query: str, cache: str) -> Variant:
    """Return the variant of stage one for one shape, one query dtype and one cache dtype."""
    sizes = (BYTES[query], BYTES[cache])
    tile = tile_of(padded(shape.key_width), shape.rope_width > 0, *sizes)
    assert tile is not None, shape
    strides = ["q_b", "q_n", "key_p", "key_m", "key_k", "value_p", "value_m", "value_k"]
    scaled = cache != query
    pointers = {"q_BNH": query, "key_cache_PMKH": cache, "value_cache_PMKH": cache, "tables_BP": "i32"}
    pointers |= {"lengths_B": "i32", "out_BNUH": "fp32", "lse_BNU": "fp32"}
    pointers |= {"key_scale": "fp32", "value_scale": "fp32"} if scaled else {}
    return Variant(
        op="paged_attention",
        name=f"{shape.name} {query} over {cache}",
        fn=kernel.attend_split,
        signature={
            **{name: f"*{kind}" for name, kind in pointers.items()},
            "softmax_scale": "fp32",
            **dict.fromkeys(["num_splits", "table_width", "num_pages", "tables_b", *strides], "i32"),
        },
        constexprs={
            **({} if scaled else {"key_scale": None, "value_scale": None}),
            **constexprs(shape, tile, query == "fp32"),
            "SCALED": scaled,
            "SCALE_STEP": 0,
        },
        multiples_of_16=tuple(strides),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        min_wide_loads=0 if query == "fp32" or cache != query else 1,
        needs=() if query == "fp32" else ("HMMA",),
    )


def combine_variant(width: int) -> Variant:
    """Return the variant of stage two for one value width."""
    pointers = {"out_BNUH": "*fp32", "lse_BNU": "*fp32", "out_BNH": "*bf16", "lse_BN": "*fp32"}
    return Variant(
        op="paged_attention",
        name=f"combine {width}",
        fn=kernel.combine_splits,
        signature={**pointers, "num_splits": "i32"},
        constexprs={"VALUE_WIDTH": width, "COLUMNS": min(COMBINE_COLUMNS, padded(width)), "MAX_SPLITS": MAX_SPLITS},
        num_warps=4,
        min_wide_loads=1,
    )


VARIANTS = [attend_variant(shape, "bf16", cache) for shape in SHAPES for cache in ("bf16", "fp8e4nv")]
VARIANTS += [attend_variant(SHAPES[0], "fp16", "fp16")]
VARIANTS += [attend_variant(SHAPES[at], "fp32", "fp32") for at in (0, 5, 7)]
VARIANTS += [combine_variant(width) for width in sorted({shape.value_width for shape in SHAPES})]
