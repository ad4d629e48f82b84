"""The caches of many layers as one pool of pages: equal-sized byte pages at addresses in a table on the device.

A pool is made once, after the caches are allocated: their addresses do not change, so launches that use it can be
recorded in a CUDA graph. A page may hold its bytes in any order of heads and places (NHD, HND, keys beside values):
moves copy whole pages and never look inside.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class PagePool:
    """Layers' caches as bytes.

    Example: two layers of 16-place pages, 8 heads of 128, bfloat16, keys and values in one tensor [P, 8, 16, 256]:
    page_bytes == step_bytes == 65536, unit_bytes == 16.
    """

    caches_L_PW: list[torch.Tensor]
    """Each layer's cache, uint8 [num_pages, page_bytes]; keeps the memory alive."""
    bases_L: torch.Tensor
    """Each layer's address, int64, on the device."""
    num_pages: int
    page_bytes: int
    step_bytes: int
    """Bytes from one page of a layer to its next: more than page_bytes where layers share a page."""
    unit_bytes: int
    """Largest power of two, at most 16, that divides every address, page_bytes and step_bytes: the width of a load."""

    @property
    def device(self) -> torch.device:
        return self.bases_L.device


def page_bytes_of(cache: torch.Tensor) -> int:
    """Return the bytes of one page of a cache [P, ...], whose page must be one dense piece of memory.

    Raises:
        NotImplementedError: if a page has holes or overlaps, so that it is no run of bytes.
    """
    expected = 1
    for stride, size in sorted(zip(cache.stride()[1:], cache.shape[1:], strict=True)):
        if size == 1:
            continue
        if stride != expected:
            raise NotImplementedError(
                f"caches: a page must be one dense run of bytes, got shape {tuple(cache.shape)} with strides "
                f"{cache.stride()}; pass the tensor that holds keys and values together, not a slice of it"
            )
        expected *= size
    return expected * cache.element_size()


def as_bytes(cache: torch.Tensor) -> torch.Tensor:
    """Return the cache as uint8 [P, page_bytes], sharing memory."""
    width = page_bytes_of(cache) // cache.element_size()
    return torch.as_strided(cache, (cache.shape[0], width), (cache.stride(0), 1)).view(torch.uint8)


def make_pool(caches: Sequence[torch.Tensor]) -> PagePool:
    """Return the pool of these caches, one for each layer, each [P, ...] with the page as its first dimension.

    Raises:
        ValueError: no cache, no tensor, caches on different devices, or pages that share memory.
        NotImplementedError: caches whose pages differ in number, size or distance: make one pool for each kind.
    """
    if not caches:
        raise ValueError("caches is empty; expected one tensor [pages, ...] for each layer")
    for at, cache in enumerate(caches):
        if not isinstance(cache, torch.Tensor) or cache.dim() == 0:
            raise ValueError(f"caches[{at}]: got {type(cache).__name__}; must be a tensor [pages, ...]")
    caches_L_PW = [as_bytes(cache) for cache in caches]
    kinds = {(str(cache.device), *cache.shape, cache.stride(0)) for cache in caches_L_PW}
    if len({kind[0] for kind in kinds}) > 1:
        raise ValueError(f"caches must share one device, got {sorted({kind[0] for kind in kinds})}")
    if len(kinds) > 1:
        found = sorted(kind[1:] for kind in kinds)
        raise NotImplementedError(
            f"caches must have equal pages, got (pages, bytes of a page, bytes to the next) {found}; make one pool each"
        )
    addresses = [cache.data_ptr() for cache in caches_L_PW]
    num_pages, page_bytes = caches_L_PW[0].shape
    step_bytes = caches_L_PW[0].stride(0) if num_pages > 1 else page_bytes
    if num_pages == 0 or page_bytes == 0:
        raise ValueError(f"caches must hold at least one page of at least one byte, got shape {tuple(caches[0].shape)}")
    if step_bytes < page_bytes:
        raise ValueError(
            f"caches: pages of {page_bytes} bytes lie {step_bytes} bytes apart; they must not share memory"
        )
    unit_bytes = 16
    while any(number % unit_bytes for number in (*addresses, page_bytes, step_bytes)):
        unit_bytes //= 2
    bases_L = torch.tensor(addresses, dtype=torch.int64).to(caches_L_PW[0].device)
    return PagePool(caches_L_PW, bases_L, num_pages, page_bytes, step_bytes, unit_bytes)
