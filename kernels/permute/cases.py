"""Which permutations ship: widths of public models, and the tile."""

from kernels.aot import Variant
from kernels.permute import kernel

NUM_WARPS = 4
MAX_BLOCK = 1024
"""Columns of a program: 8 of 2 bytes for each of 128 threads, one 16-byte access. Not yet tuned on a card."""
WIDTHS = (2048, 4096, 5120, 6144, 7168)
ACTIVE = 8
MAX_ACTIVE = 32
"""Choices of a token: the kernels unroll the loop over them."""


def block_for(width: int) -> int:
    """Return the columns of a program for rows of this width."""
    return max(128, min(MAX_BLOCK, 1 << (width - 1).bit_length()))


def permute_variant(width: int, dtype: str, is_quantised: bool, is_power_of_two: bool) -> Variant:
    """Return one compiled permute; rows must be loaded 16 bytes at a time."""
    kind = f"{'fp8' if is_quantised else dtype}{' pow2' * is_power_of_two}"
    return Variant(
        op="permute",
        name=f"permute D{width} {dtype} -> {kind}",
        fn=kernel.permute,
        signature={
            "x_pointer": f"*{dtype}",
            "position_pointer": "*i32",
            "y_pointer": "*fp8e4nv" if is_quantised else f"*{dtype}",
            "scale_pointer": "*fp32",
            **dict.fromkeys(("stride_T", "scale_stride_M", "scale_stride_G"), "i32"),
        },
        constexprs={
            "D": width,
            "NUM_ACTIVE": ACTIVE,
            "BLOCK_D": block_for(width),
            "QUANTISE": is_quantised,
            "POWER_OF_TWO": is_power_of_two,
        },
        multiples_of_16=("stride_T",),
        num_warps=NUM_WARPS,
        min_wide_loads=1,
        min_wide_stores=0 if is_quantised else ACTIVE,
    )


def unpermute_variant(width: int, dtype: str) -> Variant:
    """Return one compiled unpermute: as many 16-byte loads in flight as a token has rows."""
    return Variant(
        op="permute",
        name=f"unpermute D{width} {dtype}",
        fn=kernel.unpermute,
        signature={
            "y_pointer": f"*{dtype}",
            "position_pointer": "*i32",
            "weights_pointer": "*fp32",
            "out_pointer": f"*{dtype}",
        },
        constexprs={"D": width, "NUM_ACTIVE": ACTIVE, "BLOCK_D": block_for(width)},
        num_warps=NUM_WARPS,
        min_wide_loads=ACTIVE,
        min_wide_stores=1,
    )


VARIANTS = (
    *(permute_variant(d, "bf16", q, p) for d in WIDTHS for q, p in ((False, False), (True, False), (True, True))),
    permute_variant(4096, "fp16", False, False),
    permute_variant(4096, "fp32", False, False),
    *(unpermute_variant(d, "bf16") for d in WIDTHS),
    unpermute_variant(4096, "fp16"),
)
