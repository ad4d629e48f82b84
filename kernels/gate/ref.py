"""The gate in plain torch: the specification."""

import torch

from kernels.router import Router


def gate_ref(
    logits_TE: torch.Tensor, router: Router, bias_E: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights_TA (float32) and ids_TA (int32), best expert first. See kernels.gate.op.gate."""
    x_TE = logits_TE.float()
    score_TE = x_TE.softmax(1) if router.scoring == "softmax" else x_TE.sigmoid()
    choice_TE = x_TE if bias_E is None else score_TE + bias_E
    order_TE = best_first(choice_TE)
    if router.num_groups > 1:
        is_kept_TE = kept_experts(choice_TE, router, 1 if bias_E is None else 2)
        kept_first_TE = is_kept_TE.gather(1, order_TE).int().argsort(dim=1, descending=True, stable=True)
        order_TE = order_TE.gather(1, kept_first_TE)
    ids_TA = order_TE[:, : router.num_active]
    weights_TA = score_TE.gather(1, ids_TA)
    if router.renormalize:
        weights_TA = weights_TA / (weights_TA.sum(1, keepdim=True) + 1e-20)
    return weights_TA * router.scale, ids_TA.int()


def kept_experts(choice_TE: torch.Tensor, router: Router, num_best: int) -> torch.Tensor:
    """Return whether an expert lies in one of its token's best groups; a group scores the sum of its best experts."""
    T, E = choice_TE.shape
    size = E // router.num_groups
    score_TG = choice_TE.reshape(T, router.num_groups, size).topk(num_best, dim=2).values.sum(2)
    kept_TG = best_first(score_TG)[:, : router.num_kept_groups]
    is_kept_TG = torch.zeros_like(score_TG, dtype=torch.bool).scatter_(1, kept_TG, True)
    return is_kept_TG.repeat_interleave(size, 1)


def best_first(x_TE: torch.Tensor) -> torch.Tensor:
    """Return the indices of each row from largest to smallest; NaN is largest, ties go to the lower index."""
    return x_TE.argsort(dim=1, descending=True, stable=True)
