"""What the operations would launch, without a GPU: recorded with Triton's own rules and looked up among what compiles.

A process of its own, without TRITON_INTERPRET: python tests/kernels/launches.py prints each launch that no variant is.
Inputs are meta tensors: shapes, dtypes and strides as a server has them, no memory.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from triton.compiler import make_backend
from triton.runtime import JITFunction
from triton.runtime.jit import create_function_from_signature

from kernels import aligned, aot, checks
from kernels.align.op import align
from kernels.gate.cases import MODELS
from kernels.gate.op import gate
from kernels.gate_align.cases import SHIPPED
from kernels.gate_align.op import gate_align
from kernels.grouped_matmul.cases import SHAPES as WEIGHTS
from kernels.grouped_matmul.op import grouped_matmul
from kernels.kv_write.cases import LATENT_PAGE, LATENT_WIDTH, ROPE_WIDTH
from kernels.kv_write.cases import SHAPES as HEADS
from kernels.kv_write.op import kv_write, mla_write
from kernels.paged_attention.cases import SHAPES as LAYERS
from kernels.paged_attention.op import mla_attention, paged_attention
from kernels.paged_attention.tables import Tables
from kernels.pages.cases import SHAPES as PAGES
from kernels.pages.op import page_copy, page_gather, page_scatter
from kernels.pages.pool import PagePool
from kernels.permute.cases import ACTIVE, WIDTHS
from kernels.permute.op import permute, unpermute

BF16, F16, F32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
TARGET = aot.TARGETS["sm_90"]
BACKEND = make_backend(TARGET)
launched: dict[tuple, str] = {}
now = ""


def key_of(fn: JITFunction, signature: dict, constants: dict, attributes: dict, warps: int, stages: int) -> tuple:
    """Return what tells one compiled kernel from another."""
    kinds = tuple(sorted(signature.items()))
    values = tuple(sorted((path, repr(value)) for path, value in constants.items()))
    hints = tuple(sorted((path, repr(hint)) for path, hint in attributes.items() if hint))
    return fn.__name__, kinds, values, hints, warps, stages


def record(self: JITFunction, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
    """Note the kernel that JITFunction.run would compile, and launch nothing."""
    options |= {"debug": False, "instrumentation_mode": ""}
    bind = create_function_from_signature(self.signature, self.params, BACKEND)
    bound, specialization, rest = bind(*arguments, **options)
    parsed, signature, constants, attributes = self._pack_args(BACKEND, options, bound, specialization, rest)
    launched.setdefault(
        key_of(self, signature, constants, attributes, parsed.num_warps, parsed.num_stages), f"{now}: {self.__name__}"
    )


def meta(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def integers(*shape: int) -> torch.Tensor:
    return meta(*shape, dtype=torch.int32)


def routing() -> Iterator[str]:
    """Launch the routing operations as vLLM does; yield what is about to run."""
    for model in MODELS:
        bias_E = meta(model.num_experts, dtype=F32) if model.has_bias else None
        for dtype in (BF16, F32):
            for T in (1, 3, 7, 64, 129, 1000, 16384):
                yield f"gate {model.name} {dtype} T{T}"
                gate(meta(T, model.num_experts, dtype=dtype), model.router, bias_E, impl="triton")
                for block in (16, 64) if dtype == BF16 else (64,):
                    if model in SHIPPED and T <= 1024:
                        yield f"gate_align {model.name} {dtype} T{T} block{block}"
                        logits_TE = meta(T, model.num_experts, dtype=dtype)
                        gate_align(logits_TE, model.router, block, bias_E=bias_E, impl="triton")
    for E in (128, 256, 512):
        for T in (1, 3, 1000, 1024, 16384):
            for block in (16, 64):
                yield f"align E{E} T{T} block{block}"
                align(integers(T, ACTIVE), E, block, impl="triton")
                if E == 256:
                    maps = {"expert_map_E": integers(E), "num_local_experts": E // 8}
                    align(integers(T, ACTIVE), E, block, **maps, impl="triton")
    for width in WIDTHS:
        for T in (1, 3, 4096):
            order = aligned.empty(T * ACTIVE, 128, 64, torch.device("meta"))
            for options in (
                {},
                {"quantise": True},
                {"quantise": True, "is_power_of_two": True, "is_scale_transposed": True},
            ):
                yield f"permute D{width} T{T} {options}"
                permute(meta(T, width), order, **options, impl="triton")
            yield f"unpermute D{width} T{T}"
            unpermute(meta(order.routed_M.numel(), width), order, meta(T, ACTIVE, dtype=F32), impl="triton")


def matmuls() -> Iterator[str]:
    """Launch the matmuls of both layers, rows gathered before the first one in bfloat16."""
    for model, shapes in WEIGHTS.items():
        for (D, F), num_active in zip(shapes, (ACTIVE, 0), strict=True):
            for block in (16, 32, 64, 128):
                order = aligned.empty(48 * ACTIVE, 128, block, torch.device("meta"))
                M = order.routed_M.numel()
                yield f"grouped_matmul {model} D{D} F{F} block{block} bf16"
                x_RD = meta(48 if num_active else M, D)
                grouped_matmul(x_RD, meta(128, F, D), order, num_active=num_active, impl="triton")
                yield f"grouped_matmul {model} D{D} F{F} block{block} fp8"
                scales = {
                    "x_scale_RG": meta(M, D // 128, dtype=F32),
                    "w_scale_EFG": meta(128, F // 128, D // 128, dtype=F32),
                }
                grouped_matmul(meta(M, D, dtype=FP8), meta(128, F, D, dtype=FP8), order, **scales, impl="triton")


def cache_moves() -> Iterator[str]:
    """Launch writes and moves of pages, keys beside values as vLLM keeps them, NHD and HND."""
    slots_T = meta(37, dtype=torch.int64)
    for dtype in (BF16, FP8):
        for shape in HEADS:
            K, widths = shape.num_kv_heads, [shape.key_width, shape.value_width]
            memory = meta(1000, shape.page_size, K, sum(widths), dtype=dtype)
            scales = (meta(dtype=F32), meta(dtype=F32)) if dtype == FP8 else None
            for cache in (memory, meta(1000, K, shape.page_size, sum(widths), dtype=dtype).transpose(1, 2)):
                yield f"kv_write {shape.name} {dtype}"
                rows = [meta(40, K, width) for width in widths]
                kv_write(*rows, *cache.split(widths, dim=-1), slots_T, scales, impl="triton")
        yield f"mla_write {dtype}"
        cache = meta(1000, LATENT_PAGE, LATENT_WIDTH + ROPE_WIDTH, dtype=dtype)
        scale = meta(1, dtype=F32) if dtype == FP8 else None
        mla_write(meta(40, LATENT_WIDTH), meta(40, ROPE_WIDTH), cache, slots_T, scale, impl="triton")
    pages_N = meta(9, dtype=torch.int64)
    for shape in PAGES:
        yield f"pages {shape.name}"
        caches = [meta(1000, shape.page_bytes, dtype=torch.uint8) for _ in range(2)]
        pool = PagePool(caches, meta(2, dtype=torch.int64), 1000, shape.page_bytes, shape.page_bytes, 16)
        buffer = meta(9, 2, shape.page_bytes, dtype=torch.uint8)
        page_copy(pool, pages_N, pages_N, impl="triton")
        page_gather(pool, pages_N, buffer, impl="triton")
        page_scatter(pool, pages_N, buffer, impl="triton")


def attention() -> Iterator[str]:
    """Launch decode attention at several batches and table widths."""
    for dtype in (BF16, FP8):
        for layer in LAYERS:
            width = layer.key_width + (layer.rope_width or layer.value_width)
            cache = meta(1000, layer.page_size, layer.num_kv_heads, width, dtype=dtype)
            for batch, table in ((1, 1), (1, 512), (3, 37), (64, 2048)):
                yield f"paged_attention {layer.name} {dtype} B{batch} P{table}"
                q = meta(batch, layer.num_heads, layer.key_width + layer.rope_width)
                tables = Tables(integers(batch, table), integers(batch))
                one = meta(1, dtype=F32)
                if layer.rope_width:
                    scale = one if dtype == FP8 else None
                    mla_attention(q, cache[:, :, 0], tables, 0.1, layer.key_width, scale, impl="triton")
                else:
                    pair = cache.split([layer.key_width, layer.value_width], dim=-1)
                    paged_attention(q, *pair, tables, 0.1, (one, one) if dtype == FP8 else None, impl="triton")


def odd(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """Return zeros whose first element lies one past an address that divides by 16."""
    return torch.zeros(torch.Size(shape).numel() + 1, dtype=torch.float32).to(dtype)[1:].view(shape)


def misaligned() -> Iterator[str]:
    """Launch with pointers that no 16-byte access may use."""
    yield "odd gate"
    model = MODELS[2]
    gate(odd(3, model.num_experts), model.router, None, impl="triton")
    order = aligned.empty(8, 128, 64, torch.device("cpu"))
    yield "odd permute"
    permute(odd(1, WIDTHS[0]), order, impl="triton")
    yield "odd unpermute"
    unpermute(odd(order.routed_M.numel(), WIDTHS[0]), order, torch.zeros(1, ACTIVE), impl="triton")
    yield "odd kv_write"
    caches = [odd(3, 16, 8, 128), odd(3, 16, 8, 128)]
    kv_write(odd(2, 8, 128), odd(2, 8, 128), *caches, torch.tensor([1, 2]), impl="triton")
    yield "odd paged_attention"
    tables = Tables(torch.zeros(1, 2, dtype=torch.int32), torch.ones(1, dtype=torch.int32))
    paged_attention(odd(1, 96, 128), *caches, tables, 0.1, impl="triton")


def main() -> int:
    """Record all launches; print those that are no variant, and how many variants were met."""
    global now
    JITFunction.run = record
    checks.check_place = lambda op, device: None
    for launches in (routing, matmuls, cache_moves, attention):
        for title in launches():
            now = title
    regular = dict(launched)
    launched.clear()
    for title in misaligned():
        now = title
    compiled = set()
    for op in aot.operations():
        for v in aot.variants_of(op):
            source = aot.source_of(v)
            compiled.add(key_of(v.fn, source.signature, source.constants, source.attrs, v.num_warps, v.num_stages))
    missing = [name for key, name in regular.items() if key not in compiled]
    # the second stage of attention reads what the first allocates, which is aligned
    missing += [
        f"{name}, taken to be aligned" for key, name in launched.items() if key in compiled and "combine" not in name
    ]
    print(*missing, sep="\n")
    print(f"{len(regular)} kernels launched and {len(launched)} misaligned, {len(regular.keys() & compiled)} of {len(compiled)} variants met, "
          f"{len(missing)} missing")  # fmt: skip
    return int(bool(missing))


if __name__ == "__main__":
    sys.exit(main())
