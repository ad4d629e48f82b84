"""The grouped matmul in plain torch: the specification. One matmul in float32 for each expert."""

import torch

from kernels.aligned import Aligned


def grouped_matmul_ref(
    x_RD: torch.Tensor,
    w_EFD: torch.Tensor,
    order: Aligned,
    *,
    x_scale_RG: torch.Tensor | None = None,
    w_scale_EFG: torch.Tensor | None = None,
    num_active: int = 0,
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """Return out_MF, zero where padded. See kernels.grouped_matmul.op.grouped_matmul."""
    E, F, _ = w_EFD.shape
    num_routed = order.position_R.numel()
    out_MF = torch.zeros(order.routed_M.numel(), F, dtype=dtype, device=x_RD.device)
    expert_M = order.expert_J.repeat_interleave(order.block)
    is_row_M = (order.routed_M < num_routed) & (torch.arange(len(expert_M), device=x_RD.device) < order.num_rows_1)
    for expert in range(E):
        rows = torch.nonzero(is_row_M & (expert_M == expert)).flatten()
        if not len(rows):
            continue
        sources = order.routed_M[rows].long() // num_active if num_active else rows
        x_ND = dequantise_ref(x_RD[sources], None if x_scale_RG is None else x_scale_RG[sources], 1)
        w_FD = dequantise_ref(w_EFD[expert], None if w_scale_EFG is None else w_scale_EFG[expert], 128)
        out_MF[rows] = (x_ND @ w_FD.t()).to(dtype)
    return out_MF


def dequantise_ref(x_RD: torch.Tensor, scale_RG: torch.Tensor | None, rows: int) -> torch.Tensor:
    """Return float32 values of blocks of `rows` x 128 codes that share a scale; without scales the values themselves."""
    if scale_RG is None:
        return x_RD.float()
    return x_RD.float() * scale_RG.repeat_interleave(rows, 0).repeat_interleave(128, 1)
