"""Times page moves on a GPU, and finds where the copy engine beats a kernel: python -m kernels.pages.bench

Moves on the device are compared with torch's indexed copies. Moves to and from pinned host memory run in three ways:
`triton` lets the kernel reach the host, `staged` moves through device memory and one copy by the copy engine, `torch`
gives the copy engine every page of every layer. The crossing is the first number of pages at which `staged` is faster.
"""

import sys
from collections.abc import Callable, Iterable
from functools import partial

import torch

from kernels import harness, measure
from kernels.pages.cases import NUM_PAGES, SHAPES, Shape
from kernels.pages.op import page_copy, page_gather, page_scatter
from kernels.pages.pool import PagePool, make_pool

MAX_SINGLE_COPIES = 16
"""Pages beyond this are not copied one by one: the graph would be too large to record."""
MAX_POOL_BYTES = 2**30
"""A ring holds at least four pools; layers beyond this are left out, the move is the same."""


def num_layers(shape: Shape, num_pages: int) -> int:
    """Return how many layers the pool of a point has."""
    return max(1, min(shape.num_layers, MAX_POOL_BYTES // (2 * num_pages * shape.page_bytes)))


def make(shape: Shape, num_pages: int, seed: int, host: bool = False) -> tuple:
    """Return a pool of twice num_pages pages, a list of pages from its first half, one from its second, buffers.

    Small moves to the host take pages in order: what copies them one by one must know their numbers on the host.
    """
    generator = harness.generator(seed)
    layers = num_layers(shape, num_pages)
    memory = torch.randint(0, 256, (layers, 2 * num_pages, shape.page_bytes), dtype=torch.uint8, device=harness.here(),
                           generator=generator)  # fmt: skip
    order = torch.randperm(num_pages, device=harness.here(), generator=generator)
    if host and num_pages <= MAX_SINGLE_COPIES:
        order = order.sort().values
    size = (num_pages, layers, shape.page_bytes)
    staging = torch.zeros(size, dtype=torch.uint8, device=harness.here())
    buffer = (
        torch.zeros(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        if host
        else torch.zeros_like(staging)
    )
    return make_pool(list(memory)), order, order + num_pages, buffer, staging


def copy(pool: PagePool, from_N, to_N, buffer, staging, impl) -> list[torch.Tensor]:
    """Copy on the device."""
    page_copy(pool, from_N, to_N, impl=impl)
    return pool.caches_L_PW


def gather(pool: PagePool, from_N, to_N, buffer, staging, impl) -> list[torch.Tensor]:
    """Gather into the buffer, wherever it lies."""
    page_gather(pool, from_N, buffer, impl=impl)
    return [buffer]


def gather_staged(pool: PagePool, from_N, to_N, buffer, staging) -> list[torch.Tensor]:
    """Gather on the device, then one copy to the host."""
    page_gather(pool, from_N, staging, impl="triton")
    buffer.copy_(staging, non_blocking=True)
    return [buffer]


def gather_each(pool: PagePool, from_N, to_N, buffer, staging) -> list[torch.Tensor]:
    """Give the copy engine every page of every layer, pages 0, 1, 2 ..."""
    for page in range(len(from_N)):
        for layer, cache_PW in enumerate(pool.caches_L_PW):
            buffer[page, layer].copy_(cache_PW[page], non_blocking=True)
    return [buffer]


def scatter(pool: PagePool, from_N, to_N, buffer, staging, impl) -> list[torch.Tensor]:
    """Scatter from the buffer, wherever it lies."""
    page_scatter(pool, to_N, buffer, impl=impl)
    return pool.caches_L_PW


def scatter_staged(pool: PagePool, from_N, to_N, buffer, staging) -> list[torch.Tensor]:
    """One copy to the device, then scatter there."""
    staging.copy_(buffer, non_blocking=True)
    page_scatter(pool, to_N, staging, impl="triton")
    return pool.caches_L_PW


def torch_copy(pool: PagePool, from_N, to_N, buffer, staging) -> list[torch.Tensor]:
    """Copy with torch, layer by layer, all pages being real."""
    for cache_PW in pool.caches_L_PW:
        cache_PW.index_copy_(0, to_N, cache_PW.index_select(0, from_N))
    return pool.caches_L_PW


def torch_gather(pool: PagePool, from_N, to_N, buffer, staging) -> list[torch.Tensor]:
    """Gather with torch, layer by layer."""
    for layer, cache_PW in enumerate(pool.caches_L_PW):
        buffer[:, layer] = cache_PW.index_select(0, from_N)
    return [buffer]


def point(
    shape: Shape,
    num_pages: int,
    what: str,
    providers: dict[str, Callable],
    reference: Callable,
    host: bool = False,
) -> harness.Point:
    """Return one point; a move to or from the host crosses the bus once and device memory once."""
    layers = num_layers(shape, num_pages)
    num_bytes = (1 if host else 2) * num_pages * layers * shape.page_bytes
    return harness.Point(
        op="pages",
        shape=f"{what} N{num_pages} L{layers} {shape.name}",
        dtype="bytes",
        num_bytes=num_bytes,
        make=partial(make, shape, num_pages, host=host),
        providers=providers,
        reference=reference,
        bar=None if host or num_pages < 64 else harness.share_of_copy(num_bytes, 0.85),
    )


def points() -> Iterable[harness.Point]:
    """Return moves on the device for all shapes and sizes, and moves over the bus for two shapes."""
    for shape in SHAPES:
        for num_pages in NUM_PAGES:
            ours = {"triton": partial(copy, impl="triton"), "torch": torch_copy}
            yield point(shape, num_pages, "copy", ours, partial(copy, impl="ref"))
            ours = {"triton": partial(gather, impl="triton"), "torch": torch_gather}
            yield point(shape, num_pages, "gather", ours, partial(gather, impl="ref"))
    for shape in (SHAPES[0], SHAPES[4]):
        for num_pages in NUM_PAGES:
            ways = {"triton": partial(gather, impl="triton"), "staged": gather_staged}
            if num_pages <= MAX_SINGLE_COPIES:
                ways["torch"] = gather_each
            yield point(shape, num_pages, "to host", ways, partial(gather, impl="ref"), host=True)
            ways = {"triton": partial(scatter, impl="triton"), "staged": scatter_staged}
            yield point(shape, num_pages, "from host", ways, partial(scatter, impl="ref"), host=True)


if __name__ == "__main__":
    sys.exit(measure.main(points))
