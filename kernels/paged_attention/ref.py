"""What paged_attention means, in torch: gather every sequence's keys from its pages, then plain softmax attention.

It computes and answers in `dtype`: float32, or float64 for the truth that tests compare with.
"""

import torch

from kernels.paged_attention.tables import Tables


def gather_rows(cache_PMKH: torch.Tensor, table_P: torch.Tensor, length: int) -> torch.Tensor:
    """Return the first `length` rows of a sequence, in order: row s lies in page table[s // M] at place s % M."""
    s_S = torch.arange(length, device=cache_PMKH.device)
    return cache_PMKH[table_P[s_S // cache_PMKH.shape[1]].long(), s_S % cache_PMKH.shape[1]]


def paged_attention_ref(
    q_BNH: torch.Tensor,
    key_cache_PMKH: torch.Tensor,
    value_cache_PMKH: torch.Tensor,
    tables: Tables,
    softmax_scale: float,
    scales: tuple[torch.Tensor, torch.Tensor] | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention [B, N, value width] and its natural log-sum-exp [B, N], both in `dtype`.

    A cached key counts as code * its scale, and so a value. Length 0, or logits all -inf, give zeros and lse -inf.
    """
    batch, num_heads, _ = q_BNH.shape
    num_kv_heads, value_width = value_cache_PMKH.shape[2:]
    out_BNH = q_BNH.new_zeros(batch, num_heads, value_width, dtype=dtype)
    lse_BN = q_BNH.new_full((batch, num_heads), float("-inf"), dtype=dtype)
    factors = (1.0, 1.0) if scales is None else [scale.to(dtype).view(-1, 1) for scale in scales]  # [1, 1] or [K, 1]
    for b, length in enumerate(tables.lengths_B.tolist()):
        if length == 0:
            continue
        k_SKH = gather_rows(key_cache_PMKH, tables.tables_BP[b], length).to(dtype) * factors[0]
        v_SKH = gather_rows(value_cache_PMKH, tables.tables_BP[b], length).to(dtype) * factors[1]
        q_KQH = q_BNH[b].to(dtype).unflatten(0, (num_kv_heads, -1))
        logit_KQS = torch.einsum("kqh,skh->kqs", q_KQH, k_SKH) * softmax_scale
        lse_KQ = logit_KQS.logsumexp(-1)
        weight_KQS = logit_KQS.softmax(-1).where(lse_KQ[..., None] != float("-inf"), 0.0)
        lse_BN[b] = lse_KQ.flatten()
        out_BNH[b] = torch.einsum("kqs,skh->kqh", weight_KQS, v_SKH).flatten(0, 1)
    return out_BNH, lse_BN


def mla_attention_ref(
    q_BNC: torch.Tensor,
    cache_PMC: torch.Tensor,
    tables: Tables,
    softmax_scale: float,
    latent_width: int,
    scale: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention over latents: one key head for all, whose first latent_width columns are also the value."""
    key, value = cache_PMC[:, :, None], cache_PMC[:, :, None, :latent_width]
    scales = None if scale is None else (scale, scale)
    return paged_attention_ref(q_BNC, key, value, tables, softmax_scale, scales, dtype)
