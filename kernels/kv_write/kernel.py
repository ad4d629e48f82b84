"""Scatter rows of new keys and values, or of latents, into cache pages: the Triton programs of kv_write.

A row is one head of one token. One program moves ROWS rows of both tensors; a row goes to the page and the place in it
that the token's slot names, or nowhere when the slot is negative. Knows no torch.
"""

import triton
import triton.language as tl


@triton.jit
def rows_of_slots(slots_T, row, num_tokens, num_slots, K: tl.constexpr):
    """Return token, head, slot of every row, and which rows are written at all."""
    token = row // K
    slot = tl.load(slots_T + token, mask=token < num_tokens, other=-1).to(tl.int64)
    return token.to(tl.int64), (row % K).to(tl.int64), slot, (slot >= 0) & (slot < num_slots)


@triton.jit
def move_rows(
    source,
    target,
    from_row,
    to_row,
    is_written,
    scale_row,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    QUANTISE: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """Copy rows of WIDTH elements, or round x / scale to the target's FP8 type, saturated at LIMIT; NaN stays NaN."""
    column = tl.arange(0, PADDED)
    mask = is_written[:, None] & (column < WIDTH)[None, :]
    x = tl.load(source + from_row[:, None] + column[None, :], mask=mask)
    if QUANTISE:
        # div_rn, not /: the plain division may be off by 2 ulp and then rounds to another FP8 code than torch's.
        x = tl.div_rn(x.to(tl.float32), tl.broadcast_to(scale_row[:, None], x.shape))
        x = tl.clamp(x, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL).to(target.dtype.element_ty)
    tl.store(target + to_row[:, None] + column[None, :], x, mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])
def write_heads(
    key_TKH,
    value_TKH,
    key_cache_PMKH,
    value_cache_PMKH,
    slots_T,
    key_scale,
    value_scale,
    num_tokens,
    num_slots,
    key_t,
    key_k,
    value_t,
    value_k,
    key_cache_p,
    key_cache_m,
    key_cache_k,
    value_cache_p,
    value_cache_m,
    value_cache_k,
    K: tl.constexpr,
    M: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    KEY_PADDED: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    KEY_SCALE_STEP: tl.constexpr,
    VALUE_SCALE_STEP: tl.constexpr,
    ROWS: tl.constexpr,
    QUANTISE: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """Write rows [ROWS * pid, ROWS * (pid + 1)) of K and V; names such as key_cache_p are strides, in elements."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token, head, slot, is_written = rows_of_slots(slots_T, row, num_tokens, num_slots, K)
    key_scale_row = tl.zeros([ROWS], tl.float32)
    value_scale_row = tl.zeros([ROWS], tl.float32)
    if QUANTISE:
        key_scale_row = tl.load(key_scale + head * KEY_SCALE_STEP)
        value_scale_row = tl.load(value_scale + head * VALUE_SCALE_STEP)
    page, place = slot // M, slot % M
    move_rows(
        key_TKH,
        key_cache_PMKH,
        token * key_t + head * key_k,
        page * key_cache_p + place * key_cache_m + head * key_cache_k,
        is_written,
        key_scale_row,
        KEY_WIDTH,
        KEY_PADDED,
        QUANTISE,
        LIMIT,
    )
    move_rows(
        value_TKH,
        value_cache_PMKH,
        token * value_t + head * value_k,
        page * value_cache_p + place * value_cache_m + head * value_cache_k,
        is_written,
        value_scale_row,
        VALUE_WIDTH,
        VALUE_PADDED,
        QUANTISE,
        LIMIT,
    )


@triton.jit(do_not_specialize=["num_tokens"])
def write_latents(
    latent_TC,
    rope_TR,
    cache_PMC,
    slots_T,
    scale,
    num_tokens,
    num_slots,
    latent_t,
    rope_t,
    cache_p,
    cache_m,
    M: tl.constexpr,
    LATENT_WIDTH: tl.constexpr,
    ROPE_WIDTH: tl.constexpr,
    LATENT_PADDED: tl.constexpr,
    ROPE_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    QUANTISE: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """Write ROWS tokens: the latent, and right behind it in the same cache row the rotated part of the key."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token, head, slot, is_written = rows_of_slots(slots_T, row, num_tokens, num_slots, 1)
    scale_row = tl.zeros([ROWS], tl.float32)
    if QUANTISE:
        scale_row = tl.load(scale + head)
    to_row = (slot // M) * cache_p + (slot % M) * cache_m
    move_rows(
        latent_TC,
        cache_PMC,
        token * latent_t,
        to_row,
        is_written,
        scale_row,
        LATENT_WIDTH,
        LATENT_PADDED,
        QUANTISE,
        LIMIT,
    )
    move_rows(
        rope_TR,
        cache_PMC + LATENT_WIDTH,
        token * rope_t,
        to_row,
        is_written,
        scale_row,
        ROPE_WIDTH,
        ROPE_PADDED,
        QUANTISE,
        LIMIT,
    )
