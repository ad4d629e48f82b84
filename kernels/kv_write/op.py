"""Write new keys and values, or latents, into the pages of a cache at the slots that the scheduler chose.

Caches are given as vLLM gives them: a view [pages, places, heads, width] whose last dimension has stride 1; every other
stride is free as long as no two elements share memory, so the layouts NHD and HND and keys beside values in one tensor are all views of this shape. Slot
s is place s % M of page s // M. A negative slot writes nothing (padding of a recorded graph).

A slot past the cache is refused where slots can be read (kernels/indices.py), and writes nothing where they cannot.
Slots must be distinct: of two equal ones, either token may win, and not the same one for every element; where slots
can be read, equal ones are refused.

FP8 caches hold x / scale, saturated, bit for bit as torch rounds it; the scale is float32, one number or one for each
head. Same numbers as vLLM's reshape_and_cache_flash and concat_and_cache_mla.
"""

import torch
import triton

from kernels.checks import Impl, check_impl, check_scale, check_tensor, refuse
from kernels.indices import check_below, check_distinct, check_index_dtype, is_read
from kernels.kv_write.cases import ELEMENTS, LATENT_ELEMENTS, LATENT_WARPS, MAX_WIDTH, NUM_WARPS
from kernels.kv_write.kernel import write_heads, write_latents
from kernels.kv_write.ref import kv_write_ref, mla_write_ref
from kernels.ranges import check_range

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def kv_write(
    key_TKH: torch.Tensor,
    value_TKH: torch.Tensor,
    key_cache_PMKH: torch.Tensor,
    value_cache_PMKH: torch.Tensor,
    slots_T: torch.Tensor,
    scales: tuple[torch.Tensor, torch.Tensor] | None = None,
    *,
    impl: Impl,
    check: bool | None = None,
) -> None:
    """Write the first len(slots_T) keys and values into their pages, in place.

    Args:
        key_TKH, value_TKH: the cache's dtype, or float32, bfloat16 or float16 for an FP8 cache. They may be longer than
            slots_T (padding), and values may have another width than keys.
        slots_T: int32 or int64.
        scales: of keys and of values, float32 [1] or [K], exactly when an FP8 cache is written from wider numbers.
        check: read the slots; None: only when they are on the host.
    Raises:
        ValueError: an argument that does not fit, named.
        NotImplementedError: impl="triton" with rows wider than 4,096.
    """
    key_scale, value_scale = scales if scales is not None else (None, None)
    check_pair("key", key_TKH, key_cache_PMKH, key_scale)
    check_pair("value", value_TKH, value_cache_PMKH, value_scale)
    check_slots(slots_T, key_cache_PMKH, {"key": key_TKH, "value": value_TKH}, check)
    for name, one, other in (
        ("value_cache_PMKH", value_cache_PMKH.shape[:3], key_cache_PMKH.shape[:3]),
        ("value dtypes", (value_TKH.dtype, value_cache_PMKH.dtype), (key_TKH.dtype, key_cache_PMKH.dtype)),
    ):
        if one != other:
            raise ValueError(f"{name}: {tuple(one)}; must be {tuple(other)} like the key's")
    if key_cache_PMKH.numel() and key_cache_PMKH.data_ptr() == value_cache_PMKH.data_ptr():
        raise ValueError("value_cache_PMKH: is the key's; keys and values need places of their own")
    check_impl("kv_write", impl, key_TKH, value_TKH, key_cache_PMKH, value_cache_PMKH, key_scale, value_scale)
    if impl == "ref":
        kv_write_ref(key_TKH, value_TKH, key_cache_PMKH, value_cache_PMKH, slots_T, scales)
    elif len(slots_T) and key_TKH.shape[1]:
        launch_heads(key_TKH, value_TKH, key_cache_PMKH, value_cache_PMKH, slots_T, scales)


