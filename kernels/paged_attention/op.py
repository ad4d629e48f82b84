"""Attention of one new token for each sequence over its pages: GQA and MLA, with the log-sum-exp.

A portable kernel of reference speed: it is what runs where no hand-built attention does. Keys are split over programs
and the parts combined by their log-sum-exp, which is also returned, natural base, so that a caller can combine further
(a prefix shared by many sequences, context parallelism).

Tables and lengths (tables.py) that point outside are refused where they can be read; where they cannot, nothing outside
the cache is read and the sequence's output is NaN. Rows past the length are never read, whatever they hold. Length 0, and
logits that are all -inf, give zeros and lse -inf.
"""

import torch
import triton

from kernels.checks import Impl, check_impl, check_scale, check_tensor
from kernels.paged_attention.cases import (
    COMBINE_COLUMNS,
    MAX_SPLITS,
    MIN_KEYS_A_SPLIT,
    PROGRAMS,
    Shape,
    constexprs,
    padded,
    tile_of,
)
from kernels.paged_attention.kernel import attend_split, combine_splits
from kernels.paged_attention.ref import mla_attention_ref, paged_attention_ref
from kernels.paged_attention.tables import Tables
from kernels.ranges import check_finite, check_range

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
Scales = tuple[torch.Tensor, torch.Tensor]


