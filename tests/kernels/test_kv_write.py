"""kv_write and mla_write store exactly the rows that the slots name, in every layout, and nothing else."""

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from guarded import Guarded, bits

from kernels.kv_write.op import kv_write, mla_write

BF16, FP8, E5M2 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2


def layout(memory: torch.Tensor, name: str, pages: int, places: int, heads: int, widths: tuple[int, int]):
    """Return key and value cache [P, M, K, H] as views of one tensor, in a layout of vLLM."""
    both = sum(widths)
    if name == "NHD":
        cache = memory.view(pages, places, heads, both)
    elif name == "HND":
        cache = memory.view(pages, heads, places, both).transpose(1, 2)
    else:  # all keys of the pool, then all values
        key, value = memory.split([memory.numel() // both * width for width in widths])
        return tuple(x.view(pages, places, heads, w) for x, w in zip((key, value), widths, strict=True))
    return cache.split(list(widths), dim=-1)


def some_slots(rng: torch.Generator, tokens: int, limit: int) -> torch.Tensor:
    """Return distinct slots in random order, every third one negative."""
    slots_T = torch.randperm(limit, generator=rng)[:tokens]
    slots_T[::3] = -1 - slots_T[::3]
    return slots_T


@pytest.mark.parametrize(
    ("places", "heads", "widths", "name", "dtype"),
    [
        (1, 3, (16, 16), "NHD", BF16),  # page size 1
        (16, 8, (128, 128), "HND", BF16),
        (5, 1, (24, 24), "NHD", torch.float32),
        (7, 3, (40, 12), "HND", torch.float16),  # no power of two anywhere, values narrower than keys
        (3, 2, (48, 48), "apart", E5M2),  # FP8 to FP8: codes are copied
    ],
)
def test_copies_exactly(rng, device, places, heads, widths, name, dtype):
    tokens, pages = 11, 13
    memory = Guarded((pages * places * heads * sum(widths),), dtype, device)
    before = memory.tensor.clone()
    caches = layout(memory.tensor, name, pages, places, heads, widths)
    wanted = layout(before, name, pages, places, heads, widths)
    rows = [torch.randn(tokens + 2, heads, width, generator=rng).to(dtype).to(device) for width in widths]
    slots_T = some_slots(rng, min(tokens, pages * places), pages * places).to(device)
    kv_write(*rows, *caches, slots_T, impl="triton")
    for t, slot in enumerate(slots_T.tolist()):  # the slots say it all: written out, not by the reference
        for new, cache in zip(rows, wanted, strict=True):
            if slot >= 0:
                bits(cache)[slot // places, slot % places] = bits(new)[t]
    assert torch.equal(bits(memory.tensor), bits(before))
    assert memory.margins_are_whole()
    assert any(slot >= 0 for slot in slots_T.tolist())


@pytest.mark.parametrize("dtype", [FP8, E5M2])
@pytest.mark.parametrize("scale_size", [1, 3])
def test_fp8_equals_torch_bit_for_bit(rng, device, dtype, scale_size):
    tokens, heads, width, pages, places = 9, 3, 80, 4, 3
    limit = torch.finfo(dtype).max
    key = torch.randn(tokens, heads, width, generator=rng) * torch.tensor([0.01, 1, 300]).view(1, 3, 1)
    value = torch.linspace(-3 * limit, 3 * limit, tokens * heads * width).view(tokens, heads, width)
    key[2, 1, 5], key[4, 0, 0], value[6, 2, 79] = float("nan"), float("inf"), float("-inf")
    scales = [torch.rand(scale_size, generator=rng) + 0.3 for _ in "kv"]
    slots_T = some_slots(rng, tokens, pages * places)
    found = [Guarded((pages, places, heads, width), dtype, device) for _ in "kv"]
    wanted = [cache.tensor.clone() for cache in found]
    inputs = [x.to(BF16).to(device) for x in (key, value)]
    arguments = (slots_T.to(device), tuple(scale.to(device) for scale in scales))
    kv_write(*inputs, *[cache.tensor for cache in found], *arguments, impl="triton")
    kv_write(*inputs, *wanted, *arguments, impl="ref")
    for cache, other in zip(found, wanted, strict=True):
        is_nan = other.float().isnan()
        assert torch.equal(cache.tensor.float().isnan(), is_nan)
        assert torch.equal(bits(cache.tensor)[~is_nan], bits(other)[~is_nan])
        assert cache.margins_are_whole()
    codes = wanted[1].float()
    assert codes.max() == limit  # the sweep saturates


@pytest.mark.parametrize("size", [0.37, 7.0])
def test_every_bf16_number_gets_its_fp8_code(device, size):
    """All 65,536 bfloat16 patterns; 60 sevenths of them fall on ties, which a product with 1 / 7 would miss."""
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(BF16).view(16, 1, 4096).to(device)
    cache = torch.zeros(4, 4, 1, 4096, device=device).to(FP8)
    scale = torch.tensor([size], device=device)
    slots_T = torch.arange(16, device=device)
    kv_write(numbers, numbers, cache, cache.clone(), slots_T, (scale, scale), impl="triton")
    wanted = (numbers.float() / scale).clamp(-448, 448).to(FP8)
    is_number = ~numbers.isnan()
    assert torch.equal(bits(cache.view(16, 1, 4096))[is_number], bits(wanted)[is_number])
    assert bool(cache.view(16, 1, 4096).float()[~is_number].isnan().all())


@pytest.mark.parametrize(("dtype", "source"), [(BF16, BF16), (FP8, torch.float16)])
def test_latents(rng, device, dtype, source):
    tokens, latent, rope, pages, places = 7, 48, 20, 5, 3
    cache = Guarded((pages, places, latent + rope), dtype, device)
    wanted = cache.tensor.clone()
    new = [torch.randn(tokens, width, generator=rng).to(source).to(device) for width in (latent, rope)]
    scale = torch.tensor([0.25], device=device) if dtype == FP8 else None
    slots_T = some_slots(rng, tokens, pages * places).to(device)
    mla_write(*new, cache.tensor, slots_T, scale, impl="triton")
    for t, slot in enumerate(slots_T.tolist()):
        row = torch.cat([x[t] for x in new])
        if slot >= 0:
            bits(wanted)[slot // places, slot % places] = bits((row.float() / 0.25).to(FP8) if dtype == FP8 else row)
    assert torch.equal(bits(cache.tensor), bits(wanted))
    assert cache.margins_are_whole()


@hypothesis.given(st.data())
def test_any_slots_and_sizes(data):
    draw = data.draw
    places, pages, heads, width = (draw(st.integers(1, top)) for top in (9, 6, 5, 33))
    slots = draw(st.lists(st.integers(0, places * pages - 1), unique=True, max_size=12))
    slots = [draw(st.sampled_from([slot, -1])) for slot in slots]
    caches = [torch.zeros(pages, heads, places, width).transpose(1, 2) for _ in range(4)]
    rows = [torch.arange(len(slots) * heads * width).view(-1, heads, width).float() * sign for sign in (1, -1)]
    for dtype in (torch.int32, torch.int64):
        kv_write(*rows, *caches[:2], torch.tensor(slots, dtype=dtype), impl="triton")
        kv_write(*rows, *caches[2:], torch.tensor(slots, dtype=dtype), impl="ref")
        assert torch.equal(caches[0], caches[2])
        assert torch.equal(caches[1], caches[3])


@pytest.mark.parametrize("impl", ["ref", "triton"])
def test_no_tokens_change_nothing(device, impl):
    caches = [torch.ones(2, 3, 2, 16, device=device) for _ in "kv"]
    rows = [torch.zeros(0, 2, 16, device=device) for _ in "kv"]
    kv_write(*rows, *caches, torch.zeros(0, dtype=torch.int64, device=device), impl=impl)
    assert all(bool((cache == 1).all()) for cache in caches)


def test_unread_slots_stay_inside_the_cache(device):
    """A slot past the cache writes nothing, and of two equal slots every element is one of the two tokens'."""
    pages, places, heads, width = 2, 2, 2, 16
    caches = [Guarded((pages, places, heads, width), torch.float32, device) for _ in "kv"]
    for cache in caches:
        cache.tensor.zero_()
    rows = torch.tensor([1.0, 2, 3, 4], device=device).view(4, 1, 1).expand(4, heads, width).contiguous()
    slots_T = torch.tensor([4, 2, 10**12, 2], device=device)
    kv_write(rows, rows, *[cache.tensor for cache in caches], slots_T, impl="triton", check=False)
    for cache in caches:
        flat = cache.tensor.view(4, -1)
        assert torch.equal(flat[[0, 1, 3]], torch.zeros(3, heads * width, device=device))
        assert bool(((flat[2] == 2) | (flat[2] == 4)).all())
        assert cache.margins_are_whole()


def test_repeats_bitwise(rng, device):
    rows = [torch.randn(8, 2, 32, generator=rng).to(BF16).to(device) for _ in "kv"]
    slots_T = some_slots(rng, 8, 12).to(device)
    scale = torch.tensor([0.7], device=device)
    twice = []
    for _ in range(2):
        caches = [torch.zeros(4, 3, 2, 32, device=device).to(FP8) for _ in "kv"]
        kv_write(*rows, *caches, slots_T, (scale, scale), impl="triton")
        twice.append(torch.stack([bits(cache) for cache in caches]))
    assert torch.equal(*twice)


def fine() -> dict:
    """Return arguments that are right, for the faults below."""
    rows, cache = torch.zeros(3, 2, 16), torch.zeros(4, 5, 2, 16)
    slots_T = torch.tensor([0, 7, -1])
    return {"key_TKH": rows, "value_TKH": rows, "key_cache_PMKH": cache, "value_cache_PMKH": cache, "slots_T": slots_T}


@pytest.mark.parametrize("impl", ["ref", "triton"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"slots_T": torch.tensor([0, 20, 1])}, "slots_T: entry 1 is 20, outside the cache of 20 slots"),
        ({"slots_T": torch.tensor([6, 1, 6])}, r"slots_T: entries \[0, 2\] are all 6"),
        ({"slots_T": torch.tensor([0.0, 1.0])}, "slots_T: dtype must be int32 or int64"),
        ({"slots_T": torch.tensor([[0, 1]])}, "slots_T: must have 1 dimension"),
        ({"slots_T": torch.tensor([0, 1, 2, 3])}, "key: 3 tokens; must be at least 4"),
        ({"key_TKH": torch.zeros(3, 3, 16)}, r"key: shape \(3, 3, 16\); must be \(any, 2, 16\)"),
        ({"key_TKH": torch.zeros(3, 2, 16).half()}, "key: dtype torch.float16"),
        ({"key_TKH": torch.zeros(3, 2, 32)[..., ::2]}, r"key: strides \(64, 32, 2\); the last must be 1"),
        ({"value_cache_PMKH": torch.zeros(4, 6, 2, 16)}, "value_cache_PMKH: .* like the key's"),
        ({"key_cache_PMKH": torch.zeros(4, 5, 2, 16, dtype=torch.int32)}, "key_cache: dtype torch.int32"),
        ({"scales": (torch.ones(1), torch.ones(1))}, "key scale: got one for torch.float32 into torch.float32"),
        ({"key_cache_PMKH": torch.zeros(4, 5, 2, 16).to(FP8)}, "key scale: got none for torch.float32 into"),
    ],
)
def test_bad_input_is_refused_before_a_launch(impl, changes, message):
    arguments = fine() | changes
    with pytest.raises(ValueError, match=message):
        kv_write(**arguments, impl=impl)
    assert not arguments["value_cache_PMKH"].any()


def test_packed_rows_of_bytes_are_refused():
    with pytest.raises(NotImplementedError, match="fp8_ds_mla"):
        cache = torch.zeros(2, 4, 656, dtype=torch.uint8)
        mla_write(torch.zeros(1, 512), torch.zeros(1, 64), cache, torch.tensor([0]), impl="triton")
