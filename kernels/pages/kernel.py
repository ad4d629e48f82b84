"""Move whole cache pages as words: from page to page, and between pages and one contiguous buffer. Triton only.

A cache is given by its address in a table of int64, so one launch serves every layer. Offsets are int64: a pool of
pages is larger than 2**31 words. A page number outside [0, num_pages) moves nothing.
"""

import triton
import triton.language as tl


@triton.jit
def page_address(bases_L, layer, page, step_units, WORD: tl.constexpr, UNIT: tl.constexpr):
    """Return the pointer of a page: its layer's base and `page` steps of step_units units, a unit being UNIT words."""
    # The hint must stand on the pointer: on the integer, before the cast, it does nothing and every load is narrow.
    base = tl.load(bases_L + layer).to(tl.pointer_type(WORD))
    return tl.multiple_of(base, 16 if UNIT > 1 else 1) + page * step_units * UNIT


@triton.jit
def page_ids(pages_N, at, num_pages):
    """Return page number `at` of the list, and whether it is a page at all."""
    page = tl.load(pages_N + at).to(tl.int64)
    return page, (page >= 0) & (page < num_pages)


@triton.jit(do_not_specialize=["num_pages"])
def copy_pages(
    bases_L,
    from_N,
    to_N,
    num_pages,
    page_units,
    step_units,
    WORD: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy page from_N[i] to page to_N[i] in layer j; program (i, j, k) moves BLOCK words, the k-th of the page."""
    source, is_source = page_ids(from_N, tl.program_id(0), num_pages)
    target, is_target = page_ids(to_N, tl.program_id(0), num_pages)
    layer = tl.program_id(1)
    word = tl.program_id(2).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = (word < page_units * UNIT) & is_source & is_target
    x = tl.load(page_address(bases_L, layer, source, step_units, WORD, UNIT) + word, mask=mask)
    tl.store(page_address(bases_L, layer, target, step_units, WORD, UNIT) + word, x, mask=mask)


@triton.jit(do_not_specialize=["num_pages"])
def move_pages(
    bases_L,
    pages_N,
    buffer_NLW,
    num_pages,
    page_units,
    step_units,
    WORD: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
    TO_BUFFER: tl.constexpr,
):
    """Copy page pages_N[i] of layer j to buffer[i, j], or back; program (i, j, k) moves the k-th BLOCK words."""
    page, is_page = page_ids(pages_N, tl.program_id(0), num_pages)
    layer = tl.program_id(1)
    row = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + layer
    word = tl.program_id(2).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = (word < page_units * UNIT) & is_page
    in_cache = page_address(bases_L, layer, page, step_units, WORD, UNIT) + word
    in_buffer = buffer_NLW + row * page_units * UNIT + word
    if TO_BUFFER:
        tl.store(in_buffer, tl.load(in_cache, mask=mask), mask=mask)
    else:
        tl.store(in_cache, tl.load(in_buffer, mask=mask), mask=mask)
