"""Move cache pages: copy-on-write and defragmentation on the device, and to and from one contiguous buffer.

The buffer is uint8 [N pages, L layers, page bytes] so that one page with all its layers is one run of bytes, as a tier
in RAM or on disk stores it. It lies on the pool's device or in pinned host memory, which a GPU reaches by the same
address; over about 28 KiB a page a gather into device memory and one copy by the copy engine is the better way to the
host, and leaves the multiprocessors to the model (bench.py finds the crossing).

A negative page moves nothing: lists of a fixed length, padded with -1, can be recorded in a CUDA graph. A page past the
pool is refused where the list can be read (kernels/indices.py) and otherwise moves nothing either.
"""

import torch
import triton
import triton.language as tl

from kernels.checks import Impl, check_impl
from kernels.indices import check_below, check_distinct, check_index_dtype, is_read
from kernels.pages.cases import BLOCK_BYTES, NUM_WARPS
from kernels.pages.kernel import copy_pages, move_pages
from kernels.pages.pool import PagePool
from kernels.pages.ref import page_copy_ref, page_gather_ref, page_scatter_ref

WORDS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}
BUFFER_DTYPES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def page_copy(
    pool: PagePool, from_N: torch.Tensor, to_N: torch.Tensor, *, impl: Impl, check: bool | None = None
) -> None:
    """Copy page from_N[i] onto page to_N[i] in every layer of the pool, in place.

    The pairs move at the same time, so no page may be written twice, nor written and read in one call: a chain of
    moves (a <- b <- c) is two calls.

    Args:
        from_N, to_N: int32 or int64 pages; a pair with a negative end is skipped.
        check: read the lists; None: only when they are on the host.
    Raises:
        ValueError: unlike lists; pages outside the pool, written twice, or both read and written.
    """
    check_list("from_N", from_N, pool, check)
    check_list("to_N", to_N, pool, check)
    if from_N.shape != to_N.shape:
        raise ValueError(f"to_N: must be as long as from_N, {len(from_N)}, got {len(to_N)}")
    if is_read(from_N, check) and is_read(to_N, check):
        moved_N = (from_N >= 0) & (to_N >= 0)
        check_distinct("to_N", to_N[moved_N], "a page can be written once in one call")
        both = set(from_N[moved_N].tolist()) & set(to_N[moved_N].tolist())
        if both:
            raise ValueError(f"to_N: pages {sorted(both)[:4]} are read by from_N in the same call; split the chain")
    check_impl("page_copy", impl, pool.bases_L)
    if impl == "ref":
        page_copy_ref(pool.caches_L_PW, from_N, to_N)
    else:
        launch_copy(pool, from_N, to_N)


def page_gather(
    pool: PagePool,
    pages_N: torch.Tensor,
    buffer_NLW: torch.Tensor,
    *,
    impl: Impl,
    check: bool | None = None,
) -> None:
    """Copy page pages_N[i] of layer l to buffer_NLW[i, l]; rows of negative pages keep what they held.

    Args:
        pages_N: int32 or int64 pages; the same page may stand there more than once.
        buffer_NLW: uint8 [N, L, page_bytes], contiguous, on the pool's device or pinned on the host.
        check: read the list; None: only when it is on the host.
    Raises:
        ValueError: wrong buffer, or a page outside the pool.
    """
    check_list("pages_N", pages_N, pool, check)
    check_buffer(pool, pages_N, buffer_NLW)
    check_impl("page_gather", impl, pool.bases_L)
    if impl == "ref":
        page_gather_ref(pool.caches_L_PW, pages_N, buffer_NLW)
    else:
        launch_move(pool, pages_N, buffer_NLW, to_buffer=True)


def page_scatter(
    pool: PagePool,
    pages_N: torch.Tensor,
    buffer_NLW: torch.Tensor,
    *,
    impl: Impl,
    check: bool | None = None,
) -> None:
    """Copy buffer_NLW[i, l] to page pages_N[i] of layer l: the way back of page_gather; no page may stand there twice.

    Raises:
        ValueError: wrong buffer, a page outside the pool, or one that would be written twice.
    """
    check_list("pages_N", pages_N, pool, check)
    if is_read(pages_N, check):
        check_distinct("pages_N", pages_N, "a page can be written once in one call")
    check_buffer(pool, pages_N, buffer_NLW)
    check_impl("page_scatter", impl, pool.bases_L)
    if impl == "ref":
        page_scatter_ref(pool.caches_L_PW, pages_N, buffer_NLW)
    else:
        launch_move(pool, pages_N, buffer_NLW, to_buffer=False)


