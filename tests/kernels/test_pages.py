"""Page moves copy exactly the listed pages of every layer, whatever a page's size, and touch nothing else."""

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from guarded import Guarded

from kernels.pages import op
from kernels.pages.op import page_copy, page_gather, page_scatter
from kernels.pages.pool import make_pool


def random_bytes(rng: torch.Generator, *shape: int) -> torch.Tensor:
    """Return random bytes: NaN patterns of every dtype among them."""
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=rng)


def caches_of(rng, device, layers: int, pages: int, shape: tuple[int, ...], dtype: torch.dtype) -> list[Guarded]:
    """Return caches [pages, *shape] with random contents between canaries."""
    caches = [Guarded((pages, *shape), dtype, device) for _ in range(layers)]
    for cache in caches:
        cache.bytes.copy_(random_bytes(rng, cache.num_bytes))
    return caches


def as_rows(cache: torch.Tensor) -> torch.Tensor:
    """Return the pages of a contiguous cache as bytes, a copy."""
    return cache.reshape(cache.shape[0], -1).view(torch.uint8).clone()


SHAPES = [
    ((16, 2, 64), torch.bfloat16, 16),  # 16-byte words
    ((1, 1, 4), torch.float32, 16),  # page size 1
    ((5, 3, 9), torch.bfloat16, 2),  # 270 bytes
    ((3, 7), torch.float8_e4m3fn, 1),  # 21 bytes
    ((3, 656), torch.uint8, 16),
    ((9, 3, 4), torch.bfloat16, 8),  # 216 bytes
    ((3, 1), torch.float32, 4),  # 12 bytes
]


@pytest.mark.parametrize(("shape", "dtype", "unit_bytes"), SHAPES)
def test_gather_then_scatter(rng, device, shape, dtype, unit_bytes):
    layers, pages = 3, 11
    caches = caches_of(rng, device, layers, pages, shape, dtype)
    pool = make_pool([cache.tensor for cache in caches])
    assert pool.unit_bytes == unit_bytes
    before = [as_rows(cache.tensor) for cache in caches]
    listed_N = torch.tensor([7, 0, -1, 10, 7], device=device)
    buffer = Guarded((5, layers, pool.page_bytes), torch.uint8, device)
    page_gather(pool, listed_N, buffer.tensor, impl="triton")
    wanted = torch.full_like(buffer.tensor, 0x5A)
    for i, page in enumerate(listed_N.tolist()):
        for layer in range(layers):
            if page >= 0:
                wanted[i, layer] = before[layer][page]
    assert torch.equal(buffer.tensor, wanted)
    assert buffer.margins_are_whole()
    targets_N = torch.tensor([2, 7, 9, -3, 0], dtype=torch.int32, device=device)
    page_scatter(pool, targets_N, buffer.tensor, impl="triton")
    for layer, cache in enumerate(caches):
        for i, page in enumerate(targets_N.tolist()):
            if page >= 0:
                before[layer][page] = wanted[i, layer]
        assert torch.equal(as_rows(cache.tensor), before[layer])
        assert cache.margins_are_whole()


@pytest.mark.parametrize(("shape", "dtype", "unit_bytes"), SHAPES[:4])
def test_copy_on_write(rng, device, shape, dtype, unit_bytes):
    caches = caches_of(rng, device, 2, 7, shape, dtype)
    pool = make_pool([cache.tensor for cache in caches])
    wanted = [as_rows(cache.tensor) for cache in caches]
    from_N = torch.tensor([5, 5, -1, 0, 3], device=device)
    to_N = torch.tensor([1, 6, 2, -1, 4], device=device)
    page_copy(pool, from_N, to_N, impl="triton")
    for cache, rows in zip(caches, wanted, strict=True):
        rows[1], rows[6], rows[4] = rows[5].clone(), rows[5].clone(), rows[3].clone()
        assert torch.equal(as_rows(cache.tensor), rows)
        assert cache.margins_are_whole()


