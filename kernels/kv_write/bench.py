"""Times kv_write and mla_write on a GPU: python -m kernels.kv_write.bench

Peers: torch's indexed stores, and vLLM's CUDA operators where its library was loaded into this process before.
"""

import sys
from collections.abc import Callable, Iterable
from functools import partial

import torch

from kernels import harness, measure
from kernels.kv_write.cases import LATENT_PAGE, LATENT_WIDTH, NUM_TOKENS, ROPE_WIDTH, SHAPES, Shape
from kernels.kv_write.op import kv_write, mla_write

CACHE_DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}


def random(seed: int, *shape: int) -> torch.Tensor:
    """Return bfloat16 noise."""
    generator = harness.generator(seed)
    return torch.randn(*shape, device=harness.here(), dtype=torch.bfloat16, generator=generator)


def slots_of(seed: int, num_tokens: int, num_slots: int) -> torch.Tensor:
    """Return distinct slots in random order, as decoding sequences have them."""
    generator = harness.generator(seed)
    return torch.randperm(num_slots, device=harness.here(), generator=generator)[:num_tokens]


def scale_of(dtype: torch.dtype) -> torch.Tensor | None:
    """Return the scale that an FP8 cache needs."""
    return torch.tensor([0.5], device=harness.here()) if dtype.itemsize == 1 else None


def vllm_write(key, value, key_cache, value_cache, slots_T, scales) -> None:
    """Call vLLM's operator with the same arguments; its FP8 caches are bytes."""
    kind, both = ("auto", [torch.ones(1, device=harness.here())] * 2) if scales is None else ("fp8_e4m3", scales)
    caches = [cache if scales is None else cache.view(torch.uint8) for cache in (key_cache, value_cache)]
    torch.ops._C_cache_ops.reshape_and_cache_flash(key, value, *caches, slots_T, kind, *both)


def has_vllm() -> bool:
    """Return whether vLLM's cache operators are loaded."""
    return hasattr(torch.ops._C_cache_ops, "reshape_and_cache_flash")


def returns_cache(write: Callable[..., None], num_inputs: int, num_caches: int) -> Callable[..., tuple]:
    """Return `write` as a function whose result, the caches, can be compared."""

    def run(*arguments):
        write(*arguments)
        return arguments[num_inputs : num_inputs + num_caches]

    return run


def heads_point(shape: Shape, num_tokens: int, cache_name: str) -> harness.Point:
    """Return the point of one layer's keys and values."""
    dtype = CACHE_DTYPES[cache_name]
    num_pages = -(-2 * num_tokens // shape.page_size)
    widths = (shape.key_width, shape.value_width)
    num_bytes = num_tokens * shape.num_kv_heads * sum(widths) * (2 + dtype.itemsize)

    def make(seed: int) -> tuple:
        rows = [random(seed + which, num_tokens, shape.num_kv_heads, width) for which, width in enumerate(widths)]
        cache = torch.zeros(num_pages, shape.page_size, shape.num_kv_heads, sum(widths), device=harness.here()).to(
            dtype
        )
        slots_T = slots_of(seed, num_tokens, num_pages * shape.page_size)
        return (
            *rows,
            *cache.split(list(widths), dim=-1),
            slots_T,
            None if dtype.itemsize > 1 else (scale_of(dtype), scale_of(dtype)),
        )

    # The reference picks rows by a mask, whose count the host must wait for: torch's own best is the bare store.
    providers = {"triton": partial(kv_write, impl="triton"), "torch": torch_heads}
    if has_vllm():
        providers["vllm"] = vllm_write
    return harness.Point(
        op="kv_write",
        shape=f"T{num_tokens} {shape.name}",
        dtype=f"bf16 to {cache_name}",
        num_bytes=num_bytes,
        make=make,
        providers={name: returns_cache(write, 2, 2) for name, write in providers.items()},
        reference=returns_cache(partial(kv_write, impl="ref"), 2, 2),
        bar=harness.share_of_copy(num_bytes, 0.75) if num_tokens >= 4096 else None,
    )


def torch_heads(key, value, key_cache, value_cache, slots_T, scales) -> None:
    """Write with torch's indexed store, all slots being real."""
    page, place = slots_T // key_cache.shape[1], slots_T % key_cache.shape[1]
    for rows, cache, scale in zip((key, value), (key_cache, value_cache), scales or (None, None), strict=True):
        codes = rows if scale is None else (rows.float() / scale).clamp(-448, 448).to(cache.dtype)
        bits = torch.uint8 if scale is not None else torch.int16
        cache.view(bits)[page, place] = codes.view(bits)


def latents_point(num_tokens: int, cache_name: str) -> harness.Point:
    """Return the point of one layer's latents."""
    dtype = CACHE_DTYPES[cache_name]
    num_pages, width = -(-2 * num_tokens // LATENT_PAGE), LATENT_WIDTH + ROPE_WIDTH

    def make(seed: int) -> tuple:
        latent, rope = random(seed, num_tokens, LATENT_WIDTH), random(seed + 1, num_tokens, ROPE_WIDTH)
        cache = torch.zeros(num_pages, LATENT_PAGE, width, device=harness.here()).to(dtype)
        return latent, rope, cache, slots_of(seed, num_tokens, num_pages * LATENT_PAGE), scale_of(dtype)

    return harness.Point(
        op="kv_write",
        shape=f"T{num_tokens} MLA{width}",
        dtype=f"bf16 to {cache_name}",
        num_bytes=num_tokens * width * (2 + dtype.itemsize),
        make=make,
        providers={"triton": returns_cache(partial(mla_write, impl="triton"), 2, 1)},
        reference=returns_cache(partial(mla_write, impl="ref"), 2, 1),
    )


def points() -> Iterable[harness.Point]:
    """Return all points: every shape at one size, the main one at all sizes."""
    for cache_name in CACHE_DTYPES:
        for num_tokens in NUM_TOKENS:
            yield heads_point(SHAPES[0], num_tokens, cache_name)
            yield latents_point(num_tokens, cache_name)
        for shape in SHAPES[1:]:
            yield heads_point(shape, 4096, cache_name)


if __name__ == "__main__":
    sys.exit(measure.main(points))
