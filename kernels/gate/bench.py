"""Times of the gate: every public router, one token to 16,384. python -m kernels.gate.bench"""

import sys
from collections.abc import Callable, Iterator

import torch

from kernels import harness, measure, peers
from kernels.gate.cases import MODELS, Model
from kernels.gate.op import gate
from kernels.gate.ref import gate_ref
from kernels.harness import Arguments, Point
from kernels.router import Router

TOKENS = (1, 16, 64, 256, 1024, 4096, 16384)
BARS = {(16384, 128): harness.at_most(12.4), **{(1, num): harness.at_most(2.2) for num in (128, 256)}}
"""(tokens, experts) -> the best public gate (128 experts softmax; 256 at one token)."""


def with_torch(
    logits_TE: torch.Tensor, router: Router, bias_E: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what people write in torch: softmax or sigmoid, topk, renormalise. Ties fall as they like."""
    score_TE = logits_TE.float().softmax(1) if router.scoring == "softmax" else logits_TE.float().sigmoid()
    choice_TE = score_TE if bias_E is None else score_TE + bias_E
    if router.num_groups > 1:
        choice_TGE = choice_TE.unflatten(1, (router.num_groups, -1))
        kept_TG = choice_TGE.topk(2, 2).values.sum(2).topk(router.num_kept_groups, 1).indices
        mask_TG = torch.zeros_like(choice_TGE[:, :, 0]).scatter_(1, kept_TG, 1.0)
        choice_TE = choice_TGE.where(mask_TG[:, :, None] > 0, float("-inf")).flatten(1)
    ids_TA = choice_TE.topk(router.num_active, 1).indices
    weights_TA = score_TE.gather(1, ids_TA)
    if router.renormalize:
        weights_TA = weights_TA / weights_TA.sum(1, keepdim=True)
    return weights_TA * router.scale, ids_TA.int()


def make(model: Model, num_tokens: int, dtype: torch.dtype) -> Callable[[int], Arguments]:
    """Return the maker of arguments."""

    def arguments(seed: int) -> Arguments:
        generator = harness.generator(seed)
        logits_TE = torch.randn(num_tokens, model.num_experts, device=harness.here(), generator=generator).to(dtype)
        bias_E = (
            torch.randn(model.num_experts, device=harness.here(), generator=generator) * 0.1 if model.has_bias else None
        )
        return logits_TE, model.router, bias_E

    return arguments


def compare(ours: tuple, theirs: tuple) -> float:
    """Return the largest difference of the sorted weights; peers break ties otherwise and sort otherwise."""
    return harness.largest_difference(1e-2)(ours[0].sort(1).values, theirs[0].sort(1).values)


def points() -> Iterator[Point]:
    """Yield models x tokens; bytes: T (E logits + A weights and ids)."""
    for model in MODELS:
        for num_tokens in TOKENS:
            yield Point(
                op="gate",
                shape=f"{model.name} T{num_tokens} E{model.num_experts} k{model.router.num_active}",
                dtype="bf16",
                num_bytes=num_tokens * (2 * model.num_experts + 8 * model.router.num_active),
                make=make(model, num_tokens, torch.bfloat16),
                providers={
                    "triton": lambda logits_TE, router, bias_E: gate(logits_TE, router, bias_E, impl="triton"),
                    "torch": with_torch,
                    **peers.gates(model.router, model.has_bias),
                },
                reference=gate_ref,
                compare=compare,
                bar=BARS.get((num_tokens, model.num_experts)),
            )


if __name__ == "__main__":
    sys.exit(measure.main(points))
