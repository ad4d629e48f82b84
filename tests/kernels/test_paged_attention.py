"""Paged attention equals softmax attention in float64 over the gathered rows, whatever the pages and splits."""

import pytest
import torch
from paged import largest_value, make_pages

from kernels.paged_attention.op import mla_attention, paged_attention, splits_for
from kernels.paged_attention.ref import mla_attention_ref, paged_attention_ref
from kernels.paged_attention.tables import Tables

BF16, F16, F32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn

ROUNDOFF = {BF16: 2.0**-9, F16: 2.0**-12, F32: 2.0**-21}
"""Rounding of a weight before its product with the values, and of the result; float32: a sum of some hundred terms."""


def check(found, truth, dtype: torch.dtype, largest: float) -> None:
    """Assert that out and lse are as near to the truth as their arithmetic can be.

    Each weight and each result is rounded once, so |error| <= 2 * roundoff * max |value|; lse is float32 throughout.
    """
    (out, lse), (out_truth, lse_truth) = found, truth
    assert out.dtype == dtype
    assert float((out.double() - out_truth).abs().max()) <= 2.001 * ROUNDOFF[dtype] * largest
    torch.testing.assert_close(lse.double(), lse_truth, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "widths", "page_size", "lengths", "dtype"),
    [
        (6, 2, (24, 24), 1, [1, 5, 9], F32),  # page size 1
        (10, 2, (16, 16), 16, [0, 37, 16, 150], BF16),  # five heads a group, an empty sequence, two steps of 64 keys
        (20, 1, (40, 24), 7, [33, 8], F16),  # more heads than a tile has, values narrower than keys, odd pages
        (3, 3, (80, 80), 5, [11], F32),  # no groups
    ],
)
def test_equals_float64(rng, device, canaries, splits, num_heads, num_kv_heads, widths, page_size, lengths, dtype):
    key, tables_BP, lengths_B = make_pages(rng, lengths, page_size, (num_kv_heads, sum(widths)), dtype, device)
    key_cache, value_cache = key.split(list(widths), dim=-1)  # keys beside values, as vLLM keeps them
    q_BNH = torch.randn(len(lengths), num_heads, widths[0], generator=rng).to(dtype).to(device)
    arguments = (q_BNH, key_cache, value_cache, Tables(tables_BP, lengths_B), widths[0] ** -0.5)
    found = paged_attention(*arguments, impl="triton", num_splits=splits)
    truth = paged_attention_ref(*arguments, dtype=torch.float64)
    check(found, truth, dtype, largest_value(value_cache, tables_BP, lengths_B))
    for b in (b for b, length in enumerate(lengths) if length == 0):
        assert not found[0][b].any()
        assert bool((found[1][b] == float("-inf")).all())


@pytest.mark.parametrize("scale_size", [None, 1, 3])
def test_fp8_cache(rng, device, scale_size):
    lengths, heads, width = [21, 4], 3, 32
    key, tables_BP, lengths_B = make_pages(rng, lengths, 4, (heads, width), FP8, device)
    value = make_pages(rng, lengths, 4, (heads, width), FP8, device)[0][: len(key)]
    value = torch.where(value.float().isnan(), 1.0, value.float()).to(FP8)
    scales = None
    if scale_size is not None:
        scales = tuple(torch.rand(scale_size, generator=rng).to(device) + 0.4 for _ in "kv")
    q_BNH = torch.randn(2, 2 * heads, width, generator=rng).to(BF16).to(device)
    arguments = (q_BNH, key, value, Tables(tables_BP, lengths_B), 0.2, scales)
    found = paged_attention(*arguments, impl="triton", num_splits=2)
    truth = paged_attention_ref(*arguments, dtype=torch.float64)
    largest = float(value.float().abs().max()) * (1.4 if scales is not None else 1)
    check(found, truth, BF16, largest)


@pytest.mark.parametrize(("splits", "dtype", "cache_dtype"), [(1, F32, F32), (4, BF16, BF16), (2, BF16, FP8)])
def test_mla_equals_float64(rng, device, canaries, splits, dtype, cache_dtype):
    latent, rope, lengths = 48, 12, [19, 1, 70]
    cache, tables_BP, lengths_B = make_pages(rng, lengths, 3, (latent + rope,), cache_dtype, device)
    scale = torch.tensor([0.5], device=device) if cache_dtype == FP8 else None
    q_BNC = torch.randn(3, 17, latent + rope, generator=rng).to(dtype).to(device)
    arguments = (q_BNC, cache, Tables(tables_BP, lengths_B), 0.13, latent, scale)
    found = mla_attention(*arguments, impl="triton", num_splits=splits)
    truth = mla_attention_ref(*arguments, dtype=torch.float64)
    check(found, truth, dtype, largest_value(cache[:, :, None, :latent], tables_BP, lengths_B))


def test_reference_in_float32_is_near_the_truth(rng, device):
    key, tables_BP, lengths_B = make_pages(rng, [31, 5], 4, (2, 16), F32, device)
    q_BNH = torch.randn(2, 4, 16, generator=rng).to(device)
    arguments = (q_BNH, key, key, Tables(tables_BP, lengths_B), 0.25)
    check(paged_attention(*arguments, impl="ref"), paged_attention_ref(*arguments, dtype=torch.float64), F32, 5.0)


