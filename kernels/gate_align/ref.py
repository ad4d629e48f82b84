"""gate_align in plain torch: the gate, then the order of what it chose."""

import torch

from kernels.align.ref import align_ref
from kernels.aligned import Aligned
from kernels.gate.ref import gate_ref
from kernels.router import Router


def gate_align_ref(
    logits_TE: torch.Tensor,
    router: Router,
    block: int,
    *,
    bias_E: torch.Tensor | None = None,
    expert_map_E: torch.Tensor | None = None,
    num_local_experts: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, Aligned]:
    """Return weights_TA, ids_TA and their order. See kernels.gate_align.op.gate_align."""
    weights_TA, ids_TA = gate_ref(logits_TE, router, bias_E)
    num_experts = logits_TE.shape[1]
    order = align_ref(ids_TA, num_experts, block, expert_map_E=expert_map_E, num_local_experts=num_local_experts)
    return weights_TA, ids_TA, order
