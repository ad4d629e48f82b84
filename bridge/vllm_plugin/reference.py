"""FP8 arithmetic of the CPU reference kernels in plain torch: e4m3, scales that multiply; knows nothing of vLLM."""

import torch

FP8_MAX = 448.0
PER_TOKEN = -1
PER_TENSOR = 0
_TINY = 1e-12  # an all-zero group would divide by zero


def quantize(x_TK: torch.Tensor, group: int, scale: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return e4m3 values and scales of float32 activations.

    Args:
        group: PER_TOKEN, PER_TENSOR, or how many neighbours of a row share a scale; the last group may be shorter.
        scale: static scale; None: absmax / 448.
    Returns:
        [T, K] e4m3 and the scale: [1], [T, 1] or [T, ceil(K / group)].
    """
    if group > 0:
        num_padding = -x_TK.shape[-1] % group
        x_TGk = torch.nn.functional.pad(x_TK, (0, num_padding)).unflatten(-1, (-1, group))
        scale_TG = (x_TGk.abs().amax(-1) / FP8_MAX).clamp(min=_TINY)
        return _cast(x_TK / _spread(scale_TG, group, x_TK.shape[-1])), scale_TG
    if scale is None:
        absmax = x_TK.abs().amax(-1, keepdim=True) if group == PER_TOKEN else x_TK.abs().amax().reshape(1)
        scale = (absmax / FP8_MAX).clamp(min=_TINY)
    return _cast(x_TK / scale), scale


def quantize_activations(x_TK: torch.Tensor, group: int, scale: torch.Tensor | None = None) -> torch.Tensor:
    """Return float32 activations after a round trip through e4m3."""
    quantized, scales = quantize(x_TK, group, scale)
    if group > 0:
        return quantized.float() * _spread(scales, group, x_TK.shape[-1])
    return quantized.float() * scales


def dequantize(w_NK: torch.Tensor, scale: torch.Tensor, block: tuple[int, int] | list[int] | None) -> torch.Tensor:
    """Return the float32 weights of one matrix.

    Args:
        w_NK: [N, K] e4m3.
        scale: [ceil(N / rows), ceil(K / cols)] with block = (rows, cols); [N, 1], [N] or one number without.
    """
    if block is None:
        return w_NK.float() * (scale.float().reshape(-1, 1) if scale.numel() > 1 else scale.float().reshape(()))
    n, k = w_NK.shape
    per_row = scale.float().repeat_interleave(block[0], 0)[:n]
    return w_NK.float() * _spread(per_row, block[1], k)


def _spread(scale_TG: torch.Tensor, group: int, size: int) -> torch.Tensor:
    """Repeat each scale for the members of its group: [T, G] -> [T, size]."""
    return scale_TG.repeat_interleave(group, -1)[..., :size]


def _cast(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
