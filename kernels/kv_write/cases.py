"""Shapes of new keys and values that ship, and how many elements one program writes."""

from dataclasses import dataclass

import torch
import triton

from kernels.aot import Variant
from kernels.kv_write import kernel

ELEMENTS = 2048
"""Elements of keys (and as many of values) in one program: two 16-byte loads of each for each of 128 threads."""
NUM_WARPS = 4
MAX_WIDTH = 4096
"""Columns of a row: one program holds at least one row of both tensors in registers."""
LATENT_ELEMENTS = 4096
LATENT_WARPS = 2
"""Eight rows of 512 + 64: the narrow part still fills each of 64 threads with one 16-byte load."""


@dataclass(frozen=True)
class Shape:
    """Heads and widths of one attention layer on one GPU, and the places of a page."""

    name: str
    num_kv_heads: int
    key_width: int
    value_width: int
    page_size: int


SHAPES = (
    Shape("8x128", 8, 128, 128, 16),
    Shape("4x128", 4, 128, 128, 16),
    Shape("1x128", 1, 128, 128, 16),  # one of eight GPUs
    Shape("8x64", 8, 64, 64, 16),
    Shape("8x96", 8, 96, 96, 16),
    Shape("2x256", 2, 256, 256, 16),
    Shape("4x192/128", 4, 192, 128, 16),
)
LATENT_WIDTH, ROPE_WIDTH, LATENT_PAGE = 512, 64, 64
NUM_TOKENS = (1, 16, 64, 256, 1024, 4096, 16384)
TYPES = (("bf16", "bf16"), ("bf16", "fp8e4nv"), ("fp16", "fp8e4nv"))
LIMIT = torch.finfo(torch.float8_e4m3fn).max


def head_variant(shape: Shape, source: str, target: str) -> Variant:
    """Return the variant of kv_write for one shape, one dtype of new rows and one of the cache."""
    padded = [triton.next_power_of_2(width) for width in (shape.key_width, shape.value_width)]
    quantise = source != target
    scales = {"key_scale": "*fp32", "value_scale": "*fp32"} if quantise else {}
    strides = [f"{what}_{axis}" for what in ("key", "value") for axis in "tk"]
    strides += [f"{what}_cache_{axis}" for what in ("key", "value") for axis in "pmk"]
    rows = ELEMENTS // max(padded)
    fills_threads = all(width == size for width, size in zip(padded, (shape.key_width, shape.value_width), strict=True))
    wide = 2 * (ELEMENTS // 8 // (32 * NUM_WARPS)) if fills_threads else 2
    return Variant(
        op="kv_write",
        name=f"heads {shape.name} {source} to {target}",
        fn=kernel.write_heads,
        signature={
            "key_TKH": f"*{source}",
            "value_TKH": f"*{source}",
            "key_cache_PMKH": f"*{target}",
            "value_cache_PMKH": f"*{target}",
            "slots_T": "*i64",
            **scales,
            **dict.fromkeys(["num_tokens", "num_slots", *strides], "i32"),
        },
        constexprs={
            **({} if quantise else {"key_scale": None, "value_scale": None}),
            "K": shape.num_kv_heads,
            "M": shape.page_size,
            "KEY_WIDTH": shape.key_width,
            "VALUE_WIDTH": shape.value_width,
            "KEY_PADDED": padded[0],
            "VALUE_PADDED": padded[1],
            "KEY_SCALE_STEP": 0,
            "VALUE_SCALE_STEP": 0,
            "ROWS": rows,
            "QUANTISE": quantise,
            "LIMIT": LIMIT if quantise else 0.0,
        },
        multiples_of_16=("num_slots", *strides),
        num_warps=NUM_WARPS,
        min_wide_loads=wide,
        min_wide_stores=0 if quantise else wide,  # eight FP8 codes are 8 bytes
    )


def latent_variant(source: str, target: str) -> Variant:
    """Return the variant of mla_write for one dtype of new rows and one of the cache."""
    quantise = source != target
    strides = ["latent_t", "rope_t", "cache_p", "cache_m"]
    return Variant(
        op="kv_write",
        name=f"latents {LATENT_WIDTH}+{ROPE_WIDTH} {source} to {target}",
        fn=kernel.write_latents,
        signature={
            "latent_TC": f"*{source}",
            "rope_TR": f"*{source}",
            "cache_PMC": f"*{target}",
            "slots_T": "*i64",
            **({"scale": "*fp32"} if quantise else {}),
            **dict.fromkeys(["num_tokens", "num_slots", *strides], "i32"),
        },
        constexprs={
            **({} if quantise else {"scale": None}),
            "M": LATENT_PAGE,
            "LATENT_WIDTH": LATENT_WIDTH,
            "ROPE_WIDTH": ROPE_WIDTH,
            "LATENT_PADDED": LATENT_WIDTH,
            "ROPE_PADDED": ROPE_WIDTH,
            "ROWS": LATENT_ELEMENTS // LATENT_WIDTH,
            "QUANTISE": quantise,
            "LIMIT": LIMIT if quantise else 0.0,
        },
        multiples_of_16=("num_slots", *strides),
        num_warps=LATENT_WARPS,
        min_wide_loads=LATENT_ELEMENTS // 8 // (32 * LATENT_WARPS) + 1,
        min_wide_stores=0 if quantise else LATENT_ELEMENTS // 8 // (32 * LATENT_WARPS) + 1,
    )


VARIANTS = [
    head_variant(shape, *types) for shape in SHAPES for types in TYPES if types[0] == "bf16" or shape.name == "8x128"
]
VARIANTS += [latent_variant(*types) for types in TYPES]
