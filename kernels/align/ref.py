"""The expert order in plain torch: the specification. A stable sort by local expert, then room for whole blocks."""

import torch

from kernels import aligned
from kernels.aligned import Aligned


def align_ref(
    ids_TA: torch.Tensor,
    num_experts: int,
    block: int,
    *,
    expert_map_E: torch.Tensor | None = None,
    num_local_experts: int | None = None,
) -> Aligned:
    """Return the order of the routed rows. See kernels.align.op.align."""
    num_local = num_experts if num_local_experts is None else num_local_experts
    ids_R = ids_TA.flatten().long()
    R = ids_R.numel()
    is_here_R = (ids_R >= 0) & (ids_R < num_experts)
    expert_R = ids_R.where(is_here_R, torch.zeros_like(ids_R))
    if expert_map_E is not None:
        expert_R = expert_map_E.long()[expert_R]
        is_here_R = is_here_R & (expert_R >= 0) & (expert_R < num_local)
    rows = torch.nonzero(is_here_R).flatten()
    order = rows[expert_R[rows].argsort(stable=True)]
    num_E = torch.bincount(expert_R[rows], minlength=num_local)
    blocks_E = (num_E + block - 1) // block
    first_E = (blocks_E.cumsum(0) - blocks_E) * block
    rank = torch.arange(order.numel(), device=ids_R.device) - (num_E.cumsum(0) - num_E)[expert_R[order]]
    position = (first_E[expert_R[order]] + rank).int()

    result = aligned.empty(R, num_local, block, ids_R.device)
    result.routed_M.fill_(R)
    result.routed_M[position.long()] = order.int()
    result.position_R.fill_(-1)
    result.position_R[order] = position
    experts = torch.arange(num_local, device=ids_R.device).repeat_interleave(blocks_E)
    result.expert_J.fill_(-1)
    result.expert_J[: experts.numel()] = experts.int()
    result.num_rows_1.copy_(blocks_E.sum(0, keepdim=True) * block)
    return result