def mla_write(
    latent_TC: torch.Tensor,
    rope_TR: torch.Tensor,
    cache_PMC: torch.Tensor,
    slots_T: torch.Tensor,
    scale: torch.Tensor | None = None,
    *,
    impl: Impl,
    check: bool | None = None,
) -> None:
    """Write the first len(slots_T) rows [latent | rotated key] into their pages, in place.

    Args:
        latent_TC, rope_TR: as keys in kv_write; their widths add up to the cache's.
        scale: float32 [1], exactly when an FP8 cache is written from wider numbers.
    Raises:
        ValueError: an argument that does not fit, named.
        NotImplementedError: a cache of bytes (vLLM's fp8_ds_mla with a scale for every 128 columns), or impl="triton" with
            rows wider than 4,096.
    """
    check_tensor("cache_PMC", cache_PMC, shape=(None,) * 3, dtypes=(*FLOATS, *FP8, torch.uint8), layout="apart")
    if cache_PMC.dtype == torch.uint8:
        raise NotImplementedError("cache_PMC: uint8 rows with scales inside (fp8_ds_mla) are not written; use e4m3fn")
    for name, rows in (("latent_TC", latent_TC), ("rope_TR", rope_TR)):
        check_tensor(name, rows, shape=(None, None), dtypes=(*FLOATS, *FP8), layout="last")
    check_range("width of rope_TR", rope_TR.shape[1], 1, cache_PMC.shape[2] - 1)
    width = cache_PMC.shape[2] - rope_TR.shape[1]
    check_pair("latent", latent_TC[:, None], cache_PMC[:, :, None, :width], scale)
    check_pair("rope", rope_TR[:, None], cache_PMC[:, :, None, width:], scale)
    check_slots(slots_T, cache_PMC, {"latent": latent_TC, "rope": rope_TR}, check)
    if latent_TC.dtype != rope_TR.dtype:
        raise ValueError(f"rope_TR: dtype {rope_TR.dtype}; must be {latent_TC.dtype} like latent_TC")
    if scale is not None and scale.numel() != 1:
        raise ValueError(f"scale: shape {tuple(scale.shape)}; must be one number, latents have no heads")
    check_impl("mla_write", impl, latent_TC, rope_TR, cache_PMC, scale)
    if impl == "ref":
        mla_write_ref(latent_TC, rope_TR, cache_PMC, slots_T, scale)
    elif len(slots_T):
        launch_latents(latent_TC, rope_TR, cache_PMC, slots_T, scale)


def check_slots(slots_T: torch.Tensor, cache: torch.Tensor, rows: dict[str, torch.Tensor], check: bool | None) -> None:
    """Raise ValueError unless slots are indices beside the rows and, where they are read, distinct and in the cache."""
    check_index_dtype("slots_T", slots_T)
    if slots_T.device != cache.device:
        raise ValueError(f"slots_T: on {slots_T.device}; must be on {cache.device} like the cache")
    for name, tensor in rows.items():
        if len(tensor) < len(slots_T):
            raise ValueError(f"{name}: {len(tensor)} tokens; must be at least {len(slots_T)}, the length of slots_T")
        check_range(f"{name} rows (tokens x heads)", tensor.shape[1:-1].numel() * len(slots_T), 0, 2**30)  # int32
    if is_read(slots_T, check):
        check_below("slots_T", slots_T, cache.shape[0] * cache.shape[1], "slots")
        check_distinct("slots_T", slots_T, "two tokens in one slot have no order")


def check_pair(name: str, rows_TKH: torch.Tensor, cache_PMKH: torch.Tensor, scale: torch.Tensor | None) -> None:
    """Raise ValueError unless rows, cache and scale fit together."""
    check_tensor(f"{name}_cache", cache_PMKH, shape=(None,) * 4, dtypes=FLOATS + FP8, layout="apart")
    check_range(f"places of a page of {name}_cache", cache_PMKH.shape[1], 1, 2**30)
    check_range(f"width of {name}_cache", cache_PMKH.shape[3], 1, 2**30)
    wide = FLOATS if cache_PMKH.dtype in FP8 else ()
    shape, dtypes, device = (None, *cache_PMKH.shape[2:]), (cache_PMKH.dtype, *wide), cache_PMKH.device
    check_tensor(name, rows_TKH, shape=shape, dtypes=dtypes, device=device, layout="last")
    if (scale is not None) != (rows_TKH.dtype != cache_PMKH.dtype):
        got = "none" if scale is None else "one"
        kinds = f"{rows_TKH.dtype} into {cache_PMKH.dtype}"
        raise ValueError(f"{name} scale: got {got} for {kinds}; needed exactly when FP8 is written from wider numbers")
    if scale is not None:
        check_scale(f"{name} scale", scale, rows_TKH.shape[1], device)