def check_list(name: str, pages_N: torch.Tensor, pool: PagePool, check: bool | None) -> None:
    """Raise ValueError unless these are pages of the pool, on its device."""
    if not isinstance(pool, PagePool):
        raise ValueError(f"pool: got {type(pool).__name__}; must be a PagePool, from make_pool")
    check_index_dtype(name, pages_N)
    if pages_N.device != pool.device:
        raise ValueError(f"{name}: must be on the pool's device {pool.device}, got {pages_N.device}")
    if is_read(pages_N, check):
        check_below(name, pages_N, pool.num_pages, "pages")


def check_buffer(pool: PagePool, pages_N: torch.Tensor, buffer_NLW: torch.Tensor) -> None:
    """Raise ValueError unless the buffer can hold these pages and the device can reach it."""
    if not isinstance(buffer_NLW, torch.Tensor):
        raise ValueError(f"buffer_NLW: got {type(buffer_NLW).__name__}; must be a torch.Tensor")
    expected = (len(pages_N), len(pool.caches_L_PW), pool.page_bytes)
    if tuple(buffer_NLW.shape) != expected or buffer_NLW.dtype != torch.uint8:
        got = f"{buffer_NLW.dtype} {tuple(buffer_NLW.shape)}"
        raise ValueError(f"buffer_NLW: must be uint8 [pages, layers, page bytes] = {expected}, got {got}")
    if not buffer_NLW.is_contiguous():
        raise ValueError(f"buffer_NLW: must be contiguous, got strides {buffer_NLW.stride()}")
    if buffer_NLW.device != pool.device and not (buffer_NLW.device.type == "cpu" and buffer_NLW.is_pinned()):
        where = f"{buffer_NLW.device}{' (not pinned)' if buffer_NLW.device.type == 'cpu' else ''}"
        raise ValueError(f"buffer_NLW: must be on {pool.device} or in pinned host memory, got {where}")


def words(pool: PagePool, unit_bytes: int) -> dict:
    """Return the constants of a launch: a load unit of 16 bytes is two words of 8, a smaller one is one word."""
    word_bytes = min(unit_bytes, 8)
    block = min(BLOCK_BYTES // word_bytes, triton.next_power_of_2(pool.page_bytes // word_bytes))
    return {"WORD": WORDS[word_bytes], "UNIT": unit_bytes // word_bytes, "BLOCK": block, "num_warps": NUM_WARPS}


def grid(pool: PagePool, num_pages: int, block_bytes: int) -> tuple[int, int, int]:
    """Return the programs of a launch: pages, layers, blocks of a page."""
    return num_pages, len(pool.caches_L_PW), triton.cdiv(pool.page_bytes, block_bytes)


def launch_copy(pool: PagePool, from_N: torch.Tensor, to_N: torch.Tensor) -> None:
    """Start copy_pages over all pairs; an empty list starts nothing."""
    if len(from_N) == 0:
        return
    unit = pool.unit_bytes
    constants = words(pool, unit)
    sizes = (pool.num_pages, pool.page_bytes // unit, pool.step_bytes // unit)
    blocks = grid(pool, len(from_N), constants["BLOCK"] * min(unit, 8))
    copy_pages[blocks](pool.bases_L, from_N, to_N, *sizes, **constants)


def launch_move(pool: PagePool, pages_N: torch.Tensor, buffer_NLW: torch.Tensor, to_buffer: bool) -> None:
    """Start move_pages over all pages; an empty list starts nothing."""
    if len(pages_N) == 0:
        return
    unit = pool.unit_bytes
    while buffer_NLW.data_ptr() % unit:  # a buffer at an odd address is moved in narrower words
        unit //= 2
    constants = words(pool, unit)
    sizes = (pool.num_pages, pool.page_bytes // unit, pool.step_bytes // unit)
    blocks = grid(pool, len(pages_N), constants["BLOCK"] * min(unit, 8))
    buffer = buffer_NLW.view(BUFFER_DTYPES[min(unit, 8)])
    move_pages[blocks](pool.bases_L, pages_N, buffer, *sizes, TO_BUFFER=to_buffer, **constants)
