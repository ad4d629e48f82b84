"""Which fused gates ship, and the tile for each number of tokens."""

from collections.abc import Sequence

from kernels.aot import Variant
from kernels.gate.cases import MODELS, WARP_ROW_BYTES, Model
from kernels.gate_align import kernel

MAX_TOKENS = 1024
"""Beyond, one program would sum too many histograms."""
SMALL, MEDIUM, LARGE = (4, 4, 2), (8, 8, 8), (16, 16, 8)
"""Tiles: tokens of a program, warps, histograms that the last program loads at a time. Chosen by registers (32 tokens spill),
not yet tuned on a card."""
CONSTANTS = {"SPAN": 256, "BLOCK_J": 32}
BLOCKS = (16, 64)


def tile_for(num_tokens: int, row_bytes: int) -> tuple[int, int, int]:
    """Return the tile. More tokens a program leave fewer histograms to the last one, but wide rows then spill."""
    if num_tokens <= 4:
        return SMALL
    return LARGE if num_tokens > 128 and row_bytes <= WARP_ROW_BYTES else MEDIUM


def variant(model: Model, dtype: str, block: int, tile: Sequence[int]) -> Variant:
    """Return one compiled kernel, all experts local."""
    tokens, num_warps, rows = tile
    pointers = ("map", "ids", "histogram", "rank", "first", "routed", "position", "expert", "num_rows", "ticket")
    return Variant(
        op="gate_align",
        name=f"{model.name} E{model.num_experts} k{model.router.num_active} {dtype} block{block} T{tokens}",
        fn=kernel.gate_align,
        signature={
            "logits_pointer": f"*{dtype}",
            "bias_pointer": "*fp32",
            "weights_pointer": "*fp32",
            **{f"{name}_pointer": "*i32" for name in pointers},
            "scale": "fp32",
            **dict.fromkeys(("T", "stride_T", "M", "J", "num_chunks"), "i32"),
        },
        constexprs={
            **model.constants,
            "NUM_LOCAL": model.num_experts,
            "BLOCK_L": model.constants["BLOCK_E"],
            "HAS_MAP": False,
            "BLOCK_M": block,
            "BLOCK_T": tokens,
            "ROWS": rows,
            **CONSTANTS,
        },
        multiples_of_16=("stride_T",) if model.num_experts % 16 == 0 else (),
        num_warps=num_warps,
    )


SHIPPED = tuple(model for model in MODELS if model.name in ("qwen3", "qwen3-next", "glm-5", "deepseek-v3"))


def variants() -> list[Variant]:
    """Return every model, type of logits and tile; one size of block for float32, which changes no register."""
    table = []
    for model in SHIPPED:
        for dtype, item_bytes, blocks in (("bf16", 2, BLOCKS), ("fp32", 4, BLOCKS[1:])):
            row_bytes = int(model.constants["BLOCK_E"]) * item_bytes
            tiles = sorted({tile_for(num_tokens, row_bytes) for num_tokens in (1, 5, MAX_TOKENS)})
            table += [variant(model, dtype, block, tile) for block in blocks for tile in tiles]
    return table


VARIANTS = tuple(variants())
