"""Triton kernels of permute and unpermute: rows to expert order and back, bound by bandwidth.

permute walks tokens, not rows of the order: a token is read and quantised once and written A times, and padding is never
touched.
"""

import triton
import triton.language as tl

FP8_MAX = tl.constexpr(448.0)
SMALLEST_AMAX = tl.constexpr(1e-10)


@triton.jit
def quantise(x_D, BLOCK_D: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """Return FP8 codes of each 128 neighbours and their scales: scale = max(|x|, 1e-10) / 448, code = x * (1 / scale).

    The conversion saturates and keeps NaN, so nothing is clamped.
    """
    x_GQ = tl.reshape(x_D, [BLOCK_D // 128, 128])
    amax_G = tl.maximum(tl.max(tl.abs(x_GQ), 1), SMALLEST_AMAX)
    scale_G = tl.div_rn(amax_G, FP8_MAX)
    if POWER_OF_TWO:  # the next one above, exactly, in the exponent bits
        bits_G = scale_G.to(tl.int32, bitcast=True)
        scale_G = ((bits_G + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    code_GQ = (x_GQ * tl.div_rn(1.0, scale_G)[:, None]).to(tl.float8e4nv)
    return tl.reshape(code_GQ, [BLOCK_D]), scale_G


@triton.jit(do_not_specialize=["scale_stride_M", "scale_stride_G"])
def permute(
    x_pointer,
    position_pointer,
    y_pointer,
    scale_pointer,
    stride_T,
    scale_stride_M,
    scale_stride_G,
    D: tl.constexpr,
    NUM_ACTIVE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    QUANTISE: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
):
    """Program (t, b): part b of token t to all its rows of the order."""
    t = tl.program_id(0)
    d_D = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    g_G = tl.program_id(1) * (BLOCK_D // 128) + tl.arange(0, BLOCK_D // 128)
    y_D = tl.load(x_pointer + t.to(tl.int64) * stride_T + d_D, mask=d_D < D, other=0.0)
    if QUANTISE:
        y_D, scale_G = quantise(y_D.to(tl.float32), BLOCK_D, POWER_OF_TWO)
    for a in tl.static_range(NUM_ACTIVE):
        row = tl.load(position_pointer + t.to(tl.int64) * NUM_ACTIVE + a).to(tl.int64)
        tl.store(y_pointer + row * D + d_D, y_D, mask=(row >= 0) & (d_D < D))
        if QUANTISE:
            offset_G = row * scale_stride_M + g_G.to(tl.int64) * scale_stride_G
            tl.store(scale_pointer + offset_G, scale_G, mask=(row >= 0) & (g_G < D // 128))


@triton.jit
def unpermute(
    y_pointer,
    position_pointer,
    weights_pointer,
    out_pointer,
    D: tl.constexpr,
    NUM_ACTIVE: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Program (t, b): part b of token t, the weighted sum of its rows in the order of its choices, in float32."""
    t = tl.program_id(0).to(tl.int64)
    d_D = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    sum_D = tl.zeros([BLOCK_D], tl.float32)
    for a in tl.static_range(NUM_ACTIVE):
        row = tl.load(position_pointer + t * NUM_ACTIVE + a).to(tl.int64)
        weight = tl.load(weights_pointer + t * NUM_ACTIVE + a)
        y_D = tl.load(y_pointer + row * D + d_D, mask=(row >= 0) & (d_D < D), other=0.0).to(tl.float32)
        sum_D += tl.where(row >= 0, weight * y_D, 0.0)  # an expert elsewhere adds nothing, whatever its weight
    tl.store(out_pointer + t * D + d_D, sum_D.to(out_pointer.dtype.element_ty), mask=d_D < D)
