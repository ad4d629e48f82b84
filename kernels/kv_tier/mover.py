"""Pages between the device's cache and rows on the host, a bounded number at a time.

On a GPU pages of all layers are gathered into one piece of device memory, which the copy engine then takes to pinned
host memory: a page here is far above the 28 KiB under which a kernel that reaches the host would be faster, and the
multiprocessors stay free. On a CPU the cache is host memory and pages are gathered straight into the rows.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch

from kernels.checks import Impl
from kernels.pages.op import page_gather, page_scatter
from kernels.pages.pool import PagePool


class PageMover:
    """Staging buffers for `chunk` pages of a pool."""

    def __init__(self, pool: PagePool, chunk: int = 32):
        self.pool, self.chunk = pool, chunk
        self.row_bytes = len(pool.caches_L_PW) * pool.page_bytes
        """Bytes of one page with all its layers."""
        self._impl: Impl = "triton" if pool.device.type == "cuda" else "ref"
        size = (chunk, len(pool.caches_L_PW), pool.page_bytes)
        self._device_NLW = torch.empty(size, dtype=torch.uint8, device=pool.device)
        on_gpu = pool.device.type == "cuda"
        self._host_NLW = torch.empty(size, dtype=torch.uint8, pin_memory=True) if on_gpu else self._device_NLW

    def read(self, blocks: Sequence[int]) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield (which of the blocks, their rows uint8 [n, row_bytes] on the host); rows live until the next step."""
        for part, pages_N in self._parts(blocks):
            staged = self._device_NLW[: len(pages_N)]
            page_gather(self.pool, pages_N, staged, impl=self._impl)
            host = self._host_NLW[: len(pages_N)]
            if host is not staged and host.data_ptr() != staged.data_ptr():
                host.copy_(staged)  # pinned and blocking: the rows are complete when they are yielded
            yield part, host.view(len(pages_N), self.row_bytes)

    def write(self, blocks: Sequence[int], rows: Iterable[torch.Tensor]) -> None:
        """Store rows[i], uint8 [row_bytes] on the host, into page blocks[i] of the cache.

        `rows` is walked once, in order, so that it may be computed on the way.
        """
        source = iter(rows)
        for _, pages_N in self._parts(blocks):
            count = len(pages_N)
            host = self._host_NLW[:count].view(count, self.row_bytes)
            for row in host:
                row.copy_(next(source))
            staged = self._device_NLW[:count]
            if host.data_ptr() != staged.data_ptr():
                staged.copy_(self._host_NLW[:count])  # blocking, so that the host buffer may be filled again
            page_scatter(self.pool, pages_N, staged, impl=self._impl)

    def _parts(self, blocks: Sequence[int]) -> Iterator[tuple[slice, torch.Tensor]]:
        """Cut the list into pieces that the staging buffers hold."""
        for start in range(0, len(blocks), self.chunk):
            part = slice(start, min(start + self.chunk, len(blocks)))
            yield part, torch.tensor(blocks[part], dtype=torch.int64, device=self.pool.device)