def paged_attention(
    q_BNH: torch.Tensor,
    key_cache_PMKH: torch.Tensor,
    value_cache_PMKH: torch.Tensor,
    tables: Tables,
    softmax_scale: float,
    scales: Scales | None = None,
    *,
    impl: Impl,
    num_splits: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out [B, N, value width] in q's dtype and lse [B, N] float32.

    Softmax statistics and sums are float32; weights take q's dtype for the product with the values.

    Args:
        q_BNH: bfloat16, float16 or float32; query head n reads key head n // (N // K).
        key_cache_PMKH, value_cache_PMKH: q's dtype or FP8; any strides but 1 for the last dimension.
        scales: of keys and of values, float32 [1] or [K], for an FP8 cache; None: 1.
        num_splits: power of two, at most 32; None: from the sizes alone, so that it is the same in every step of a recorded graph.
    Raises:
        ValueError: an argument that does not fit, named.
        NotImplementedError: keys wider than 256 with impl="triton".
    """
    check_tensor("q_BNH", q_BNH, shape=(None, None, None), dtypes=FLOATS, layout="rows")
    check_cache("key_cache_PMKH", key_cache_PMKH, q_BNH, (None, None, None, q_BNH.shape[2]))
    check_cache("value_cache_PMKH", value_cache_PMKH, q_BNH, (*key_cache_PMKH.shape[:3], None))
    check_scales(scales, key_cache_PMKH)
    num_heads, num_kv_heads = q_BNH.shape[1], key_cache_PMKH.shape[2]
    if num_kv_heads == 0 or num_heads % num_kv_heads:
        raise ValueError(f"q_BNH: {num_heads} heads; must be a multiple of the cache's {num_kv_heads} key heads")
    check_numbers(softmax_scale, num_splits)
    check_tables(tables, key_cache_PMKH, len(q_BNH))
    check_impl("paged_attention", impl, q_BNH, key_cache_PMKH, value_cache_PMKH)
    if impl == "ref":
        out_BNH, lse_BN = paged_attention_ref(q_BNH, key_cache_PMKH, value_cache_PMKH, tables, softmax_scale, scales)
        return out_BNH.to(q_BNH.dtype), lse_BN
    shape = Shape("", num_heads, num_kv_heads, q_BNH.shape[2], value_cache_PMKH.shape[3], key_cache_PMKH.shape[1])
    caches = (key_cache_PMKH, value_cache_PMKH)
    return launch(shape, q_BNH, caches, tables, softmax_scale, scales, num_splits)


def mla_attention(
    q_BNC: torch.Tensor,
    cache_PMC: torch.Tensor,
    tables: Tables,
    softmax_scale: float,
    latent_width: int,
    scale: torch.Tensor | None = None,
    *,
    impl: Impl,
    num_splits: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention over latents, out [B, N, latent_width] and lse [B, N]: one key head, whose latent is the value.

    Args:
        q_BNC: [absorbed query | rotated query], as wide as a cache row.
        latent_width: columns of the row that are the latent; the rest is the rotated key. scale: float32 [1], FP8 only.
        Others as in paged_attention.
    """
    check_tensor("q_BNC", q_BNC, shape=(None, None, None), dtypes=FLOATS, layout="rows")
    check_range("latent_width", latent_width, 1, q_BNC.shape[2] - 1)
    check_tensor("cache_PMC", cache_PMC, shape=(None, None, None), dtypes=FLOATS + FP8, layout="last")
    key_PM1C, value_PM1C = cache_PMC[:, :, None], cache_PMC[:, :, None, :latent_width]
    check_cache("cache_PMC", key_PM1C, q_BNC, (None, None, 1, q_BNC.shape[2]))
    scales = None if scale is None else (scale, scale)
    check_scales(scales, key_PM1C)
    check_numbers(softmax_scale, num_splits)
    check_tables(tables, cache_PMC, len(q_BNC))
    check_impl("mla_attention", impl, q_BNC, cache_PMC)
    if impl == "ref":
        out_BNC, lse_BN = mla_attention_ref(q_BNC, cache_PMC, tables, softmax_scale, latent_width, scale)
        return out_BNC.to(q_BNC.dtype), lse_BN
    rope_width = q_BNC.shape[2] - latent_width
    shape = Shape("", q_BNC.shape[1], 1, latent_width, latent_width, cache_PMC.shape[1], rope_width)
    caches = (key_PM1C, value_PM1C)
    return launch(shape, q_BNC, caches, tables, softmax_scale, scales, num_splits)


def check_cache(name: str, cache: torch.Tensor, q: torch.Tensor, shape: tuple[int | None, ...]) -> None:
    """Raise ValueError unless the cache fits the query."""
    check_tensor(name, cache, shape=shape, dtypes=(q.dtype, *FP8), device=q.device, layout="last")
    check_range(f"places of a page of {name}", cache.shape[1], 1, 2**30)
    check_range(f"width of {name}", cache.shape[3], 1, 2**30)


def check_scales(scales: Scales | None, cache: torch.Tensor) -> None:
    """Raise ValueError unless the scales fit an FP8 cache and are alike, or there are none."""
    if scales is None:
        return
    if cache.dtype not in FP8:
        raise ValueError(f"scales: given for a cache of {cache.dtype}; only FP8 codes are scaled")
    for scale in scales:
        check_scale("scales", scale, cache.shape[2], cache.device)
    if scales[0].numel() != scales[1].numel():
        raise ValueError(f"scales: {scales[0].numel()} and {scales[1].numel()} numbers; must be as many for both")


def check_tables(tables: Tables, cache: torch.Tensor, batch: int) -> None:
    """Raise ValueError unless these are tables, of the batch, that point into the cache."""
    if not isinstance(tables, Tables):
        raise ValueError(f"tables: got {type(tables).__name__}; must be Tables(tables_BP, lengths_B)")
    tables.check(cache, batch)


def check_numbers(softmax_scale: float, num_splits: int | None) -> None:
    """Raise ValueError unless the scale is a number and the splits, where given, a power of two that stage two can hold."""
    check_finite("softmax_scale", softmax_scale)
    if num_splits is None:
        return
    check_range("num_splits", num_splits, 1, MAX_SPLITS)
    if num_splits & (num_splits - 1):
        raise ValueError(f"num_splits={num_splits}: must be a power of two")


def splits_for(programs: int, room: int) -> int:
    """Return in how many parts the keys are split: enough programs to fill the device, but no tiny parts.

    Args:
        programs: programs of stage one with one split. room: keys that a table row has room for.
    """
    wanted = triton.next_power_of_2(max(1, PROGRAMS // max(1, programs)))
    return max(1, min(wanted, MAX_SPLITS, triton.next_power_of_2(max(1, room // MIN_KEYS_A_SPLIT))))


def launch(
    shape: Shape,
    q_BNH: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    tables: Tables,
    softmax_scale: float,
    scales: Scales | None,
    num_splits: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Start both stages; return out and lse."""
    tile = tile_of(padded(shape.key_width), shape.rope_width > 0, q_BNH.element_size(), caches[0].element_size())
    if tile is None or shape.value_width > padded(shape.key_width):
        got = f"keys of {shape.key_width} in {caches[0].dtype}, values of {shape.value_width}, queries in {q_BNH.dtype}"
        limits = "keys of width <= 256 (latents <= 512), values no wider, and 16-bit queries for an FP8 cache"
        raise NotImplementedError(f"paged_attention: impl='triton' needs {limits}; got {got}; use impl='ref'")
    batch, num_heads = q_BNH.shape[:2]
    blocks = shape.num_kv_heads * triton.cdiv(num_heads // shape.num_kv_heads, tile.heads)
    splits = num_splits or splits_for(batch * blocks, tables.tables_BP.shape[1] * shape.page_size)
    wide = {"dtype": torch.float32, "device": q_BNH.device}
    out_BNUH = torch.empty(batch, num_heads, splits, shape.value_width, **wide)
    lse_BNU = torch.empty(batch, num_heads, splits, **wide)
    out_BNH = torch.empty(batch, num_heads, shape.value_width, dtype=q_BNH.dtype, device=q_BNH.device)
    lse_BN = torch.empty(batch, num_heads, **wide)
    if batch == 0 or num_heads == 0:
        return out_BNH, lse_BN
    key_cache, value_cache = caches
    attend_split[(batch, blocks, splits)](
        q_BNH,
        key_cache,
        value_cache,
        tables.tables_BP,
        tables.lengths_B,
        *(scales if scales is not None else (None, None)),
        out_BNUH,
        lse_BNU,
        softmax_scale,
        splits,
        tables.tables_BP.shape[1],
        key_cache.shape[0],
        *q_BNH.stride()[:2],
        tables.tables_BP.stride(0),
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        SCALED=scales is not None,
        SCALE_STEP=int(scales is not None and scales[0].numel() > 1),
        **constexprs(shape, tile, q_BNH.dtype == torch.float32),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    columns = min(COMBINE_COLUMNS, padded(shape.value_width))
    results, widths = (out_BNUH, lse_BNU, out_BNH, lse_BN), {"VALUE_WIDTH": shape.value_width, "COLUMNS": columns}
    combine_splits[(batch * num_heads, triton.cdiv(shape.value_width, columns))](
        *results, splits, **widths, MAX_SPLITS=MAX_SPLITS
    )
    return out_BNH, lse_BN
