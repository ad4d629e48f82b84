"""Offsets past 2**31 elements land where they should: tensors of gigabytes of which only the rows in use are ever touched."""

import mmap

import pytest
import torch

from conftest import DEVICE
from kernels.align.op import align
from kernels.aligned import Aligned
from kernels.gate.op import gate
from kernels.grouped_matmul.op import grouped_matmul
from kernels.kv_write.op import kv_write, mla_write
from kernels.paged_attention.op import mla_attention, paged_attention
from kernels.paged_attention.tables import Tables
from kernels.permute.op import permute, unpermute
from kernels.router import Router

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="needs memory that is only promised")
FAR = 2**30
"""Elements from one row, or page, to the next: the third begins at 2**31."""
NO_RESERVE = 0x4000
"""MAP_NORESERVE of Linux, which Python's mmap names from 3.13 on."""


def sparse(dtype: torch.dtype, *shape: int, step: int = FAR) -> torch.Tensor:
    """Return zeros whose first dimension has a stride of `step` elements, in memory that nobody reserves."""
    num_bytes = ((shape[0] - 1) * step + torch.Size(shape[1:]).numel()) * dtype.itemsize
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE)
    inner = torch.empty(shape[1:], device="meta").stride()
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).as_strided(shape, (step, *inner))


def fill(far: torch.Tensor, rng: torch.Generator) -> torch.Tensor:
    """Put noise into the rows; return them close together."""
    near = torch.randn(far.shape, generator=rng).to(far.dtype)
    for row, content in zip(far, near, strict=True):
        row.copy_(content)
    return near


def test_gate_and_permute_read_far_rows(rng):
    logits_TE = sparse(torch.bfloat16, 4, 24)
    near = fill(logits_TE, rng)
    ours, expected = (gate(x, Router(num_active=5), impl="triton") for x in (logits_TE, near))
    assert torch.equal(ours[0], expected[0]) and torch.equal(ours[1], expected[1])
    order = align(ours[1], 24, 16, impl="ref")
    assert torch.equal(
        permute(logits_TE, order, impl="triton")[0][order.position_R.long()], near.repeat_interleave(5, 0)
    )


def test_permute_writes_and_unpermute_reads_far_rows(rng):
    M, D = 2**18, 2**13 + 128
    nothing = torch.zeros(M, dtype=torch.int32)
    order = Aligned(nothing, nothing[: M // 16], nothing[:1], torch.tensor([M - 1], dtype=torch.int32), 16, 1)
    assert (M - 1) * D > 2**31
    x_TD = torch.randn(1, D, generator=rng).bfloat16()
    y_MD, scale_MG = permute(x_TD, order, quantise=True, impl="triton")
    codes, scale_TG = (
        x for x in permute(x_TD, align(torch.zeros(1, 1).long(), 1, 1, impl="ref"), quantise=True, impl="ref")
    )
    assert scale_MG is not None and scale_TG is not None
    assert torch.equal(y_MD[M - 1].view(torch.uint8), codes[0].view(torch.uint8)) and torch.equal(
        scale_MG[M - 1], scale_TG[0]
    )
    wide_MD = sparse(torch.bfloat16, M, D, step=D)
    wide_MD[M - 1] = x_TD[0]
    assert torch.equal(unpermute(wide_MD, order, torch.tensor([[2.0]]), impl="triton"), 2 * x_TD)


def test_grouped_matmul_reads_the_weights_of_a_far_expert(rng):
    E, F, D = 2100, 128, 2**13 + 128
    w_EFD = sparse(torch.float8_e4m3fn, E, F, D, step=F * D)
    assert w_EFD.is_contiguous() and (E - 1) * F * D > 2**31
    w_EFD[-1].view(torch.uint8).random_(0, 2**6, generator=rng)
    order = align(torch.tensor([[E - 1]]), E, 16, impl="ref")
    x_TD = torch.randn(1, D, generator=rng).to(torch.float8_e4m3fn)
    scales = {"x_scale_RG": torch.ones(1, D // 128), "w_scale_EFG": torch.ones(E, F // 128, D // 128)}
    out_MF = grouped_matmul(x_TD, w_EFD, order, **scales, num_active=1, dtype=torch.float32, impl="triton")
    truth = w_EFD[-1].double() @ x_TD[0].double()
    torch.testing.assert_close(out_MF[0].double(), truth, rtol=0, atol=float(truth.abs().max()) * 1e-5)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16])
def test_far_pages_are_written_and_attended(dtype, rng):
    cache = sparse(dtype, 4, 2, 1, 32)
    rows = [torch.randn(8, 1, width, generator=rng).to(dtype) for width in (16, 16)]
    slots_T = torch.tensor([7, 0, 6, 3, 1, 5, 2, 4])
    kv_write(*rows, *cache.split([16, 16], dim=-1), slots_T, impl="triton")
    for t, slot in enumerate(slots_T.tolist()):
        assert torch.equal(cache[slot // 2, slot % 2, 0].float(), torch.cat([x[t, 0] for x in rows]).float())
    tables = Tables(torch.tensor([[3, 0, 2, 1]]), torch.tensor([7]))
    q_BNH = torch.randn(1, 3, 16, generator=rng).bfloat16()
    far = cache.split([16, 16], dim=-1)
    found, expected = (
        paged_attention(q_BNH, *pair, tables, 0.3, impl="triton") for pair in (far, [x.clone() for x in far])
    )
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


def test_far_latents_are_written_and_attended(rng):
    cache = sparse(torch.bfloat16, 4, 2, 40)
    latent_TC, rope_TR = (torch.randn(8, width, generator=rng).bfloat16() for width in (32, 8))
    slots_T = torch.tensor([7, 0, 6, 3, 1, 5, 2, 4])
    mla_write(latent_TC, rope_TR, cache, slots_T, impl="triton")
    near = cache.clone()
    assert torch.equal(near.view(8, 40)[slots_T], torch.cat([latent_TC, rope_TR], dim=1))
    tables = Tables(torch.tensor([[3, 0, 2, 1]]), torch.tensor([7]))
    q_BNC = torch.randn(1, 3, 40, generator=rng).bfloat16()
    found, expected = (mla_attention(q_BNC, x, tables, 0.3, 32, impl="triton") for x in (cache, near))
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
