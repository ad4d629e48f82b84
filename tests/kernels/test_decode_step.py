"""Whole decode steps from these kernels, write then attend, with pages forked, moved and swapped out on the way.

The truth is written out here in float64 on plain lists of rows; it knows nothing of pages and uses no reference of the
kernels. For latents it is attention over keys and values that are expanded from them, which no kernel does.
"""

import torch

from kernels.kv_write.op import kv_write, mla_write
from kernels.paged_attention.op import mla_attention, paged_attention
from kernels.paged_attention.tables import Tables
from kernels.pages.op import page_copy, page_gather, page_scatter
from kernels.pages.pool import make_pool

PLACES = 4


class Book:
    """Pages of growing sequences: the bookkeeping of a scheduler, as little as a test needs."""

    def __init__(self, num_pages: int, rng: torch.Generator):
        self.free = torch.randperm(num_pages, generator=rng).tolist()
        self.pages: list[list[int]] = []
        self.lengths: list[int] = []

    def next_slots(self) -> torch.Tensor:
        """Grow every sequence by one row; return the slots."""
        for b, length in enumerate(self.lengths):
            if length % PLACES == 0:
                self.pages[b].append(self.free.pop())
            self.lengths[b] += 1
        ends = zip(self.pages, self.lengths, strict=True)
        return torch.tensor([pages[-1] * PLACES + (length - 1) % PLACES for pages, length in ends])

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tables_BP, padded with -1, and lengths_B."""
        width = max(map(len, self.pages))
        rows = [pages + [-1] * (width - len(pages)) for pages in self.pages]
        return torch.tensor(rows), torch.tensor(self.lengths)


def attend(q_NH: torch.Tensor, k_SKH: torch.Tensor, v_SKH: torch.Tensor, scale: float) -> torch.Tensor:
    """Return softmax attention of one query in float64; query head n reads key head n // (N // K)."""
    group = q_NH.shape[0] // k_SKH.shape[1]
    heads = []
    for n, q_H in enumerate(q_NH.double()):
        weight_S = torch.softmax(k_SKH[:, n // group].double() @ q_H * scale, dim=0)
        heads.append(weight_S @ v_SKH[:, n // group].double())
    return torch.stack(heads)


def test_gqa_decode_with_forks_and_moves(rng, device):
    """Three sequences decode; one forks; pages are compacted; one is swapped out to a buffer and back."""
    heads, group, width, num_pages, layers = 2, 3, 20, 16, 2
    memory = torch.full((layers, num_pages, heads, PLACES, 2 * width), float("nan"), device=device)
    caches = [layer.transpose(1, 2).split(width, dim=-1) for layer in memory]
    pool = make_pool(list(memory))
    tables = Book(num_pages, rng)
    tables.pages, tables.lengths = [[], [], []], [0, 0, 0]
    rows: list[list[torch.Tensor]] = [[], [], []]  # rows[b][s] is [layers, 2, heads, width]

    def step() -> None:
        slots_T = tables.next_slots().to(device)
        new_BL2KH = torch.randn(len(rows), layers, 2, heads, width, generator=rng)
        q_LBNH = torch.randn(layers, len(rows), heads * group, width, generator=rng)
        tables_now = Tables(*(tensor.to(device) for tensor in tables.tensors()))
        for b, sequence in enumerate(rows):
            sequence.append(new_BL2KH[b])
        for layer, (key_cache, value_cache) in enumerate(caches):
            key, value = (new_BL2KH[:, layer, which].to(device) for which in (0, 1))
            kv_write(key, value, key_cache, value_cache, slots_T, impl="triton")
            q = q_LBNH[layer].to(device)
            out, _ = paged_attention(q, key_cache, value_cache, tables_now, 0.3, impl="triton", num_splits=2)
            for b, sequence in enumerate(rows):
                k, v = (torch.stack([row[layer, which] for row in sequence]) for which in (0, 1))
                truth = attend(q_LBNH[layer, b], k, v, 0.3)
                torch.testing.assert_close(out[b].double().cpu(), truth, rtol=1e-5, atol=1e-5)

    def move(sources: list[int], targets: list[int]) -> None:
        page_copy(pool, torch.tensor(sources, device=device), torch.tensor(targets, device=device), impl="triton")

    for _ in range(6):
        step()
    # Fork sequence 1: full pages are shared, the half-written one is copied (copy-on-write).
    own = tables.free.pop()
    move([tables.pages[1][-1]], [own])
    tables.pages.append([*tables.pages[1][:-1], own])
    tables.lengths.append(tables.lengths[1])
    rows.append(list(rows[1]))
    step()
    # Compact sequence 0 into free pages; the pages that it leaves are overwritten, so nothing may still read them.
    left, tables.pages[0] = tables.pages[0], [tables.free.pop() for _ in tables.pages[0]]
    move(left, tables.pages[0])
    memory[:, left] = float("nan")
    tables.free += left
    step()
    # Swap sequence 2 out, lose its pages, and bring it back elsewhere.
    gone = tables.pages[2]
    buffer = torch.zeros(len(gone), layers, pool.page_bytes, dtype=torch.uint8, device=device)
    page_gather(pool, torch.tensor(gone, device=device), buffer, impl="triton")
    memory[:, gone] = float("nan")
    tables.pages[2] = [tables.free.pop() for _ in gone]
    page_scatter(pool, torch.tensor(tables.pages[2], device=device), buffer, impl="triton")
    step()
    assert tables.lengths == [9, 9, 9, 9]


def test_mla_decode_equals_expanded_attention(rng, device):
    """Absorbed queries over latents give what expanded keys and values give."""
    heads, latent, rope, nope, value, num_pages = 3, 24, 8, 10, 14, 7
    cache = torch.full((num_pages, PLACES, latent + rope), float("nan"), device=device)
    w_key_NHC = torch.randn(heads, nope, latent, generator=rng)
    w_value_NHC = torch.randn(heads, value, latent, generator=rng)
    scale = (nope + rope) ** -0.5
    tables = Book(num_pages, rng)
    tables.pages, tables.lengths = [[], []], [0, 0]
    latents: list[list[torch.Tensor]] = [[], []]
    for _ in range(6):
        slots_T = tables.next_slots().to(device)
        new_BC = torch.randn(2, latent + rope, generator=rng)
        q_nope_BNH, q_rope_BNR = torch.randn(2, heads, nope, generator=rng), torch.randn(2, heads, rope, generator=rng)
        for b in range(2):
            latents[b].append(new_BC[b])
        mla_write(new_BC[:, :latent].to(device), new_BC[:, latent:].to(device), cache, slots_T, impl="triton")
        q_BNC = torch.cat([torch.einsum("bnh,nhc->bnc", q_nope_BNH, w_key_NHC), q_rope_BNR], dim=-1)
        tables_now = Tables(*(tensor.to(device) for tensor in tables.tensors()))
        out_BNC, _ = mla_attention(q_BNC.to(device), cache, tables_now, scale, latent, impl="triton")
        out_BNH = torch.einsum("bnc,nhc->bnh", out_BNC.cpu().double(), w_value_NHC.double())
        for b in range(2):
            rows_SC = torch.stack(latents[b]).double()
            k_nope_SNH = torch.einsum("sc,nhc->snh", rows_SC[:, :latent], w_key_NHC.double())
            k_SNH = torch.cat([k_nope_SNH, rows_SC[:, None, latent:].expand(-1, heads, -1)], dim=-1)
            v_SNH = torch.einsum("sc,nhc->snh", rows_SC[:, :latent], w_value_NHC.double())
            truth = attend(torch.cat([q_nope_BNH[b], q_rope_BNR[b]], dim=-1), k_SNH, v_SNH, scale)
            torch.testing.assert_close(out_BNH[b], truth, rtol=1e-4, atol=1e-4)