def test_pages_of_several_blocks(rng, device):
    """A page longer than one program moves, whose last block is not full."""
    caches = caches_of(rng, device, 2, 3, (8192 // 4 * 2 + 20,), torch.float32)
    pool = make_pool([cache.tensor for cache in caches])
    buffer = torch.zeros(2, 2, pool.page_bytes, dtype=torch.uint8, device=device)
    page_gather(pool, torch.tensor([2, 0], device=device), buffer, impl="triton")
    for layer, cache in enumerate(caches):
        assert torch.equal(buffer[:, layer], as_rows(cache.tensor)[[2, 0]])


def test_views_of_vllm_layouts(rng, device):
    """A page may hold its dimensions in any order, and pages of one layer may be apart."""
    memory = random_bytes(rng, 5, 2, 3, 16, 32).to(device)  # pages, layers, heads, places, bytes
    caches = [memory[:, layer].transpose(1, 2) for layer in range(2)]
    pool = make_pool(caches)
    assert (pool.page_bytes, pool.step_bytes) == (3 * 16 * 32, 2 * 3 * 16 * 32)
    wanted = memory.clone()
    page_copy(pool, torch.tensor([4, 1], device=device), torch.tensor([0, 3], device=device), impl="triton")
    wanted[0], wanted[3] = wanted[4].clone(), wanted[1].clone()
    assert torch.equal(memory, wanted)


def test_a_buffer_at_an_odd_address(rng, device):
    caches = caches_of(rng, device, 1, 4, (16, 8), torch.uint8)
    pool = make_pool([caches[0].tensor])
    room = Guarded((3 + 2 * 128,), torch.uint8, device)
    buffer = room.tensor[3:].view(2, 1, 128)
    page_gather(pool, torch.tensor([3, 1], device=device), buffer, impl="triton")
    assert torch.equal(buffer[:, 0], as_rows(caches[0].tensor)[[3, 1]])
    assert bool((room.tensor[:3] == 0x5A).all())
    assert room.margins_are_whole()


@hypothesis.given(st.data())
def test_defragmentation_equals_the_reference(data):
    pages = data.draw(st.integers(2, 12))
    order = data.draw(st.permutations(range(pages)))
    half = pages // 2
    pairs = [
        (source if data.draw(st.booleans()) else -1, target)
        for source, target in zip(order, order[half:], strict=False)
    ]
    pairs = [pair for pair in pairs if pair[0] in order[:half] or pair[0] == -1]
    width = data.draw(st.integers(1, 40))
    memory = torch.arange(2 * pages * width, dtype=torch.int32).to(torch.uint8).view(2, pages, width)
    copies = [memory.clone(), memory.clone()]
    lists = [torch.tensor([pair[end] for pair in pairs], dtype=torch.int64) for end in (0, 1)]
    for copy, impl in zip(copies, ("triton", "ref"), strict=True):
        page_copy(make_pool(list(copy)), *lists, impl=impl)
    assert torch.equal(*copies)


@pytest.mark.parametrize("impl", ["ref", "triton"])
def test_empty_lists_move_nothing(rng, device, impl):
    caches = caches_of(rng, device, 2, 3, (4, 4), torch.uint8)
    pool = make_pool([cache.tensor for cache in caches])
    before = [as_rows(cache.tensor) for cache in caches]
    none_N = torch.zeros(0, dtype=torch.int64, device=device)
    buffer = torch.zeros(0, 2, 16, dtype=torch.uint8, device=device)
    page_copy(pool, none_N, none_N, impl=impl)
    page_gather(pool, none_N, buffer, impl=impl)
    page_scatter(pool, none_N, buffer, impl=impl)
    assert all(torch.equal(as_rows(cache.tensor), rows) for cache, rows in zip(caches, before, strict=True))


@pytest.mark.parametrize("impl", ["ref", "triton"])
def test_unread_pages_past_the_pool_move_nothing(rng, device, impl):
    caches = caches_of(rng, device, 1, 3, (4, 4), torch.uint8)
    pool = make_pool([caches[0].tensor])
    before = as_rows(caches[0].tensor)
    buffer = Guarded((2, 1, 16), torch.uint8, device)
    far_N = torch.tensor([3, 2**40], device=device)
    page_gather(pool, far_N, buffer.tensor, impl=impl, check=False)
    page_scatter(pool, far_N, buffer.tensor, impl=impl, check=False)
    page_copy(pool, torch.tensor([0, 3], device=device), far_N.flip(0), impl=impl, check=False)
    assert bool((buffer.tensor == 0x5A).all())
    assert torch.equal(as_rows(caches[0].tensor), before)
    assert caches[0].margins_are_whole()


def test_long_pools_need_64_bit_offsets(device):
    """Page 600,000 of a pool with 64 KiB steps lies past 2**31 words; the address is right without the memory before it."""
    near = torch.arange(32, dtype=torch.uint8, device=device).view(2, 16)
    step = 2**16
    far_page = 600_000
    # A pool whose base lies far below its last page: only that page is read.
    pool = op.PagePool(
        caches_L_PW=[near],
        bases_L=torch.tensor([near.data_ptr() - far_page * step], device=device),
        num_pages=far_page + 1,
        page_bytes=16,
        step_bytes=step,
        unit_bytes=16,
    )
    buffer = torch.zeros(1, 1, 16, dtype=torch.uint8, device=device)
    page_gather(pool, torch.tensor([far_page], device=device), buffer, impl="triton")
    assert torch.equal(buffer[0, 0], near[0])


def test_repeats_bitwise(rng, device):
    caches = caches_of(rng, device, 2, 5, (3, 8), torch.bfloat16)
    pool = make_pool([cache.tensor for cache in caches])
    buffers = [torch.zeros(3, 2, 48, dtype=torch.uint8, device=device) for _ in range(2)]
    for buffer in buffers:
        page_gather(pool, torch.tensor([4, 0, 2], device=device), buffer, impl="triton")
    assert torch.equal(*buffers)
    assert buffers[0].any()


@pytest.mark.parametrize("impl", ["ref", "triton"])
@pytest.mark.parametrize(
    ("from_N", "to_N", "message"),
    [
        ([0, 1], [2, 5], "to_N: entry 1 is 5, outside the cache of 5 pages"),
        ([9, 1], [2, 3], "from_N: entry 0 is 9, outside the cache of 5 pages"),
        ([0, 1], [2, 2], r"to_N: entries \[0, 1\] are all 2"),
        ([0, 2], [2, 3], r"to_N: pages \[2\] are read by from_N"),
        ([0, 2], [1], "to_N: must be as long as from_N, 2, got 1"),
    ],
)
def test_bad_lists_are_refused(impl, from_N, to_N, message):
    memory = torch.arange(40, dtype=torch.uint8).view(5, 8)
    before = memory.clone()
    with pytest.raises(ValueError, match=message):
        page_copy(make_pool([memory]), torch.tensor(from_N), torch.tensor(to_N), impl=impl)
    assert torch.equal(memory, before)


@pytest.mark.parametrize("impl", ["ref", "triton"])
def test_bad_buffers_are_refused(impl):
    pool = make_pool([torch.zeros(5, 8, dtype=torch.uint8) for _ in range(3)])
    pages_N = torch.tensor([4, 0])
    for buffer, message in (
        (torch.zeros(2, 3, 9, dtype=torch.uint8), r"must be uint8 .* = \(2, 3, 8\), got torch.uint8 \(2, 3, 9\)"),
        (torch.zeros(2, 3, 8), "got torch.float32"),
        (torch.zeros(3, 2, 8, dtype=torch.uint8).transpose(0, 1), "must be contiguous"),
    ):
        for move in (page_gather, page_scatter):
            with pytest.raises(ValueError, match=message):
                move(pool, pages_N, buffer, impl=impl)
    with pytest.raises(ValueError, match=r"pages_N: entries \[0, 1\] are all 4"):
        page_scatter(pool, torch.tensor([4, 4]), torch.zeros(2, 3, 8, dtype=torch.uint8), impl=impl)
    with pytest.raises(ValueError, match="pages_N: dtype must be int32 or int64"):
        page_gather(pool, torch.tensor([1.0]), torch.zeros(1, 3, 8, dtype=torch.uint8), impl=impl)


def test_pools_that_are_none():
    cache = torch.zeros(4, 3, 8)
    with pytest.raises(ValueError, match="caches is empty"):
        make_pool([])
    with pytest.raises(ValueError, match="at least one page"):
        make_pool([torch.zeros(0, 3)])
    with pytest.raises(NotImplementedError, match="one dense run of bytes"):
        make_pool([cache[..., :4]])
    with pytest.raises(NotImplementedError, match="equal pages"):
        make_pool([cache, torch.zeros(4, 3, 9)])
