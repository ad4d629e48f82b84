"""Attention of one query token for each sequence over its cache pages, in two stages: the Triton programs.

Stage one: program (sequence, block of heads, split) folds its share of the keys into a running maximum, sum and
weighted value. Stage two weighs the splits by their log-sum-exp. Softmax statistics and sums are float32, exponents
base 2 inside; the products take the query's dtype and accumulate in float32. Knows no torch.

A page number outside the cache, or a length past the table, is never dereferenced: it makes its row NaN.
"""

import triton
import triton.language as tl


@triton.jit
def rows_of_keys(table_row, s, key_is_real, table_width, num_pages, page_stride, place_stride, M: tl.constexpr):
    """Return where the cache rows of keys s begin, and which of them lie in the cache."""
    is_listed = key_is_real & (s // M < table_width)
    page = tl.load(table_row + s // M, mask=is_listed, other=-1).to(tl.int64)
    row = page * page_stride + (s % M).to(tl.int64) * place_stride
    return row, is_listed & (page >= 0) & (page < num_pages)


# What changes from step to step of a server is not specialised: it must not compile while it serves.
@triton.jit(do_not_specialize=["table_width", "num_pages", "tables_b", "num_splits"])
def attend_split(
    q_BNH,
    key_cache_PMKH,
    value_cache_PMKH,
    tables_BP,
    lengths_B,
    key_scale,
    value_scale,
    out_BNUH,
    lse_BNU,
    softmax_scale,
    num_splits,
    table_width,
    num_pages,
    q_b,
    q_n,
    tables_b,
    key_p,
    key_m,
    key_k,
    value_p,
    value_m,
    value_k,
    N: tl.constexpr,
    K: tl.constexpr,
    M: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    ROPE_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    KEY_PADDED: tl.constexpr,
    ROPE_PADDED: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    SCALE_STEP: tl.constexpr,
    SCALED: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Fold keys of split u into out_BNUH (float32, normalised) and lse_BNU (base 2, float32).

    The key is KEY_WIDTH columns and then ROPE_WIDTH more (0: none). With a rope part (MLA) the first VALUE_WIDTH ==
    KEY_WIDTH columns of the key are the value, so they are read once.
    """
    sequence = tl.program_id(0).to(tl.int64)
    Q: tl.constexpr = N // K
    BLOCKS: tl.constexpr = (Q + HEADS - 1) // HEADS
    kv_head = (tl.program_id(1) // BLOCKS).to(tl.int64)
    in_group = (tl.program_id(1) % BLOCKS) * HEADS + tl.arange(0, HEADS)
    head = kv_head * Q + in_group
    is_head = in_group < Q
    length = tl.load(lengths_B + sequence)
    room = table_width * M
    # A length that the table has no room for reads one key past it, which is NaN, and not two billion.
    length = tl.where((length < 0) | (length > room), room + 1, length)
    share = tl.cdiv(tl.cdiv(length, num_splits), KEYS) * KEYS
    first = tl.program_id(2) * share
    last = tl.minimum(first + share, length)

    h = tl.arange(0, KEY_PADDED)
    r = tl.arange(0, ROPE_PADDED)
    v = tl.arange(0, VALUE_PADDED)
    q_row = q_BNH + sequence * q_b + head[:, None] * q_n
    q = tl.load(q_row + h[None, :], mask=is_head[:, None] & (h < KEY_WIDTH)[None, :], other=0.0)
    logit_scale = softmax_scale * 1.4426950408889634
    out_scale = 1.0
    if SCALED:
        logit_scale = logit_scale * tl.load(key_scale + kv_head * SCALE_STEP)
        out_scale = tl.load(value_scale + kv_head * SCALE_STEP)
    if ROPE_WIDTH > 0:
        is_rope = is_head[:, None] & (r < ROPE_WIDTH)[None, :]
        q_rope = tl.load(q_row + KEY_WIDTH + r[None, :], mask=is_rope, other=0.0)

    maximum = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    out = tl.zeros([HEADS, VALUE_PADDED], tl.float32)
    table_row = tables_BP + sequence * tables_b
    for start in range(first, last, KEYS):
        s = start + tl.arange(0, KEYS)
        is_key = s < last
        key_row, in_cache = rows_of_keys(table_row, s, is_key, table_width, num_pages, key_p, key_m, M)
        key_row += kv_head * key_k
        key_mask = in_cache[None, :] & (h < KEY_WIDTH)[:, None]
        k = tl.load(key_cache_PMKH + key_row[None, :] + h[:, None], mask=key_mask, other=0.0).to(q.dtype)
        logit = tl.dot(q, k, input_precision=PRECISION)
        if ROPE_WIDTH > 0:
            rope_mask = in_cache[None, :] & (r < ROPE_WIDTH)[:, None]
            k_rope = tl.load(key_cache_PMKH + KEY_WIDTH + key_row[None, :] + r[:, None], mask=rope_mask, other=0.0)
            logit = tl.dot(q_rope, k_rope.to(q.dtype), logit, input_precision=PRECISION)
        logit = tl.where(in_cache[None, :], logit * logit_scale, float("nan"))
        logit = tl.where(is_key[None, :], logit, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(logit, 1))
        shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)  # -inf - -inf would be NaN
        weight = tl.exp2(logit - shift[:, None])
        kept = tl.exp2(maximum - shift)
        total = total * kept + tl.sum(weight, 1)
        if ROPE_WIDTH > 0:
            value = tl.trans(k)
        else:
            value_row, in_cache = rows_of_keys(table_row, s, is_key, table_width, num_pages, value_p, value_m, M)
            value_row += kv_head * value_k
            value_mask = in_cache[:, None] & (v < VALUE_WIDTH)[None, :]
            value = tl.load(value_cache_PMKH + value_row[:, None] + v[None, :], mask=value_mask, other=0.0).to(q.dtype)
        out = tl.dot(weight.to(q.dtype), value, out * kept[:, None], input_precision=PRECISION)
        maximum = new_maximum

    # An empty split has total 0 and lse -inf: stage two gives it no weight. NaN is not 0 and stays.
    is_empty = total == 0.0
    at = (sequence * N + head) * num_splits + tl.program_id(2)
    out = out * (out_scale / tl.where(is_empty, 1.0, total))[:, None]
    out_mask = is_head[:, None] & (v < VALUE_WIDTH)[None, :]
    tl.store(out_BNUH + at[:, None] * VALUE_WIDTH + v[None, :], out, mask=out_mask)
    lse = tl.where(is_empty, float("-inf"), maximum + tl.log2(tl.where(is_empty, 1.0, total)))
    tl.store(lse_BNU + at, lse, mask=is_head)


@triton.jit(do_not_specialize=["num_splits"])
def combine_splits(
    out_BNUH,
    lse_BNU,
    out_BNH,
    lse_BN,
    num_splits,
    VALUE_WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
):
    """Weigh the splits of one (sequence, head) by their log-sum-exp; no key at all gives zeros and lse -inf.

    Program (row, block) writes COLUMNS columns of its row; the first block writes the log-sum-exp, natural base.
    """
    row = tl.program_id(0).to(tl.int64)
    u = tl.arange(0, MAX_SPLITS)
    v = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_split = u < num_splits
    lse = tl.load(lse_BNU + row * num_splits + u, mask=is_split, other=float("-inf"))
    maximum = tl.max(lse, 0)
    weight = tl.exp2(lse - tl.where(maximum == float("-inf"), 0.0, maximum))
    total = tl.sum(weight, 0)
    is_empty = total == 0.0
    is_column = v < VALUE_WIDTH
    part_row = (row * num_splits + u)[:, None] * VALUE_WIDTH
    part = tl.load(out_BNUH + part_row + v[None, :], mask=is_split[:, None] & is_column[None, :], other=0.0)
    out = tl.sum(part * weight[:, None], 0) / tl.where(is_empty, 1.0, total)
    tl.store(out_BNH + row * VALUE_WIDTH + v, out.to(out_BNH.dtype.element_ty), mask=is_column)
    if tl.program_id(1) == 0:
        natural = (maximum + tl.log2(tl.where(is_empty, 1.0, total))) * 0.6931471805599453
        tl.store(lse_BN + row, tl.where(is_empty, float("-inf"), natural))
