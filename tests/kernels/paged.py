"""Sequences in pages for the attention tests: every byte that no sequence owns is NaN."""

import torch

from kernels.paged_attention.ref import gather_rows


def make_pages(
    rng: torch.Generator,
    lengths: list[int],
    page_size: int,
    row_shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a cache [P, page_size, *row_shape] with random rows, shuffled tables_BP int32 and lengths_B int32."""
    counts = [-(-length // page_size) for length in lengths]
    num_pages = sum(counts) + 2  # two that nobody owns
    order = torch.randperm(num_pages, generator=rng).int()
    tables_BP = torch.full((len(lengths), max(*counts, 1) + 1), 2**30, dtype=torch.int32)  # past the length: anything
    cache = torch.full((num_pages, page_size, *row_shape), float("nan")).to(dtype)
    taken = 0
    for b, length in enumerate(lengths):
        tables_BP[b, : counts[b]] = order[taken : taken + counts[b]]
        taken += counts[b]
        rows = torch.randn(length, *row_shape, generator=rng).to(dtype)
        for s in range(length):
            cache[tables_BP[b, s // page_size], s % page_size] = rows[s]
    return cache.to(device), tables_BP.to(device), torch.tensor(lengths, dtype=torch.int32, device=device)


def largest_value(cache_PMKH: torch.Tensor, tables_BP: torch.Tensor, lengths_B: torch.Tensor) -> float:
    """Return the largest magnitude that any sequence owns."""
    pairs = zip(tables_BP, lengths_B.tolist(), strict=True)
    rows = [gather_rows(cache_PMKH, table_P, length).float().abs() for table_P, length in pairs if length]
    return max(float(row.max()) for row in rows)
