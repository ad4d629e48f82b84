"""Copies of cache blocks inside vLLM by `page_copy`: one launch for all layers of one kind, not one for each layer."""

from collections.abc import Callable, Iterable, Sequence

import torch
import vllm.v1.worker.utils as owner

from kernels.checks import Impl
from kernels.pages.op import page_copy
from kernels.pages.pool import PagePool, make_pool
from kernels.vllm_plugin import places

NAME = "copy_kv_cache_blocks_inplace"


def install(impl: Impl) -> None:
    """Replace the function everywhere; a second call does nothing."""
    if not places.is_replaced(owner, NAME):
        places.replace(owner, NAME, copier(getattr(owner, NAME), impl))


def pools_of(caches: Sequence[torch.Tensor], num_blocks: int) -> list[PagePool]:
    """Return pools of blocks: caches with equal blocks share one. Layers that share a cache count once.

    Raises:
        NotImplementedError: a block is not one run of bytes.
    """
    unique = {(cache.device, cache.data_ptr(), tuple(cache.shape)): cache for cache in caches}
    kinds: dict[tuple, list[torch.Tensor]] = {}
    for cache in unique.values():
        # The kernel's pages may be finer than the scheduler's blocks.
        blocks = cache.unflatten(0, (num_blocks, -1))
        kinds.setdefault((cache.device, blocks[0].numel() * cache.element_size(), blocks.stride(0)), []).append(blocks)
    return [make_pool(kind) for kind in kinds.values()]


def order_of(sources: Sequence[int], targets: Sequence[int]) -> str | None:
    """Return why these copies need an order, or None where they can be made at the same time."""
    if {*sources} & {*targets}:
        return "a block is both read and written"
    return "a block is written twice" if len({*targets}) < len(targets) else None


def copier(stock: Callable, impl: Impl) -> Callable:
    """Return copy_kv_cache_blocks_inplace by `page_copy`, or by `stock` where a block is not one run of bytes."""
    known: dict[tuple, list[PagePool] | str] = {}

    def copy_kv_cache_blocks_inplace(
        kv_caches: Iterable[torch.Tensor], num_blocks: int, kv_cache_block_copies: Sequence[tuple[int, int]]
    ) -> None:
        if not kv_cache_block_copies:
            return
        caches = list(kv_caches)
        key = (num_blocks, *((cache.data_ptr(), tuple(cache.shape)) for cache in caches))
        if key not in known:
            known.clear()  # of an engine that is gone
            try:
                known[key] = pools_of(caches, num_blocks)
            except NotImplementedError as error:
                known[key] = str(error)
        pools = known[key]
        sources, targets = zip(*kv_cache_block_copies, strict=True)
        reason = pools if isinstance(pools, str) else order_of(sources, targets)
        if isinstance(pools, str) or reason is not None:
            places.fall_back("page_copy", str(reason))
            stock(caches, num_blocks, kv_cache_block_copies)
            return
        for pool in pools:
            lists = torch.tensor([sources, targets], dtype=torch.int64)
            from_N, to_N = lists.to(pool.device, non_blocking=True)
            page_copy(pool, from_N, to_N, impl=impl)
        places.calls["page_copy"] += 1

    return copy_kv_cache_blocks_inplace
