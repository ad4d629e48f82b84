"""grouped_matmul: rows in expert order times the weights of their experts, in bfloat16 or FP8 with block scales."""

import torch
import triton

from kernels.aligned import Aligned, check_aligned
from kernels.checks import Impl, check_impl, check_tensor, refuse
from kernels.grouped_matmul import kernel
from kernels.grouped_matmul.cases import GROUP, tile_for
from kernels.grouped_matmul.ref import grouped_matmul_ref
from kernels.ranges import check_multiple, check_range

FP8 = torch.float8_e4m3fn
OUT_TYPES = (torch.bfloat16, torch.float16, torch.float32)


def grouped_matmul(
    x_RD: torch.Tensor,
    w_EFD: torch.Tensor,
    order: Aligned,
    *,
    x_scale_RG: torch.Tensor | None = None,
    w_scale_EFG: torch.Tensor | None = None,
    num_active: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    impl: Impl,
) -> torch.Tensor:
    """Return out_MF[m] = x[source of m] @ w[expert of m].T, added in float32; padding rows are not written (undefined).

    Args:
        x_RD: bfloat16, float16 or float32 in the dtype of the weights, or FP8; rows in expert order, or tokens.
        w_EFD: (local) experts, output width, input width: as Hugging Face checkpoints store them, stacked.
        order: from align with these experts; blocks of 16 rows or more.
        x_scale_RG: FP8 only: float32, one for each row and 128 inputs.
        w_scale_EFG: FP8 only: float32 [E, F / 128, D / 128], one for each 128 x 128 block of a weight.
        num_active: 0 = x_RD lies in expert order; A = x_RD holds tokens, and row m is token routed_M[m] // A.
        dtype: of the result.

    Raises:
        ValueError: an argument breaks its constraint.
        NotImplementedError: impl="triton" with blocks below 16 or above 128 rows.
    """
    check(x_RD, w_EFD, order, x_scale_RG, w_scale_EFG, num_active)
    if dtype not in OUT_TYPES:
        raise ValueError(f"dtype={dtype}: must be {' or '.join(map(str, OUT_TYPES))}")
    check_impl("grouped_matmul", impl, x_RD, w_EFD, x_scale_RG, w_scale_EFG)
    if impl == "ref":
        return grouped_matmul_ref(
            x_RD,
            w_EFD,
            order,
            x_scale_RG=x_scale_RG,
            w_scale_EFG=w_scale_EFG,
            num_active=num_active,
            dtype=dtype,
        )
    if not 16 <= order.block <= 128:
        refuse("grouped_matmul", f"blocks of 16 to 128 rows, got order.block={order.block}")
    _, F, D = w_EFD.shape
    J = order.expert_J.numel()
    out_MF = torch.empty(order.routed_M.numel(), F, dtype=dtype, device=x_RD.device)
    tile = tile_for(str(w_EFD.dtype).removeprefix("torch."), order.block)
    if J and F:
        kernel.grouped_matmul[(J * triton.cdiv(F, tile.columns),)](
            x_RD,
            w_EFD,
            out_MF,
            out_MF if x_scale_RG is None else x_scale_RG,  # not read but in FP8
            out_MF if w_scale_EFG is None else w_scale_EFG,
            order.routed_M,
            order.expert_J,
            order.num_rows_1,
            order.position_R.numel(),
            J,
            D=D,
            F=F,
            NUM_ACTIVE=num_active,
            IS_FP8=w_EFD.dtype == FP8,
            BLOCK_M=order.block,
            BLOCK_F=tile.columns,
            BLOCK_D=tile.depth,
            GROUP=GROUP,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
    return out_MF


def check(
    x_RD: torch.Tensor,
    w_EFD: torch.Tensor,
    order: Aligned,
    x_scale_RG: torch.Tensor | None,
    w_scale_EFG: torch.Tensor | None,
    num_active: int,
) -> None:
    """Raise ValueError for an argument that no implementation takes."""
    check_tensor("w_EFD", w_EFD, shape=(None, None, None), dtypes=(*OUT_TYPES, FP8))
    (E, F, D), device = w_EFD.shape, w_EFD.device
    check_range("num_active", num_active, 0, 2**10)
    check_aligned("order", order, None, device)
    if order.num_experts != E:
        raise ValueError(f"w_EFD: weights of {E} experts; must be the {order.num_experts} of the order")
    num_routed = order.position_R.numel()
    if num_active:
        check_multiple("number of routed rows", num_routed, num_active)
    rows = num_routed // num_active if num_active else order.routed_M.numel()
    check_tensor("x_RD", x_RD, shape=(rows, D), dtypes=(w_EFD.dtype,), device=device)
    if w_EFD.dtype != FP8:
        check_multiple("D", D, 8)
        if x_scale_RG is not None or w_scale_EFG is not None:
            raise ValueError(f"x_scale_RG, w_scale_EFG: given with weights of {w_EFD.dtype}; only FP8 has scales")
        return
    check_multiple("D", D, 128)
    check_multiple("F", F, 128)
    if x_scale_RG is None or w_scale_EFG is None:
        raise ValueError("x_scale_RG, w_scale_EFG: FP8 needs both")
    check_tensor("x_scale_RG", x_scale_RG, shape=(rows, D // 128), dtypes=(torch.float32,), device=device)
    check_tensor("w_scale_EFG", w_scale_EFG, shape=(E, F // 128, D // 128), dtypes=(torch.float32,), device=device)