def test_parts_combine_by_their_log_sum_exp(rng, device):
    """Attention over a shared prefix and over the rest, weighed by exp(lse), is attention over all."""
    key, tables_BP, lengths_B = make_pages(rng, [32], 8, (1, 16), F32, device)
    q_BNH = torch.randn(1, 3, 16, generator=rng).to(device)
    prefix_B, rest_B = lengths_B.new_tensor([24]), lengths_B.new_tensor([8])
    arguments = (key, key, Tables(tables_BP, lengths_B), 0.25)
    whole, lse = paged_attention(q_BNH, *arguments, impl="triton")
    parts = [(tables_BP, prefix_B), (tables_BP[:, 3:], rest_B)]
    pairs = [paged_attention(q_BNH, key, key, Tables(*part), 0.25, impl="triton") for part in parts]
    combined = sum(out * (part_lse - lse).exp()[..., None] for out, part_lse in pairs)
    torch.testing.assert_close(combined, whole, rtol=1e-5, atol=1e-6)


def test_a_page_outside_makes_its_sequence_nan_and_no_other(rng, device):
    key, tables_BP, lengths_B = make_pages(rng, [9, 6, 7], 2, (2, 16), BF16, device)
    q_BNH = torch.randn(3, 4, 16, generator=rng).to(BF16).to(device)
    right = paged_attention(q_BNH, key, key, Tables(tables_BP, lengths_B), 0.25, impl="triton", num_splits=2)
    for wrong in (len(key), -1, 2**31 - 1):
        broken_BP = tables_BP.clone()
        broken_BP[1, 2] = wrong
        arguments = (q_BNH, key, key, Tables(broken_BP, lengths_B, False), 0.25)
        out, lse = paged_attention(*arguments, impl="triton", num_splits=2)
        assert bool(out[1].isnan().all())
        assert bool(lse[1].isnan().all())
        assert torch.equal(out[[0, 2]], right[0][[0, 2]])
    long_B = lengths_B.clone()
    long_B[2] = tables_BP.shape[1] * 2 + 1
    # Behind the table lie pages that would do: it is its width that counts.
    wide_BP = torch.cat([tables_BP, tables_BP], dim=1)
    wide_BP[2] = tables_BP[0, 0]
    wide_BP = wide_BP[:, : tables_BP.shape[1]]
    out, _ = paged_attention(q_BNH, key, key, Tables(wide_BP, long_B, False), 0.25, impl="triton", num_splits=2)
    assert bool(out[2].isnan().all())
    assert torch.equal(out[:2], right[0][:2])


def test_lengths_that_nobody_read_neither_hang_nor_pass(rng, device):
    """Two billion keys, which overflow when they are shared out, or fewer than none: NaN, and soon."""
    key, tables_BP, lengths_B = make_pages(rng, [9, 6, 7], 2, (2, 16), BF16, device)
    q_BNH = torch.randn(3, 4, 16, generator=rng).to(BF16).to(device)
    for wrong in (2**31 - 1, -1, 10**9):
        broken_B = lengths_B.clone()
        broken_B[1] = wrong
        out, lse = paged_attention(
            q_BNH, key, key, Tables(tables_BP, broken_B, False), 0.25, impl="triton", num_splits=2
        )
        assert bool(out[1].isnan().all() & lse[1].isnan().all())
        assert not out[[0, 2]].isnan().any()


@pytest.mark.parametrize("splits", [1, 2])
def test_keys_of_infinite_distance_have_no_weight(rng, device, splits):
    """A logit of -inf among others, in the first step of keys too; all of them: zeros, as with no keys at all."""
    cache = torch.randn(40, 4, 1, 16, generator=rng).to(device)
    cache[..., 0] = 0.5
    cache[:18, :, 0, 0] = -torch.inf
    key_cache = cache.clone()
    value_cache = torch.randn(40, 4, 1, 16, generator=rng).to(device)
    q_BNH = torch.zeros(1, 2, 16, device=device)
    q_BNH[..., 0] = 3.0
    key_cache[..., 1:] = 0
    tables_BP = torch.arange(40, dtype=torch.int32, device=device)[None]
    for length, kept in ((160, 88), (60, 0)):
        tables = Tables(tables_BP, torch.tensor([length], dtype=torch.int32, device=device))
        for impl in ("ref", "triton"):
            out, lse = paged_attention(q_BNH, key_cache, value_cache, tables, 0.5, impl=impl, num_splits=splits)
            wanted = value_cache.flatten(0, 2)[72:length].mean(0) if kept else torch.zeros(16, device=device)
            torch.testing.assert_close(out[0, 0], wanted, rtol=1e-5, atol=1e-6)
            natural = 0.75 + torch.tensor(float(kept)).log()  # every key that counts has the logit 0.5 * 3 * 0.5
            torch.testing.assert_close(lse[0].cpu(), natural.expand(2), rtol=1e-6, atol=0)


