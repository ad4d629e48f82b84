"""Times of permute, with and without FP8, and of unpermute. python -m kernels.permute.bench"""

import sys
from collections.abc import Callable, Iterator

import torch

from kernels import harness, measure, peers
from kernels.align.ref import align_ref
from kernels.aligned import Aligned
from kernels.harness import Arguments, Point
from kernels.permute.cases import ACTIVE
from kernels.permute.op import permute, unpermute
from kernels.permute.ref import permute_ref, quantise_ref, unpermute_ref

TOKENS = (1, 64, 1024, 4096, 16384)
WIDTHS = (4096, 7168)
NUM_EXPERTS, BLOCK = 128, 64


def make(num_tokens: int, width: int, routing: str) -> Callable[[int], Arguments]:
    """Return the maker of tokens and their order."""

    def arguments(seed: int) -> Arguments:
        generator = harness.generator(seed)
        x_TD = torch.randn(num_tokens, width, device=harness.here(), generator=generator).bfloat16()
        ids_TA = harness.routed_ids(num_tokens, ACTIVE, NUM_EXPERTS, routing, seed, harness.here())
        return x_TD, align_ref(ids_TA, NUM_EXPERTS, BLOCK)

    return arguments


def make_back(num_tokens: int, width: int, routing: str) -> Callable[[int], Arguments]:
    """Return the maker of rows, their order and weights."""

    def arguments(seed: int) -> Arguments:
        _, order = make(num_tokens, 1, routing)(seed)
        generator = harness.generator(seed)
        y_MD = torch.randn(order.routed_M.numel(), width, device=harness.here(), generator=generator).bfloat16()
        return y_MD, order, torch.rand(num_tokens, ACTIVE, device=harness.here(), generator=generator)

    return arguments


def in_use(function: Callable[..., tuple]) -> Callable[..., tuple]:
    """Return a permute that is told how it is called, so that only rows in use are compared."""
    return lambda x_TD, order: (function(x_TD, order), order)


def compare(ours: tuple, theirs: tuple) -> float:
    """Compare codes, scales or copies of the rows in use, exactly."""
    rows = ours[1].position_R.long()
    same = harness.largest_difference(0.0)
    return max(same(bits(a)[rows], bits(b)[rows]) for a, b in zip(ours[0], theirs[0], strict=True) if a is not None)


def bits(x: torch.Tensor) -> torch.Tensor:
    """Return FP8 codes as bytes, which can be indexed."""
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x


def torch_permute(x_TD: torch.Tensor, order: Aligned) -> tuple[torch.Tensor, None]:
    """Return the rows by index_select, padding rows too, which torch cannot leave out without waiting."""
    return x_TD.index_select(0, (order.routed_M // ACTIVE).clamp(max=len(x_TD) - 1)), None


def torch_quantise(x_TD: torch.Tensor, order: Aligned) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the quantised rows by torch's operators."""
    codes_TD, scale_TG = quantise_ref(x_TD)
    tokens_M = (order.routed_M // ACTIVE).clamp(max=len(x_TD) - 1)
    codes_MD = codes_TD.view(torch.uint8).index_select(0, tokens_M).view(torch.float8_e4m3fn)
    return codes_MD, scale_TG.index_select(0, tokens_M)


def torch_unpermute(y_MD: torch.Tensor, order: Aligned, weights_TA: torch.Tensor) -> torch.Tensor:
    """Return the combine by index_select and a sum."""
    rows_TAD = y_MD.index_select(0, order.position_R).unflatten(0, weights_TA.shape).float()
    return (rows_TAD * weights_TA[:, :, None]).sum(1).to(y_MD.dtype)


def permute_point(num_tokens: int, width: int, routing: str, is_quantised: bool) -> Point:
    """Return the point of a copy, or of a copy to FP8."""
    written = width + width // 128 * 4 if is_quantised else 2 * width
    theirs = torch_quantise if is_quantised else torch_permute
    ours = lambda x_TD, order: permute(x_TD, order, quantise=is_quantised, impl="triton")
    num_bytes = num_tokens * (2 * width + ACTIVE * (written + 4))
    return Point(
        op="permute",
        shape=f"T{num_tokens} D{width} k{ACTIVE} E{NUM_EXPERTS} block{BLOCK}",
        dtype="bf16 to fp8" if is_quantised else "bf16",
        routing=routing,
        num_bytes=num_bytes,
        make=make(num_tokens, width, routing),
        providers={"triton": in_use(ours), "torch": in_use(theirs)},
        reference=in_use(lambda x_TD, order: permute_ref(x_TD, order, quantise=is_quantised)),
        compare=compare,
        bar=harness.share_of_copy(num_bytes, 0.85) if num_tokens >= 4096 else None,
    )


def unpermute_point(num_tokens: int, width: int, routing: str) -> Point:
    """Return the point of the combine."""
    num_bytes = num_tokens * (2 * width * (1 + ACTIVE) + 8 * ACTIVE)
    return Point(
        op="unpermute",
        shape=f"T{num_tokens} D{width} k{ACTIVE} E{NUM_EXPERTS} block{BLOCK}",
        dtype="bf16",
        routing=routing,
        num_bytes=num_bytes,
        make=make_back(num_tokens, width, routing),
        providers={
            "triton": lambda y_MD, order, weights_TA: unpermute(y_MD, order, weights_TA, impl="triton"),
            "torch": torch_unpermute,
            **peers.unpermutes(),
        },
        reference=unpermute_ref,
        compare=harness.largest_difference(2**-7),  # one unit in the last place of bfloat16
        bar=harness.share_of_copy(num_bytes, 0.85) if num_tokens >= 4096 else None,
    )


def points() -> Iterator[Point]:
    """Yield widths x tokens, and the skews at one size."""
    for width in WIDTHS:
        for num_tokens in TOKENS:
            for routing in ("uniform", "zipf", "one") if num_tokens == 4096 else ("uniform",):
                yield permute_point(num_tokens, width, routing, False)
                yield permute_point(num_tokens, width, routing, True)
                yield unpermute_point(num_tokens, width, routing)


if __name__ == "__main__":
    sys.exit(measure.main(points))
