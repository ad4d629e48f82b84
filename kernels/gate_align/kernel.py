"""Triton kernel of gate_align: the gate and the expert order in one launch, for decode sizes.

Every program chooses for BLOCK_T tokens and counts the chosen experts from the choice in its registers: a token takes an
expert at most once, so the rank of a row is the number of earlier tokens that chose its expert. The program that ends
last finishes the order, as in kernels.align.
"""

import triton
import triton.language as tl

from kernels.align.kernel import fill_padding, finish, is_last
from kernels.gate.kernel import choose


@triton.jit
def count_chosen(
    is_chosen_TE,
    ids_TA,
    map_pointer,
    histogram_pointer,
    rank_pointer,
    offset_TA,
    is_row_TA,
    NUM_EXPERTS: tl.constexpr,
    NUM_LOCAL: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_L: tl.constexpr,
    HAS_MAP: tl.constexpr,
):
    """Write this program's histogram over local experts and the rank of its rows."""
    chosen_TE = is_chosen_TE.to(tl.int32)
    e_E = tl.arange(0, BLOCK_E)
    num_E = tl.sum(chosen_TE, 0)
    if HAS_MAP:
        l_L = tl.arange(0, BLOCK_L)
        tl.store(histogram_pointer + l_L, l_L * 0)  # local experts that no expert maps to
        tl.debug_barrier()
        local_E = tl.load(map_pointer + e_E, mask=e_E < NUM_EXPERTS, other=-1)
        tl.store(histogram_pointer + local_E, num_E, mask=(local_E >= 0) & (local_E < NUM_LOCAL))
    else:
        tl.store(histogram_pointer + e_E, num_E)
    before_TE = tl.cumsum(chosen_TE, 0) - chosen_TE
    tl.store(rank_pointer + offset_TA, tl.gather(before_TE, ids_TA, 1), mask=is_row_TA)


@triton.jit(do_not_specialize=["T", "M", "J", "num_chunks"])
def gate_align(
    logits_pointer,
    bias_pointer,
    map_pointer,
    weights_pointer,
    ids_pointer,
    histogram_pointer,
    rank_pointer,
    first_pointer,
    routed_pointer,
    position_pointer,
    expert_pointer,
    num_rows_pointer,
    ticket_pointer,
    scale,
    T,
    stride_T,
    M,
    J,
    num_chunks,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    NUM_ACTIVE: tl.constexpr,
    BLOCK_A: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    NUM_KEPT: tl.constexpr,
    SIGMOID: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    NUM_LOCAL: tl.constexpr,
    BLOCK_L: tl.constexpr,
    HAS_MAP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_T: tl.constexpr,
    SPAN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_J: tl.constexpr,
):
    """Program p: tokens p * BLOCK_T on; the last one to end finishes the order."""
    p = tl.program_id(0)
    t_T = p * BLOCK_T + tl.arange(0, BLOCK_T)
    ids_TA, weights_TA, is_chosen_TE = choose(
        logits_pointer,
        bias_pointer,
        t_T,
        T,
        stride_T,
        NUM_EXPERTS,
        BLOCK_E,
        NUM_ACTIVE,
        BLOCK_A,
        NUM_GROUPS,
        NUM_KEPT,
        SIGMOID,
        HAS_BIAS,
        RENORMALIZE,
        BLOCK_T,
    )
    a_A = tl.arange(0, BLOCK_A)
    offset_TA = t_T[:, None] * NUM_ACTIVE + a_A[None, :]
    is_row_TA = (t_T[:, None] < T) & (a_A[None, :] < NUM_ACTIVE)
    tl.store(weights_pointer + offset_TA, weights_TA * scale, mask=is_row_TA)
    tl.store(ids_pointer + offset_TA, ids_TA, mask=is_row_TA)
    count_chosen(
        is_chosen_TE & (t_T[:, None] < T),
        ids_TA,
        map_pointer,
        histogram_pointer + p * BLOCK_L,
        rank_pointer,
        offset_TA,
        is_row_TA,
        NUM_EXPERTS,
        NUM_LOCAL,
        BLOCK_E,
        BLOCK_L,
        HAS_MAP,
    )
    R = T * NUM_ACTIVE
    fill_padding(routed_pointer, p, num_chunks, R, M, SPAN)
    if is_last(ticket_pointer, num_chunks):
        finish(
            ids_pointer,
            map_pointer,
            histogram_pointer,
            rank_pointer,
            first_pointer,
            first_pointer,
            routed_pointer,
            position_pointer,
            expert_pointer,
            num_rows_pointer,
            R,
            J,
            num_chunks,
            NUM_EXPERTS,
            NUM_LOCAL,
            BLOCK_L,
            BLOCK_M,
            HAS_MAP,
            BLOCK_T * NUM_ACTIVE,
            True,
            SPAN,
            ROWS,
            BLOCK_J,
        )
