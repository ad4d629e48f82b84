"""What kv_write means, in torch: the specification that the kernel is tested against."""

import torch


def to_cache_dtype(x_TKH: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor | None) -> torch.Tensor:
    """Return x in the cache's dtype: unchanged, or x / scale rounded to nearest-even FP8 and saturated; NaN stays NaN."""
    if scale is None:
        return x_TKH
    limit = torch.finfo(dtype).max
    # One scale for all heads or one for each: [1] and [K] both stand against [T, K, H] as [*, 1].
    return (x_TKH.float() / scale.view(-1, 1)).clamp(-limit, limit).to(dtype)


def write_rows(rows_TKH: torch.Tensor, cache_PMKH: torch.Tensor, slots_T: torch.Tensor) -> None:
    """Store row t at page slots[t] // M, place slots[t] % M; a negative slot, or one past the cache, stores nothing."""
    num_pages, page_size = cache_PMKH.shape[:2]
    is_written_T = (slots_T >= 0) & (slots_T < num_pages * page_size)
    slots_W = slots_T[is_written_T].long()
    # As bits: FP8 has no indexed store, and a copy must keep every NaN payload.
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[cache_PMKH.element_size()]
    cache_PMKH.view(bits)[slots_W // page_size, slots_W % page_size] = rows_TKH[: len(slots_T)][is_written_T].view(bits)


def kv_write_ref(
    key_TKH: torch.Tensor,
    value_TKH: torch.Tensor,
    key_cache_PMKH: torch.Tensor,
    value_cache_PMKH: torch.Tensor,
    slots_T: torch.Tensor,
    scales: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Write keys and values into their pages, in place."""
    key_scale, value_scale = scales if scales is not None else (None, None)
    write_rows(to_cache_dtype(key_TKH, key_cache_PMKH.dtype, key_scale), key_cache_PMKH, slots_T)
    write_rows(to_cache_dtype(value_TKH, value_cache_PMKH.dtype, value_scale), value_cache_PMKH, slots_T)


def mla_write_ref(
    latent_TC: torch.Tensor,
    rope_TR: torch.Tensor,
    cache_PMC: torch.Tensor,
    slots_T: torch.Tensor,
    scale: torch.Tensor | None = None,
) -> None:
    """Write [latent | rotated key] rows into their pages, in place."""
    rows_T1C = torch.cat([latent_TC[: len(slots_T)], rope_TR[: len(slots_T)]], dim=1)[:, None]
    write_rows(to_cache_dtype(rows_T1C, cache_PMC.dtype, scale), cache_PMC[:, :, None], slots_T)
