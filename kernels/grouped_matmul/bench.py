"""Times of the grouped matmul of Qwen3-235B on one GPU, bfloat16 and FP8. python -m kernels.grouped_matmul.bench"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from kernels import harness, measure
from kernels.align.ref import align_ref
from kernels.aligned import Aligned
from kernels.grouped_matmul.op import grouped_matmul
from kernels.grouped_matmul.ref import grouped_matmul_ref
from kernels.harness import Arguments, Point
from kernels.permute.ref import permute_ref

ACTIVE = 8


@dataclass(frozen=True)
class Size:
    """Weights of one layer."""

    num_experts: int
    depth: int
    width: int


LAYER = Size(128, 4096, 3072)
SMALL = Size(16, 512, 256)
"""What a CPU can rehearse."""
TOKENS = ((16, 16, SMALL), (64, 16, LAYER), (1024, 64, LAYER), (16384, 128, LAYER))  # (tokens, rows of a block, size)


def make(
    num_tokens: int, block: int, size: Size, is_fp8: bool, weights: dict[Size, Arguments]
) -> Callable[[int], Arguments]:
    """Return the maker of rows in order; weights are shared by the ring, which is larger than the cache with one copy."""

    def arguments(seed: int) -> Arguments:
        ids_TA = harness.routed_ids(num_tokens, ACTIVE, size.num_experts, "uniform", seed, harness.here())
        order = align_ref(ids_TA, size.num_experts, block)
        x_TD = torch.randn(num_tokens, size.depth, device=harness.here(), generator=harness.generator(seed)).bfloat16()
        x_MD, x_scale_MG = permute_ref(x_TD, order, quantise=is_fp8)
        if size not in weights:
            weights[size] = make_weights(size, is_fp8)
        w_EFD, w_scale_EFG = weights[size]
        return x_MD, w_EFD, order, x_scale_MG, w_scale_EFG

    return arguments


def make_weights(size: Size, is_fp8: bool) -> Arguments:
    """Return random weights and their scales."""
    device, generator = harness.here(), harness.generator(0)
    shape = (size.num_experts, size.width, size.depth)
    w_EFD = torch.randn(shape, device=device, generator=generator, dtype=torch.bfloat16)
    if not is_fp8:
        return w_EFD, None
    blocks = (size.num_experts, size.width // 128, size.depth // 128)
    return w_EFD.to(torch.float8_e4m3fn), torch.rand(blocks, device=device, generator=generator) + 0.5


def ours(x_MD, w_EFD, order: Aligned, x_scale_MG, w_scale_EFG) -> tuple[torch.Tensor, Aligned]:
    """Return the result of the kernel, with the order for the comparison."""
    scales = {"x_scale_RG": x_scale_MG, "w_scale_EFG": w_scale_EFG}
    return grouped_matmul(x_MD, w_EFD, order, **scales, impl="triton"), order


def expected(x_MD, w_EFD, order: Aligned, x_scale_MG, w_scale_EFG) -> tuple[torch.Tensor, Aligned]:
    """Return the result of the reference."""
    scales = {"x_scale_RG": x_scale_MG, "w_scale_EFG": w_scale_EFG}
    return grouped_matmul_ref(x_MD, w_EFD, order, **scales), order


def with_torch(x_MD, w_EFD, order: Aligned, x_scale_MG, w_scale_EFG) -> tuple[torch.Tensor, Aligned]:
    """Return torch's grouped matmul over the whole blocks of each expert (bfloat16 only)."""
    experts_J = torch.where(order.expert_J < 0, w_EFD.shape[0], order.expert_J)
    ends_E = torch.searchsorted(
        experts_J, torch.arange(w_EFD.shape[0], device=x_MD.device, dtype=torch.int32), right=True
    )
    return torch._grouped_mm(x_MD, w_EFD.transpose(1, 2), offs=(ends_E * order.block).int()), order


def compare(result: tuple, reference: tuple) -> float:
    """Return 1 - 2 x y / (x^2 + y^2) of the rows in use; at most 1e-3."""
    rows = reference[1].position_R.long()
    a, b = result[0][rows].double(), reference[0][rows].double()
    error = float(1 - 2 * (a * b).sum() / (a.square() + b.square()).sum())
    assert error <= 1e-3, f"1 - similarity = {error} > 1e-3"
    return error


def points() -> Iterator[Point]:
    """Yield tokens x dtype; bytes: weights of the experts in use, rows in and out."""
    for is_fp8 in (False, True):
        weights: dict[Size, Arguments] = {}
        for num_tokens, block, size in TOKENS:
            num_rows, item_bytes = num_tokens * ACTIVE, 1 if is_fp8 else 2
            busy = min(size.num_experts, num_rows)
            yield Point(
                op="grouped_matmul",
                shape=f"T{num_tokens} k{ACTIVE} E{size.num_experts} D{size.depth} F{size.width} block{block}",
                dtype="fp8" if is_fp8 else "bf16",
                routing="uniform",
                num_bytes=busy * size.depth * size.width * item_bytes
                + num_rows * (size.depth * item_bytes + 2 * size.width),
                num_flops=2 * num_rows * size.depth * size.width,
                make=make(num_tokens, block, size, is_fp8, weights),
                providers={"triton": ours} if is_fp8 else {"triton": ours, "torch": with_torch},
                reference=expected,
                compare=compare,
            )


if __name__ == "__main__":
    sys.exit(measure.main(points))