def test_repeats_bitwise_and_ignores_where_pages_lie(rng, device):
    """The same rows in other pages give the same bits, twice."""
    key, tables_BP, lengths_B = make_pages(rng, [40, 3], 4, (2, 32), BF16, device)
    q_BNH = torch.randn(2, 6, 32, generator=rng).to(BF16).to(device)
    order = torch.randperm(len(key), generator=rng).to(device)
    moved = torch.empty_like(key)
    moved[order] = key
    moved_BP = torch.where(tables_BP < len(key), order[tables_BP.clamp(max=len(key) - 1).long()].int(), tables_BP)
    runs = [
        paged_attention(q_BNH, cache, cache, Tables(table, lengths_B), 0.2, impl="triton", num_splits=2)
        for cache, table in ((key, tables_BP), (key, tables_BP), (moved, moved_BP))
    ]
    for out, lse in runs[1:]:
        assert torch.equal(out, runs[0][0])
        assert torch.equal(lse, runs[0][1])


@pytest.mark.parametrize("impl", ["ref", "triton"])
def test_no_sequences(device, impl):
    cache = torch.zeros(2, 4, 2, 16, device=device)
    no_tables = torch.zeros(0, 3, dtype=torch.int32, device=device)
    out, lse = paged_attention(
        cache.new_zeros(0, 4, 16), cache, cache, Tables(no_tables, no_tables[:, 0]), 1.0, impl=impl
    )
    assert (out.shape, lse.shape) == ((0, 4, 16), (0, 4))


@pytest.mark.parametrize(
    ("programs", "room", "splits"),
    [(1, 8192, 32), (4, 32768, 32), (64, 8192, 4), (132, 8192, 2), (264, 8192, 1), (1, 1000, 4), (1, 10, 1)],
)
def test_splits_fill_the_device_but_leave_no_tiny_parts(programs, room, splits):
    assert splits_for(programs, room) == splits


def tables(rows: list[list[int]], lengths: tuple[int, ...] = (4, 2)) -> Tables:
    return Tables(torch.tensor(rows), torch.tensor(lengths))


def fine() -> dict:
    """Return arguments that are right, for the faults below."""
    cache = torch.zeros(4, 2, 2, 16)
    return {
        "q_BNH": torch.zeros(2, 4, 16),
        "key_cache_PMKH": cache,
        "value_cache_PMKH": cache,
        "tables": tables([[0, 3], [2, 9]]),
        "softmax_scale": 0.25,
    }


@pytest.mark.parametrize("impl", ["ref", "triton"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tables": tables([[0, 4], [2, 9]])}, r"tables_BP: entry \[0, 1\] is 4; must be a page from 0 to 3"),
        ({"tables": tables([[0, 3], [-1, 9]])}, r"tables_BP: entry \[1, 0\] is -1"),
        (
            {"tables": tables([[0, 3], [2, 1]], (4, 5))},
            "lengths_B: sequence 1 has 5 rows; its table has room for 0 to 4",
        ),
        ({"tables": tables([[0, 3], [2, 1]], (-1, 2))}, "lengths_B: sequence 0 has -1 rows"),
        ({"tables": tables([[0, 3], [2, 1]], (1,))}, "lengths_B: 1 rows on cpu; must be 2"),
        ({"q_BNH": torch.zeros(2, 3, 16)}, "q_BNH: 3 heads; must be a multiple of the cache's 2"),
        ({"q_BNH": torch.zeros(2, 4, 16, dtype=torch.float64)}, "q_BNH: dtype torch.float64"),
        ({"q_BNH": torch.zeros(2, 4, 8)}, r"key_cache_PMKH: shape \(4, 2, 2, 16\)"),
        ({"value_cache_PMKH": torch.zeros(4, 3, 2, 16)}, r"value_cache_PMKH: shape \(4, 3, 2, 16\)"),
        ({"key_cache_PMKH": torch.zeros(4, 2, 2, 16).half()}, "key_cache_PMKH: dtype torch.float16"),
        ({"scales": (torch.ones(1), torch.ones(1))}, "given for a cache of torch.float32"),
    ],
)
def test_bad_input_is_refused_before_a_launch(impl, changes, message):
    with pytest.raises(ValueError, match=message):
        paged_attention(**(fine() | changes), impl=impl)


def test_what_the_kernel_lacks_is_refused():
    wide = torch.zeros(2, 2, 1, 300)
    narrow = wide[..., :16]
    one = Tables(torch.zeros(1, 1, dtype=torch.int32), torch.tensor([2]))
    for q, key, value in (
        (torch.zeros(1, 1, 300), wide, narrow),
        (torch.zeros(1, 1, 16), narrow, wide),
        (torch.zeros(1, 1, 16), narrow.to(FP8), narrow.to(FP8)),
    ):
        with pytest.raises(NotImplementedError, match="16-bit queries for an FP8 cache"):
            paged_attention(q, key, value, one, 1.0, impl="triton")
        paged_attention(q, key, value, one, 1.0, impl="ref")
    with pytest.raises(ValueError, match="num_splits=3: must be a power of two"):
        paged_attention(torch.zeros(1, 1, 16), narrow, narrow, one, 1.0, impl="triton", num_splits=3)