def check_width(op: str, *widths: int) -> None:
    """Raise NotImplementedError for rows that a program cannot hold."""
    if max(widths) > MAX_WIDTH:
        refuse(op, f"rows of at most {MAX_WIDTH} columns, got {max(widths)}")


def as_bits(tensor: torch.Tensor, quantise: bool) -> torch.Tensor:
    """Return FP8 seen as bytes where it is only copied, so that no code, NaN among them, passes through arithmetic."""
    return tensor if quantise or tensor.dtype not in FP8 else tensor.view(torch.uint8)


def constants(rows: torch.Tensor, cache: torch.Tensor) -> dict:
    """Return the launch constants that depend on the element types."""
    quantise = rows.dtype != cache.dtype
    return {"QUANTISE": quantise, "LIMIT": torch.finfo(cache.dtype).max if quantise else 0.0}


def launch_heads(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots_T: torch.Tensor,
    scales: tuple[torch.Tensor, torch.Tensor] | None,
) -> None:
    """Start write_heads over all rows."""
    check_width("kv_write", key.shape[2], value.shape[2])
    key_scale, value_scale = scales if scales is not None else (None, None)
    key_padded, value_padded = triton.next_power_of_2(key.shape[2]), triton.next_power_of_2(value.shape[2])
    common = constants(key, key_cache)
    quantise, rows = common["QUANTISE"], max(1, ELEMENTS // max(key_padded, value_padded))
    num_heads, page_size = key.shape[1], key_cache.shape[1]
    write_heads[(triton.cdiv(len(slots_T) * num_heads, rows),)](
        as_bits(key, quantise),
        as_bits(value, quantise),
        as_bits(key_cache, quantise),
        as_bits(value_cache, quantise),
        slots_T,
        key_scale,
        value_scale,
        len(slots_T),
        key_cache.shape[0] * page_size,
        *key.stride()[:2],
        *value.stride()[:2],
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        K=num_heads,
        M=page_size,
        KEY_WIDTH=key.shape[2],
        VALUE_WIDTH=value.shape[2],
        KEY_PADDED=key_padded,
        VALUE_PADDED=value_padded,
        KEY_SCALE_STEP=int(key_scale is not None and key_scale.numel() > 1),
        VALUE_SCALE_STEP=int(value_scale is not None and value_scale.numel() > 1),
        ROWS=rows,
        **common,
        num_warps=NUM_WARPS,
    )


def launch_latents(
    latent: torch.Tensor, rope: torch.Tensor, cache: torch.Tensor, slots_T: torch.Tensor, scale: torch.Tensor | None
) -> None:
    """Start write_latents over all tokens."""
    check_width("mla_write", latent.shape[1], rope.shape[1])
    latent_padded, rope_padded = triton.next_power_of_2(latent.shape[1]), triton.next_power_of_2(rope.shape[1])
    common = constants(latent, cache)
    quantise, rows = common["QUANTISE"], max(1, LATENT_ELEMENTS // max(latent_padded, rope_padded))
    write_latents[(triton.cdiv(len(slots_T), rows),)](
        as_bits(latent, quantise),
        as_bits(rope, quantise),
        as_bits(cache, quantise),
        slots_T,
        scale,
        len(slots_T),
        cache.shape[0] * cache.shape[1],
        latent.stride(0),
        rope.stride(0),
        *cache.stride()[:2],
        M=cache.shape[1],
        LATENT_WIDTH=latent.shape[1],
        ROPE_WIDTH=rope.shape[1],
        LATENT_PADDED=latent_padded,
        ROPE_PADDED=rope_padded,
        ROWS=rows,
        **common,
        num_warps=LATENT_WARPS,
    )
