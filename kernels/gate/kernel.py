"""Triton kernel of the gate: logits -> the best experts of each token and their weights.

One warp takes one token. A round of the choice is two 32-bit reductions over the experts, which sm_80 and later do in
one instruction each (redux.sync): the largest key, then the lowest index that has it. A packed 64-bit key needs one
reduction, but of five shuffle steps with two words each. Weights come from the logits of the chosen experts, loaded
again (they are in L1), so that no round moves floats.
"""

import triton
import triton.language as tl

LOWEST = tl.constexpr(-(2**31))  # below the key of every number; marks what is taken, masked or padding
NAN_KEY = tl.constexpr(2**31 - 1)


@triton.jit
def order_key(x):
    """float32 -> int32 of the same order; -0 equals +0, every NaN is above +inf, nothing is LOWEST."""
    bits = x.to(tl.int32, bitcast=True)
    bits = tl.where(bits == LOWEST, 0, bits)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(x != x, NAN_KEY, key)


@triton.jit
def take_best(key_TE, e_E, NUM: tl.constexpr):
    """Return the lowest index of each row's largest key, and the keys without it."""
    best_T = tl.max(key_TE, 1)
    index_T = tl.min(tl.where(key_TE == best_T[:, None], e_E[None, :], NUM), 1)
    return index_T, tl.where(e_E[None, :] == index_T[:, None], LOWEST, key_TE)


@triton.jit
def keep_best_groups(
    choice_TE,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    NUM_KEPT: tl.constexpr,
    SUM_OF_TWO: tl.constexpr,
):
    """Return whether each expert lies in one of its token's NUM_KEPT best groups.

    A group scores its best expert, or with SUM_OF_TWO the sum of its two best. One with a NaN is best of all: the maxima
    drop a NaN, so it is looked for by itself.
    """
    SIZE: tl.constexpr = BLOCK_E // NUM_GROUPS
    choice_TGE = tl.reshape(choice_TE, [BLOCK_T, NUM_GROUPS, SIZE])
    score_TG = tl.max(choice_TGE, 2)
    if SUM_OF_TWO:
        e_E = tl.arange(0, SIZE)
        first_TG = tl.min(tl.where(choice_TGE == score_TG[:, :, None], e_E[None, None, :], SIZE), 2)
        others_TGE = tl.where(e_E[None, None, :] == first_TG[:, :, None], float("-inf"), choice_TGE)
        score_TG += tl.max(others_TGE, 2)
    has_nan_TG = tl.max((choice_TGE != choice_TGE).to(tl.int32), 2)
    key_TG = tl.where(has_nan_TG != 0, NAN_KEY, order_key(score_TG))
    g_G = tl.arange(0, NUM_GROUPS)
    kept_TG = tl.zeros([BLOCK_T, NUM_GROUPS], tl.int32)
    for _ in tl.static_range(NUM_KEPT):
        index_T, key_TG = take_best(key_TG, g_G, NUM_GROUPS)
        kept_TG = tl.where(g_G[None, :] == index_T[:, None], 1, kept_TG)
    kept_TGE = tl.broadcast_to(kept_TG[:, :, None], [BLOCK_T, NUM_GROUPS, SIZE])
    return tl.reshape(kept_TGE, [BLOCK_T, BLOCK_E]) != 0


@triton.jit
def choose(
    logits_pointer,
    bias_pointer,
    t_T,
    T,
    stride_T,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    NUM_ACTIVE: tl.constexpr,
    BLOCK_A: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    NUM_KEPT: tl.constexpr,
    SIGMOID: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Return ids_TA, unscaled weights_TA, and whether each expert was chosen."""
    e_E = tl.arange(0, BLOCK_E)
    row_T = t_T.to(tl.int64) * stride_T
    is_expert_TE = (t_T[:, None] < T) & (e_E[None, :] < NUM_EXPERTS)
    x_TE = tl.load(logits_pointer + row_T[:, None] + e_E[None, :], mask=is_expert_TE, other=float("-inf"))
    x_TE = x_TE.to(tl.float32)
    choice_TE = x_TE  # softmax and sigmoid keep the order of the logits
    if not SIGMOID and (HAS_BIAS or not RENORMALIZE):
        top_T = tl.max(x_TE, 1)
        total_T = tl.sum(tl.exp(x_TE - top_T[:, None]), 1)
    if HAS_BIAS:
        score_TE = 1.0 / (1.0 + tl.exp(-x_TE)) if SIGMOID else tl.exp(x_TE - top_T[:, None]) / total_T[:, None]
        choice_TE = score_TE + tl.load(bias_pointer + e_E, mask=e_E < NUM_EXPERTS, other=0.0)[None, :].to(tl.float32)
    key_TE = tl.where(e_E[None, :] < NUM_EXPERTS, order_key(choice_TE), LOWEST)
    if NUM_GROUPS > 1:
        kept_TE = keep_best_groups(choice_TE, BLOCK_T, BLOCK_E, NUM_GROUPS, NUM_KEPT, HAS_BIAS)
        key_TE = tl.where(kept_TE, key_TE, LOWEST)

    a_A = tl.arange(0, BLOCK_A)
    all_TE = key_TE
    ids_TA = tl.zeros([BLOCK_T, BLOCK_A], tl.int32)
    for a in tl.static_range(NUM_ACTIVE):
        index_T, key_TE = take_best(key_TE, e_E, BLOCK_E)
        ids_TA = tl.where(a_A[None, :] == a, index_T[:, None], ids_TA)

    is_chosen_TA = (t_T[:, None] < T) & (a_A[None, :] < NUM_ACTIVE)
    x_TA = tl.load(logits_pointer + row_T[:, None] + ids_TA, mask=is_chosen_TA, other=float("-inf")).to(tl.float32)
    if SIGMOID:
        weights_TA = 1.0 / (1.0 + tl.exp(-x_TA))  # 0 where not chosen
    elif HAS_BIAS or not RENORMALIZE:
        weights_TA = tl.exp(x_TA - top_T[:, None]) / total_T[:, None]
    else:
        weights_TA = tl.exp(x_TA - tl.max(x_TA, 1)[:, None])
    if RENORMALIZE:
        weights_TA = weights_TA / (tl.sum(weights_TA, 1)[:, None] + 1e-20)
    return ids_TA, weights_TA, (key_TE == LOWEST) & (all_TE != LOWEST)


@triton.jit(do_not_specialize=["T"])
def gate(
    logits_pointer,
    bias_pointer,
    weights_pointer,
    ids_pointer,
    scale,
    T,
    stride_T,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    NUM_ACTIVE: tl.constexpr,
    BLOCK_A: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    NUM_KEPT: tl.constexpr,
    SIGMOID: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Program p: tokens p * BLOCK_T on."""
    t_T = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    ids_TA, weights_TA, _ = choose(
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
    offset_TA = t_T[:, None].to(tl.int64) * NUM_ACTIVE + a_A[None, :]
    mask_TA = (t_T[:, None] < T) & (a_A[None, :] < NUM_ACTIVE)
    tl.store(weights_pointer + offset_TA, weights_TA * scale, mask=mask_TA)
    tl.store(ids_pointer + offset_TA, ids_TA, mask=mask_TA)
