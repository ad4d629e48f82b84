"""grouped_matmul against float64: every dtype, both layouts of the input, empty experts, odd widths, NaN in padding."""

import math

import pytest
import torch

from kernels.align.op import align
from kernels.aligned import Aligned
from kernels.grouped_matmul.op import grouped_matmul
from kernels.grouped_matmul.ref import dequantise_ref
from kernels.harness import routed_ids
from kernels.permute.op import permute
from kernels.permute.ref import quantise_ref

EPS = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-24}


def order_of(T: int, A: int, E: int, block: int, device: torch.device) -> Aligned:
    return align(routed_ids(T, A, E, "zipf", seed=4).to(device), E, block, impl="ref")


def expected_rows(x_RD: torch.Tensor, w_EFD: torch.Tensor, order: Aligned, num_active: int) -> dict[int, torch.Tensor]:
    """Return row of the order -> float64 result, one row at a time."""
    num_routed = order.position_R.numel()
    return {
        m: w_EFD[order.expert_J[m // order.block]].double() @ x_RD[r // num_active if num_active else m].double()
        for m, r in enumerate(order.routed_M.tolist())
        if r < num_routed
    }


@pytest.mark.parametrize("dtype", EPS)
@pytest.mark.parametrize(
    ("T", "A", "E", "block", "D", "F"),
    [(9, 2, 5, 16, 72, 40), (40, 3, 4, 32, 128, 130), (1, 1, 3, 64, 200, 8), (70, 1, 2, 64, 64, 33)],
)
@pytest.mark.parametrize("is_gathered", [True, False], ids=["tokens", "rows in order"])
def test_grouped_matmul_equals_float64(T, A, E, block, D, F, dtype, is_gathered, rng, device, canaries):
    order = order_of(T, A, E, block, device)
    x_RD = torch.randn(T, D, generator=rng).to(dtype).to(device)
    if not is_gathered:
        ordered = torch.full((order.routed_M.numel(), D), math.nan, dtype=dtype, device=device)
        ordered[order.position_R.long()] = x_RD.repeat_interleave(A, 0)
        x_RD = ordered
    w_EFD = (torch.randn(E, F, D, generator=rng) / D**0.5).to(dtype).to(device)
    num_active = A if is_gathered else 0
    expected = expected_rows(x_RD, w_EFD, order, num_active)
    for impl in ("ref", "triton"):
        out_MF = grouped_matmul(x_RD, w_EFD, order, num_active=num_active, dtype=dtype, impl=impl)
        for m, row_F in expected.items():
            # one rounding to dtype, and D additions in float32 of terms of size |x| |w| (about 1 in sum)
            torch.testing.assert_close(out_MF[m].double(), row_F, rtol=EPS[dtype], atol=D * 2**-24 * 4)


@pytest.mark.parametrize(("T", "A", "E", "block", "D", "F"), [(11, 2, 3, 16, 256, 128), (40, 3, 4, 64, 128, 256)])
def test_fp8_blocks_equal_the_float64_product_of_what_they_mean(T, A, E, block, D, F, rng, device, canaries):
    order = order_of(T, A, E, block, device)
    x_TD = torch.randn(T, D, generator=rng).bfloat16().to(device)
    x_MD, x_scale_MG = permute(x_TD, order, quantise=True, is_power_of_two=True, impl="triton")
    w_EFD, w_scale_EFG = quantise_weights(torch.randn(E, F, D, generator=rng) / D**0.5)
    w_EFD, w_scale_EFG = w_EFD.to(device), w_scale_EFG.to(device)
    assert x_scale_MG is not None
    wide_x = dequantise_ref(x_MD, x_scale_MG, 1)
    wide_w = torch.stack([dequantise_ref(w, s, 128) for w, s in zip(w_EFD, w_scale_EFG, strict=True)])
    expected = expected_rows(wide_x, wide_w, order, 0)
    for impl in ("ref", "triton"):
        out_MF = grouped_matmul(
            x_MD, w_EFD, order, x_scale_RG=x_scale_MG, w_scale_EFG=w_scale_EFG, dtype=torch.float32, impl=impl
        )
        for m, row_F in expected.items():
            # Hopper adds products of FP8 in 22 bits, 128 at a time
            tolerance = D * 2**-24 * 4 if device.type == "cpu" else 2e-3
            torch.testing.assert_close(out_MF[m].double(), row_F, rtol=0, atol=tolerance)


def quantise_weights(w_EFD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return FP8 codes and one scale for each 128 x 128 block."""
    E, F, D = w_EFD.shape
    blocks = w_EFD.reshape(E, F // 128, 128, D // 128, 128).transpose(2, 3)
    scale_EFG = blocks.abs().amax((3, 4)) / 448
    codes = (blocks / scale_EFG[..., None, None]).to(torch.float8_e4m3fn)
    return codes.view(torch.uint8).transpose(2, 3).reshape(E, F, D).view(torch.float8_e4m3fn), scale_EFG


def test_fp8_tokens_can_be_gathered(rng, device):
    T, A, E = 7, 2, 3
    order = order_of(T, A, E, 16, device)
    x_TD, x_scale_TG = quantise_ref(torch.randn(T, 128, generator=rng).to(device))
    w_EFD, w_scale_EFG = (t.to(device) for t in quantise_weights(torch.randn(E, 128, 128, generator=rng)))
    scales = {"x_scale_RG": x_scale_TG, "w_scale_EFG": w_scale_EFG, "num_active": A, "dtype": torch.float32}
    ours = grouped_matmul(x_TD, w_EFD, order, **scales, impl="triton")
    rows = order.position_R.long()
    expected = grouped_matmul(x_TD, w_EFD, order, **scales, impl="ref")
    tolerance = 1e-4 if device.type == "cpu" else 2e-2
    torch.testing.assert_close(ours[rows], expected[rows], rtol=0, atol=tolerance)


def test_padding_rows_are_not_written(device, canaries):
    order = order_of(3, 1, 2, 16, device)
    w_EFD = torch.ones(2, 8, 8, device=device)
    out_MF = grouped_matmul(
        torch.ones(3, 8, device=device), w_EFD, order, num_active=1, dtype=torch.float32, impl="triton"
    )
    is_row_M = order.routed_M < 3
    assert (out_MF[is_row_M] == 8).all()
    assert (out_MF[~is_row_M].view(torch.uint8) == 0x5A).all()


def test_bad_arguments_are_refused(device):
    order = order_of(4, 2, 3, 16, torch.device("cpu"))
    x_TD, w_EFD = torch.zeros(4, 128), torch.zeros(3, 128, 128)
    fp8 = {"x_RD": x_TD.to(torch.float8_e4m3fn), "w_EFD": w_EFD.to(torch.float8_e4m3fn)}
    scales = {"x_scale_RG": torch.zeros(4, 1), "w_scale_EFG": torch.zeros(3, 1, 1)}
    for message, changes in {
        r"w_EFD: shape \(128, 128\)": {"w_EFD": w_EFD[0]},
        "x_RD: dtype torch.float32; must be torch.bfloat16": {"w_EFD": w_EFD.bfloat16()},
        r"x_RD: shape \(3, 128\); must be \(4, 128\)": {"x_RD": x_TD[:3]},
        "number of routed rows=8: must be a multiple of 3": {"num_active": 3},
        "D=12: must be a multiple of 8": {"x_RD": torch.zeros(4, 12), "w_EFD": torch.zeros(3, 5, 12)},
        "dtype=torch.int8": {"dtype": torch.int8},
        "only FP8 has scales": scales,
        "FP8 needs both": fp8,
        r"x_scale_RG: shape \(4, 2\)": {**fp8, **scales, "x_scale_RG": torch.zeros(4, 2)},
        r"w_scale_EFG: shape \(3, 1, 2\)": {**fp8, **scales, "w_scale_EFG": torch.zeros(3, 1, 2)},
    }.items():
        arguments = {"x_RD": x_TD, "w_EFD": w_EFD, "order": order, "num_active": 2, **changes}
        with pytest.raises(ValueError, match=message):
            grouped_matmul(**arguments, impl="triton")
    small = order_of(4, 2, 3, 8, device)
    with pytest.raises(NotImplementedError, match=r"blocks of 16 to 128 rows, got order.block=8"):
        grouped_matmul(x_TD.to(device), w_EFD.to(device), small, num_active=2, impl="triton")
