"""permute: tokens to expert order, quantised on the way if asked; unpermute: the weighted combine back."""

import torch
import triton

from kernels.aligned import Aligned, check_aligned
from kernels.checks import Impl, check_impl, check_tensor, refuse
from kernels.permute import kernel
from kernels.permute.cases import MAX_ACTIVE, NUM_WARPS, block_for
from kernels.permute.ref import permute_ref, unpermute_ref
from kernels.ranges import check_multiple

ROW_TYPES = (torch.bfloat16, torch.float16, torch.float32)


def permute(
    x_TD: torch.Tensor,
    order: Aligned,
    *,
    quantise: bool = False,
    is_power_of_two: bool = False,
    is_scale_transposed: bool = False,
    impl: Impl,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Copy each token to its rows of the order; padding rows and dropped choices are not written (undefined).

    Quantised, each 128 neighbours of a token share a scale = max(|x|, 1e-10) / 448, with `is_power_of_two` rounded up to
    one; code = x * (1 / scale) as float8_e4m3fn, NaN stays NaN.

    Args:
        x_TD: bfloat16, float16 or float32; rows may be apart; D a multiple of 8, or of 128 when quantised.
        order: of T * A routed rows, from align or gate_align.
        is_scale_transposed: scales lie with neighbouring rows together (stride 1 over M), as DeepGEMM reads them.

    Returns:
        y_MD in the dtype of x_TD or float8_e4m3fn, and scale_MG (float32, G = D / 128) or None.

    Raises:
        ValueError: an argument breaks its constraint.
        NotImplementedError: impl="triton" with more than 32 choices of a token.
    """
    check_tensor("x_TD", x_TD, shape=(None, None), dtypes=ROW_TYPES, layout="rows")
    T, D = x_TD.shape
    check_multiple("D", D, 128 if quantise else 8)
    num_active = check_routed(order, T, x_TD.device)
    if (is_power_of_two and not quantise) or (is_scale_transposed and not quantise):
        raise ValueError("is_power_of_two and is_scale_transposed: need quantise=True")
    check_impl("permute", impl, x_TD)
    check_active("permute", impl, num_active)
    M, G = order.routed_M.numel(), D // 128
    if impl == "ref":
        y_MD, scale_MG = permute_ref(x_TD, order, quantise=quantise, is_power_of_two=is_power_of_two)
        return y_MD, scale_MG.t().contiguous().t() if scale_MG is not None and is_scale_transposed else scale_MG
    y_MD = torch.empty(M, D, dtype=torch.float8_e4m3fn if quantise else x_TD.dtype, device=x_TD.device)
    scale_MG = torch.empty((G, M) if is_scale_transposed else (M, G), dtype=torch.float32, device=x_TD.device)
    scale_MG = scale_MG.t() if is_scale_transposed else scale_MG
    if T and D:
        block_d = block_for(D)
        kernel.permute[(T, triton.cdiv(D, block_d))](
            x_TD,
            order.position_R,
            y_MD,
            scale_MG,
            x_TD.stride(0),
            *scale_MG.stride(),
            D=D,
            NUM_ACTIVE=num_active,
            BLOCK_D=block_d,
            QUANTISE=quantise,
            POWER_OF_TWO=is_power_of_two,
            num_warps=NUM_WARPS,
        )
    return y_MD, scale_MG if quantise else None


def unpermute(y_MD: torch.Tensor, order: Aligned, weights_TA: torch.Tensor, *, impl: Impl) -> torch.Tensor:
    """Return out_TD = sum over a of weights_TA[t, a] * y_MD[position of (t, a)], added in float32, choice after choice.

    Args:
        y_MD: bfloat16, float16 or float32, contiguous, rows in expert order; padding rows are not read.
        weights_TA: float32.

    Raises:
        ValueError: an argument breaks its constraint.
        NotImplementedError: impl="triton" with more than 32 choices of a token.
    """
    check_tensor("weights_TA", weights_TA, shape=(None, None), dtypes=(torch.float32,))
    T, A = weights_TA.shape
    check_aligned("order", order, T * A, weights_TA.device)
    check_tensor("y_MD", y_MD, shape=(order.routed_M.numel(), None), dtypes=ROW_TYPES, device=weights_TA.device)
    check_impl("unpermute", impl, y_MD, weights_TA)
    check_active("unpermute", impl, A)
    if impl == "ref":
        return unpermute_ref(y_MD, order, weights_TA)
    D = y_MD.shape[1]
    out_TD = torch.empty(T, D, dtype=y_MD.dtype, device=y_MD.device)
    if T and D:
        block_d = block_for(D)
        kernel.unpermute[(T, triton.cdiv(D, block_d))](
            y_MD, order.position_R, weights_TA, out_TD, D=D, NUM_ACTIVE=A, BLOCK_D=block_d, num_warps=NUM_WARPS
        )
    return out_TD


def check_routed(order: Aligned, num_tokens: int, device: torch.device) -> int:
    """Raise ValueError unless `order` is of some choices of each token; return how many."""
    check_aligned("order", order, None, device)
    R = order.position_R.numel()
    if (num_tokens == 0 and R) or (num_tokens and (R == 0 or R % num_tokens)):
        raise ValueError(f"order: has {R} routed rows; must be a multiple of the {num_tokens} tokens, not 0")
    return R // max(num_tokens, 1)


def check_active(op: str, impl: Impl, num_active: int) -> None:
    """Raise NotImplementedError for more choices than the kernels unroll."""
    if impl == "triton" and num_active > MAX_ACTIVE:
        refuse(op, f"at most {MAX_ACTIVE} choices of a token, got {num_active}")
