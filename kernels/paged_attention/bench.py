"""Times decode attention on a GPU: python -m kernels.paged_attention.bench

Compared with what people write in torch: gather the pages, then scaled_dot_product_attention.
"""

import sys
from collections.abc import Iterable
from functools import partial

import torch

from kernels import harness, measure
from kernels.paged_attention.cases import LENGTHS, SHAPES, Shape
from kernels.paged_attention.op import mla_attention, paged_attention
from kernels.paged_attention.tables import Tables

CACHE_DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}


def make(shape: Shape, batch: int, length: int, dtype: torch.dtype, seed: int) -> tuple:
    """Return query, cache, tables in random order, lengths."""
    generator = harness.generator(seed)
    pages_each = -(-length // shape.page_size)
    width = shape.key_width + (shape.rope_width or shape.value_width)
    size = (batch * pages_each, shape.page_size, shape.num_kv_heads, width)
    cache = torch.empty(size, device=harness.here(), dtype=torch.bfloat16).normal_(generator=generator).to(dtype)
    q = torch.randn(
        batch, shape.num_heads, shape.key_width + shape.rope_width, device=harness.here(), generator=generator
    )
    tables_BP = (
        torch.randperm(batch * pages_each, device=harness.here(), generator=generator).int().view(batch, pages_each)
    )
    return q.bfloat16(), cache, tables_BP, torch.full((batch,), length, dtype=torch.int32, device=harness.here())


def attend(shape: Shape, q, cache, tables_BP, lengths_B, impl) -> torch.Tensor:
    """Call the operation of this shape."""
    scale = (shape.key_width + shape.rope_width) ** -0.5
    tables = Tables(tables_BP, lengths_B)
    if shape.rope_width:
        return mla_attention(q, cache[:, :, 0], tables, scale, shape.key_width, impl=impl)[0]
    caches = cache.split([shape.key_width, shape.value_width], dim=-1)
    return paged_attention(q, *caches, tables, scale, impl=impl)[0]


def gathered(shape: Shape, q, cache, tables_BP, lengths_B) -> torch.Tensor:
    """Attend with torch: gather all pages, then scaled_dot_product_attention; all lengths are equal here."""
    rows_BSKH = cache[tables_BP].flatten(1, 2).to(q.dtype)
    if shape.rope_width:
        key, value = rows_BSKH, rows_BSKH[..., : shape.value_width]
    else:
        key, value = rows_BSKH.split([shape.key_width, shape.value_width], dim=-1)
    heads_first = [x.transpose(1, 2) for x in (q[:, None], key, value)]
    attention = torch.nn.functional.scaled_dot_product_attention
    return attention(*heads_first, enable_gqa=True)[:, :, 0]


def points() -> Iterable[harness.Point]:
    """Return every shape, batch and cache dtype whose cache leaves room for a ring of four."""
    for cache_name, dtype in CACHE_DTYPES.items():
        for shape in SHAPES:
            width = shape.key_width + (shape.rope_width or shape.value_width)
            for batch, length in LENGTHS:
                num_bytes = batch * length * shape.num_kv_heads * width * dtype.itemsize
                if num_bytes > 8 * 2**30:
                    continue
                flops = 2 * batch * length * shape.num_heads
                flops *= shape.key_width + shape.rope_width + shape.value_width
                yield harness.Point(
                    op="paged_attention",
                    shape=f"{shape.name} B{batch} n{length}",
                    dtype=f"bf16 over {cache_name}",
                    num_bytes=num_bytes,
                    num_flops=flops,
                    make=partial(make, shape, batch, length, dtype),
                    providers={"triton": partial(attend, shape, impl="triton"), "torch": partial(gathered, shape)},
                    reference=partial(attend, shape, impl="ref"),
                    compare=harness.largest_difference(5e-3),
                )


if __name__ == "__main__":
    sys.exit(measure.main(points))
