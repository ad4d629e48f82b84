"""permute, unpermute and the FP8 blocks in plain torch: the specification."""

import torch

from kernels.aligned import Aligned


def quantise_ref(x_TD: torch.Tensor, *, is_power_of_two: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Return FP8 codes of 1x128 blocks and float32 scales: scale = max(|x|, 1e-10) / 448, code = x * (1 / scale)."""
    T, D = x_TD.shape
    x_TGQ = x_TD.float().reshape(T, D // 128, 128)
    amax_TG = x_TGQ.abs().nan_to_num(nan=0.0, posinf=torch.inf).amax(2)  # a NaN marks itself, not its block
    scale_TG = amax_TG.clamp(min=1e-10) / 448.0
    if is_power_of_two:
        scale_TG = ((scale_TG.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
    y_TGQ = x_TGQ * (1.0 / scale_TG)[:, :, None]
    y_TGQ = torch.where(y_TGQ.isnan(), y_TGQ, y_TGQ.clamp(-448.0, 448.0))
    return y_TGQ.reshape(T, D).to(torch.float8_e4m3fn), scale_TG


def permute_ref(
    x_TD: torch.Tensor, order: Aligned, *, quantise: bool = False, is_power_of_two: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the rows in expert order, zero where padded, and their scales. See kernels.permute.op.permute."""
    num_active = order.position_R.numel() // max(x_TD.shape[0], 1)
    y_TD, scale_TG = quantise_ref(x_TD, is_power_of_two=is_power_of_two) if quantise else (x_TD, None)
    rows = torch.nonzero(order.position_R >= 0).flatten()
    position = order.position_R[rows].long()

    def spread(source: torch.Tensor) -> torch.Tensor:
        result = torch.zeros(order.routed_M.numel(), source.shape[1], dtype=source.dtype, device=source.device)
        result[position] = source[rows // max(num_active, 1)]
        return result

    return spread(y_TD), None if scale_TG is None else spread(scale_TG)


def unpermute_ref(y_MD: torch.Tensor, order: Aligned, weights_TA: torch.Tensor) -> torch.Tensor:
    """Return the weighted sum of each token's rows, added in float32 in the order of its choices."""
    T, A = weights_TA.shape
    position_TA = order.position_R.reshape(T, A).long()
    total_TD = torch.zeros(T, y_MD.shape[1], dtype=torch.float32, device=y_MD.device)
    for a in range(A):
        here = torch.nonzero(position_TA[:, a] >= 0).flatten()
        total_TD[here] += weights_TA[here, a, None] * y_MD[position_TA[here, a]].float()
    return total_TD.to(y_MD.dtype)
