"""Which alignments ship, and the tile table."""

from kernels.align import kernel
from kernels.aot import Variant

MAX_EXPERTS = 512
CHUNK = 256
"""Rows of a chunk: a program compares 256 x 256 pairs. Smaller chunks lengthen the sum over chunks in one program."""
ONE_LAUNCH_ROWS = 8192
"""Up to this many rows (1,024 tokens of 8 choices) the last program places all; not yet measured on a card."""
TILES = {"STEP": 32, "ROWS": 16, "BLOCK_J": 32, "num_warps": 8}
POINTERS = ("histogram", "rank", "first", "end", "routed", "position", "expert")
EXPERTS = ((128, False), (256, False), (256, True), (512, False))  # (experts, whether a map leaves an eighth of them)
BLOCKS = (16, 64, 128)


def constants(num_experts: int, has_map: bool) -> dict[str, int | bool]:
    """Return the constexpr arguments that both kernels take."""
    num_local = num_experts // 8 if has_map else num_experts
    return {
        "NUM_EXPERTS": num_experts,
        "NUM_LOCAL": num_local,
        "BLOCK_E": 1 << (num_local - 1).bit_length(),
        "HAS_MAP": has_map,
        "CHUNK": CHUNK,
        "BLOCK_J": TILES["BLOCK_J"],
    }


def signature(ids: str, *integers: str) -> dict[str, str]:
    """Return the types: ids, pointers to int32, then these integers."""
    pointers = {f"{name}_pointer": "*i32" for name in ("map", *POINTERS)}
    return {"ids_pointer": f"*{ids}", **pointers, **dict.fromkeys(integers, "i32")}


def count_variant(num_experts: int, has_map: bool, block: int, is_one_launch: bool, ids: str = "i32") -> Variant:
    """Return the first kernel."""
    pointers = {"num_rows_pointer": "*i32", "ticket_pointer": "*i32"}
    tiles = {"STEP": TILES["STEP"], "ROWS": TILES["ROWS"], "PLACE": is_one_launch, "BLOCK_M": block}
    return Variant(
        op="align",
        name=f"count E{num_experts}{' map' * has_map} block{block} {'one launch' if is_one_launch else 'two'} {ids}",
        fn=kernel.count,
        signature={**signature(ids, "R", "M", "J", "num_chunks"), **pointers},
        constexprs={**constants(num_experts, has_map), **tiles},
        num_warps=TILES["num_warps"],
    )


def place_variant(num_experts: int, has_map: bool, ids: str = "i32") -> Variant:
    """Return the second kernel."""
    return Variant(
        op="align",
        name=f"place E{num_experts}{' map' * has_map} {ids}",
        fn=kernel.place,
        signature=signature(ids, "R", "J", "num_chunks"),
        constexprs=constants(num_experts, has_map),
    )


VARIANTS = (
    *(count_variant(n, m, block, one) for n, m in EXPERTS for block in BLOCKS[:2] for one in (True, False)),
    count_variant(256, False, BLOCKS[2], False),
    count_variant(256, False, BLOCKS[1], True, "i64"),
    count_variant(256, False, BLOCKS[1], False, "i64"),
    place_variant(256, False, "i64"),
    *(place_variant(n, m) for n, m in EXPERTS),
)
