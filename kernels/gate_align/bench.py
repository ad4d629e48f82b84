"""Times of gate_align against gate and align in turn, and against torch. python -m kernels.gate_align.bench"""

import sys
from collections.abc import Callable, Iterator

import torch

from kernels import harness, measure
from kernels.align.bench import num_bytes
from kernels.align.bench import with_torch as align_with_torch
from kernels.align.op import align
from kernels.gate.bench import with_torch as gate_with_torch
from kernels.gate.cases import Model
from kernels.gate.op import gate
from kernels.gate_align.cases import SHIPPED
from kernels.gate_align.op import gate_align
from kernels.gate_align.ref import gate_align_ref
from kernels.harness import Arguments, Point
from kernels.router import Router

TOKENS = (1, 16, 64, 256, 1024)
BLOCK = 64


def make(model: Model, num_tokens: int) -> Callable[[int], Arguments]:
    """Return the maker of arguments, with a ticket."""

    def arguments(seed: int) -> Arguments:
        generator = harness.generator(seed)
        logits_TE = torch.randn(num_tokens, model.num_experts, device=harness.here(), generator=generator).bfloat16()
        bias_E = (
            torch.randn(model.num_experts, device=harness.here(), generator=generator) * 0.1 if model.has_bias else None
        )
        return logits_TE, model.router, bias_E, torch.zeros(1, dtype=torch.int32, device=harness.here())

    return arguments


def fused(logits_TE: torch.Tensor, router: Router, bias_E: torch.Tensor | None, ticket_1: torch.Tensor) -> tuple:
    """Return the result of one launch."""
    return gate_align(logits_TE, router, BLOCK, bias_E=bias_E, ticket_1=ticket_1, impl="triton")


def gate_alone(
    logits_TE: torch.Tensor, router: Router, bias_E: torch.Tensor | None, ticket_1: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights and ids only: what the bar is measured from."""
    return gate(logits_TE, router, bias_E, impl="triton")


def in_turn(logits_TE: torch.Tensor, router: Router, bias_E: torch.Tensor | None, ticket_1: torch.Tensor) -> tuple:
    """Return the result of our two launches."""
    weights_TA, ids_TA = gate(logits_TE, router, bias_E, impl="triton")
    return weights_TA, ids_TA, align(ids_TA, logits_TE.shape[1], BLOCK, ticket_1=ticket_1, impl="triton")


def with_torch(logits_TE: torch.Tensor, router: Router, bias_E: torch.Tensor | None, ticket_1: torch.Tensor) -> tuple:
    """Return the result of torch's operators."""
    weights_TA, ids_TA = gate_with_torch(logits_TE, router, bias_E)
    return weights_TA, ids_TA, align_with_torch(ids_TA, logits_TE.shape[1], BLOCK, ticket_1)


def compare(ours: tuple, theirs: tuple) -> float:
    """Compare the sorted weights: ids may differ where scores differ by the last place of float32."""
    return harness.largest_difference(1e-2)(ours[0].sort(1).values, theirs[0].sort(1).values)


def points() -> Iterator[Point]:
    """Yield models x tokens; bytes: of gate and align, ids counted once."""
    for model in SHIPPED:
        for num_tokens in TOKENS:
            num_active = model.router.num_active
            yield Point(
                op="gate_align",
                shape=f"{model.name} T{num_tokens} E{model.num_experts} k{num_active} block{BLOCK}",
                dtype="bf16",
                num_bytes=num_tokens * (2 * model.num_experts + 4 * num_active)
                + num_bytes(num_tokens, model.num_experts),
                make=make(model, num_tokens),
                providers={"triton": fused, "gate": gate_alone, "gate then align": in_turn, "torch": with_torch},
                bar=harness.a_launch_above("gate"),
                reference=lambda logits, router, bias, _: gate_align_ref(logits, router, BLOCK, bias_E=bias),
                compare=compare,
            )


if __name__ == "__main__":
    sys.exit(measure.main(points))
