"""Triton kernel of the grouped matmul: every block of the expert order times the weights of its expert.

Portable, not the fastest: on Hopper hand-built kernels reach twice as much. It serves where those are not.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["R", "num_blocks"])
def grouped_matmul(
    x_pointer,
    w_pointer,
    out_pointer,
    x_scale_pointer,
    w_scale_pointer,
    routed_pointer,
    expert_pointer,
    num_rows_pointer,
    R,
    num_blocks,
    D: tl.constexpr,
    F: tl.constexpr,
    NUM_ACTIVE: tl.constexpr,
    IS_FP8: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUP: tl.constexpr,
):
    """out[m] = x[row of m] @ w[expert of m].T for every row of the order that is no padding.

    NUM_ACTIVE = 0: x lies in expert order. Else row m is token routed // NUM_ACTIVE of x. Programs take GROUP blocks of
    rows for each block of columns, so that neighbours share weights in the L2 cache.
    """
    num_columns: tl.constexpr = (F + BLOCK_F - 1) // BLOCK_F
    group = tl.program_id(0) // (GROUP * num_columns)
    inside = tl.program_id(0) % (GROUP * num_columns)
    height = tl.minimum(num_blocks - group * GROUP, GROUP)
    j = group * GROUP + inside % height
    column = inside // height
    if j * BLOCK_M >= tl.load(num_rows_pointer):
        return
    expert = tl.load(expert_pointer + j).to(tl.int64)
    m_M = j * BLOCK_M + tl.arange(0, BLOCK_M)
    routed_M = tl.load(routed_pointer + m_M)
    is_row_M = routed_M < R
    row_M = (routed_M // NUM_ACTIVE if NUM_ACTIVE > 0 else m_M).to(tl.int64)
    f_F = column * BLOCK_F + tl.arange(0, BLOCK_F)
    d_D = tl.arange(0, BLOCK_D)
    x_MD = x_pointer + row_M[:, None] * D + d_D[None, :]
    w_DF = w_pointer + (expert * F + f_F[None, :]) * D + d_D[:, None]
    if IS_FP8:  # BLOCK_D = 128, one scale of x for each row, and BLOCK_F <= 128, one scale of w
        x_scale_M = x_scale_pointer + row_M * (D // 128)
        w_scale = w_scale_pointer + (expert * (F // 128) + column * BLOCK_F // 128) * (D // 128)
    sum_MF = tl.zeros([BLOCK_M, BLOCK_F], tl.float32)
    for d in range(0, D, BLOCK_D):
        is_w_DF = f_F[None, :] < F
        is_x_MD = is_row_M[:, None]
        if D % BLOCK_D != 0:
            is_w_DF = is_w_DF & (d + d_D[:, None] < D)
            is_x_MD = is_x_MD & (d + d_D[None, :] < D)
        part_MD = tl.load(x_MD, mask=is_x_MD, other=0.0)
        part_DF = tl.load(w_DF, mask=is_w_DF, other=0.0)
        if IS_FP8:
            scale_M = tl.load(x_scale_M + d // 128, mask=is_row_M, other=0.0) * tl.load(w_scale + d // 128)
            sum_MF += tl.dot(part_MD, part_DF) * scale_M[:, None]
        else:
            sum_MF = tl.dot(part_MD, part_DF, sum_MF, input_precision="ieee")
        x_MD += BLOCK_D
        w_DF += BLOCK_D
    out_MF = out_pointer + m_M[:, None].to(tl.int64) * F + f_F[None, :]
    tl.store(out_MF, sum_MF.to(out_pointer.dtype.element_ty), mask=is_row_M[:, None] & (f_F[None, :] < F))
