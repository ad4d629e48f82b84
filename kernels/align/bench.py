"""Times of align: experts, tokens and skews. python -m kernels.align.bench"""

import sys
from collections.abc import Callable, Iterator

import torch

from kernels import aligned, harness, measure, peers
from kernels.align.op import align
from kernels.align.ref import align_ref
from kernels.aligned import Aligned
from kernels.harness import Arguments, Point

TOKENS = (1, 16, 64, 256, 1024, 4096, 16384)
ACTIVE, BLOCK = 8, 64


def with_torch(ids_TA: torch.Tensor, num_experts: int, block: int, _: torch.Tensor) -> Aligned:
    """Return the order by a stable sort, without a host that waits."""
    ids_R = ids_TA.flatten().long()
    R, device = ids_R.numel(), ids_R.device
    order = ids_R.argsort(stable=True)
    num_E = torch.zeros(num_experts, dtype=torch.long, device=device).scatter_add_(0, ids_R, torch.ones_like(ids_R))
    blocks_E = (num_E + block - 1) // block
    end_E = blocks_E.cumsum(0)
    rank_R = torch.arange(R, device=device) - (num_E.cumsum(0) - num_E)[ids_R[order]]
    position = ((end_E - blocks_E) * block)[ids_R[order]] + rank_R
    result = aligned.empty(R, num_experts, block, device)
    result.routed_M.fill_(R).scatter_(0, position, order.int())
    result.position_R.scatter_(0, order, position.int())
    experts_J = torch.searchsorted(end_E, torch.arange(result.expert_J.numel(), device=device), right=True)
    result.expert_J.copy_(torch.where(experts_J < num_experts, experts_J, -1))
    result.num_rows_1.copy_(end_E[-1:] * block)
    return result


def make(num_tokens: int, num_experts: int, routing: str) -> Callable[[int], Arguments]:
    """Return the maker of arguments, with a ticket."""

    def arguments(seed: int) -> Arguments:
        ids_TA = harness.routed_ids(num_tokens, ACTIVE, num_experts, routing, seed, harness.here())
        return ids_TA, num_experts, BLOCK, torch.zeros(1, dtype=torch.int32, device=harness.here())

    return arguments


def num_bytes(num_tokens: int, num_experts: int) -> int:
    """Return the bytes that must move: ids in; both maps, the experts of blocks and the number of rows out."""
    num_routed = num_tokens * ACTIVE
    rows = aligned.capacity(num_routed, num_experts, BLOCK)
    return 4 * (2 * num_routed + rows + rows // BLOCK + 1)


def compare(ours: Aligned | tuple, theirs: Aligned) -> float:
    """Compare exactly; a peer, which is not stable, only by the number of rows and the experts of the blocks in use."""
    if isinstance(ours, Aligned):
        return harness.largest_difference(0.0)(ours, theirs)
    _, experts_J, num_rows_1 = ours
    num_blocks = int(theirs.num_rows_1) // theirs.block
    same = harness.largest_difference(0.0)
    return same((num_rows_1, experts_J[:num_blocks]), (theirs.num_rows_1, theirs.expert_J[:num_blocks]))


def points() -> Iterator[Point]:
    """Yield experts x tokens, and the skews at three sizes."""
    for num_experts in (128, 256):
        for num_tokens in TOKENS:
            for routing in ("uniform", "zipf", "one") if num_tokens in (64, 1024, 16384) else ("uniform",):
                yield Point(
                    op="align",
                    shape=f"T{num_tokens} E{num_experts} k{ACTIVE} block{BLOCK}",
                    dtype="int32",
                    routing=routing,
                    num_bytes=num_bytes(num_tokens, num_experts),
                    make=make(num_tokens, num_experts, routing),
                    providers={
                        "triton": lambda ids, num, block, ticket: align(
                            ids, num, block, ticket_1=ticket, impl="triton"
                        ),
                        "torch": with_torch,
                        **peers.aligns(),
                    },
                    reference=lambda ids, num, block, _: align_ref(ids, num, block),
                    compare=compare,
                )


if __name__ == "__main__":
    sys.exit(measure.main(points))
