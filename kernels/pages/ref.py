"""What the page moves mean, in torch, on caches seen as bytes: caches_L_PW[l] is uint8 [P, page bytes]."""

import torch


def is_page(pages_N: torch.Tensor, num_pages: int) -> torch.Tensor:
    """Return which entries of the list name a page; the others move nothing."""
    return (pages_N >= 0) & (pages_N < num_pages)


def page_copy_ref(caches_L_PW: list[torch.Tensor], from_N: torch.Tensor, to_N: torch.Tensor) -> None:
    """Copy page from_N[i] onto page to_N[i] in every cache, in place; a pair with a negative end is skipped."""
    for cache_PW in caches_L_PW:
        moved_N = is_page(from_N, len(cache_PW)) & is_page(to_N, len(cache_PW))
        cache_PW[to_N[moved_N].long()] = cache_PW[from_N[moved_N].long()]


def page_gather_ref(caches_L_PW: list[torch.Tensor], pages_N: torch.Tensor, buffer_NLW: torch.Tensor) -> None:
    """Copy page pages_N[i] of cache l to buffer[i, l]; the rows of negative pages keep what they held."""
    for layer, cache_PW in enumerate(caches_L_PW):
        moved_N = is_page(pages_N, len(cache_PW)).to(buffer_NLW.device)
        found_NW = cache_PW[pages_N[moved_N.to(pages_N.device)].long()]
        buffer_NLW[moved_N, layer] = found_NW.to(buffer_NLW.device)


def page_scatter_ref(caches_L_PW: list[torch.Tensor], pages_N: torch.Tensor, buffer_NLW: torch.Tensor) -> None:
    """Copy buffer[i, l] to page pages_N[i] of cache l, in place; negative pages are skipped."""
    for layer, cache_PW in enumerate(caches_L_PW):
        moved_N = is_page(pages_N, len(cache_PW))
        rows_NW = buffer_NLW[moved_N.to(buffer_NLW.device), layer]
        cache_PW[pages_N[moved_N].long()] = rows_NW.to(cache_PW.device)
