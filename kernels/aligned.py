"""The expert order that routing operations share: routed rows grouped by expert, each group padded to whole blocks."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.checks import check_tensor
from kernels.ranges import check_range

MAX_ROWS = 2**29
"""Rows of an order: positions, offsets into histograms and the steps of loops over them then fit into int32."""


@dataclass(frozen=True)
class Aligned:
    """Where each routed row lies once rows are grouped by expert. R = T * A routed rows, row r = token r // A, choice r % A.

    Buffers have the size of the worst case, so that no host waits for a device; only the first `num_rows_1` rows and
    num_rows / block blocks hold something. Same contract as vLLM's moe_align_block_size, plus `position_R`, a fixed
    order and rows that stay away: inside an expert rows keep their order, and experts follow each other by number.

    Example, 3 tokens of 2 choices among 4 experts, block 2: ids_TA = [[1, 3], [3, 1], [3, 0]] gives
    routed_M = [5, 6, 0, 3, 1, 2, 4, 6, 6, 6], expert_J = [0, 1, 3, 3, -1], num_rows_1 = [8],
    position_R = [2, 4, 5, 3, 6, 0]. (6 = R is padding; expert 2 got nothing and has no block.)
    """

    routed_M: torch.Tensor
    """int32, row of the order -> routed row; R where padded."""
    expert_J: torch.Tensor
    """int32, block of the order -> (local) expert; -1 past the end."""
    num_rows_1: torch.Tensor
    """int32, rows that are in use, padding inside blocks counted."""
    position_R: torch.Tensor
    """int32, routed row -> row of the order; -1 when its expert is elsewhere."""
    block: int
    """Rows of a block."""
    num_experts: int
    """(Local) experts, which expert_J counts."""


def capacity(num_routed: int, num_experts: int, block: int) -> int:
    """Return the most rows that `num_routed` rows can fill: every expert that can have a row ends in one more block."""
    if num_routed == 0:
        return 0
    worst = num_routed + min(num_routed, num_experts) * (block - 1)
    return worst // block * block


def check_capacity(num_routed: int, num_experts: int, block: int) -> None:
    """Raise ValueError unless an order of so many routed rows can be numbered."""
    check_range("rows of the order", capacity(num_routed, num_experts, block), 0, MAX_ROWS)


def empty(num_routed: int, num_experts: int, block: int, device: torch.device) -> Aligned:
    """Return an order without contents, of the capacity for `num_experts` (local) experts."""
    num_rows = capacity(num_routed, num_experts, block)

    def integers(size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.int32, device=device)

    return Aligned(
        integers(num_rows), integers(num_rows // block), integers(1), integers(num_routed), block, num_experts
    )


def scratch(sizes: Sequence[int], device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return int32 buffers in one allocation, each aligned to 16 bytes, so that every call compiles the same kernel."""
    rounded = [size + -size % 4 for size in sizes]
    return torch.empty(sum(rounded), dtype=torch.int32, device=device).split(rounded)


def check_aligned(name: str, order: Aligned, num_routed: int | None, device: torch.device) -> None:
    """Raise ValueError unless the buffers of `order` fit each other and `num_routed` rows (None = any) on `device`."""
    if not isinstance(order, Aligned):
        raise ValueError(f"{name}: got {type(order).__name__}; must be Aligned, from align or gate_align")
    check_tensor(f"{name}.routed_M", order.routed_M, shape=(None,), dtypes=(torch.int32,), device=device)
    num_rows = len(order.routed_M)
    sizes = {"routed_M": num_rows, "expert_J": num_rows // order.block, "num_rows_1": 1, "position_R": num_routed}
    for field, size in sizes.items():
        tensor = getattr(order, field)
        check_tensor(f"{name}.{field}", tensor, shape=(size,), dtypes=(torch.int32,), device=device)
