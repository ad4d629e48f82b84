"""permute and unpermute against their references: copies bitwise, FP8 codes and scales bit for bit, NaN, padding."""

import math

import pytest
import torch

from kernels.align.op import align
from kernels.aligned import Aligned
from kernels.harness import routed_ids
from kernels.permute.op import permute, unpermute
from kernels.permute.ref import quantise_ref

SHAPES = [(5, 3, 8, 16, 136), (7, 1, 3, 1, 8), (1, 8, 128, 64, 1160), (33, 2, 4, 16, 384)]  # T, A, E, block, D


def order_of(T: int, A: int, E: int, block: int, device: torch.device, is_dropping: bool = False) -> Aligned:
    ids_TA = routed_ids(T, A, E, "zipf", seed=2)
    if is_dropping:
        ids_TA[:, 0] = -1
    return align(ids_TA.to(device), E, block, impl="ref")


def inside(x: torch.Tensor, fill: float = math.nan) -> torch.Tensor:
    """Return `x` as a view into a wider buffer of `fill`, so that a read past a row shows."""
    wide = torch.full((x.shape[0] + 2, x.shape[1] + 16), fill, dtype=x.dtype, device=x.device)
    wide[1:-1, 8:-8] = x
    return wide[1:-1, 8:-8]


def rows_in_use(order: Aligned) -> torch.Tensor:
    return order.position_R[order.position_R >= 0].long()


@pytest.mark.parametrize("is_dropping", [False, True], ids=["all local", "some dropped"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_permute_copies_every_row_to_its_places(shape, dtype, is_dropping, rng, device, canaries):
    *sizes, D = shape
    order = order_of(*sizes, device, is_dropping)
    x_TD = torch.randn(sizes[0], D, generator=rng).to(dtype).to(device)
    y_MD, scale = permute(inside(x_TD), order, impl="triton")
    expected, _ = permute(x_TD, order, impl="ref")
    rows = rows_in_use(order)
    assert scale is None and torch.equal(y_MD[rows], expected[rows])
    for r, row in enumerate(order.position_R.tolist()):
        assert row < 0 or torch.equal(y_MD[row], x_TD[r // sizes[1]])
    padding = torch.ones(len(y_MD), dtype=torch.bool, device=device)
    padding[rows] = False
    assert (y_MD.contiguous().view(torch.uint8)[padding] == 0x5A).all()  # canary bytes: padding is not written


@pytest.mark.parametrize("is_power_of_two", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_quantised_rows_equal_torch_bit_for_bit(dtype, is_power_of_two, rng, device, canaries):
    T, A, E, block, D = 7, 3, 5, 16, 640
    order = order_of(T, A, E, block, device)
    x_TD = torch.randn(T, D, generator=rng) * torch.logspace(-30, 30, T)[:, None]
    x_TD[2, :128] = 0  # the smallest scale
    x_TD[3, 5] = math.nan
    x_TD[4, 130] = math.inf
    x_TD = x_TD.to(dtype).to(device)
    options = {"quantise": True, "is_power_of_two": is_power_of_two}
    y_MD, scale_MG = permute(inside(x_TD), order, **options, impl="triton")
    expected, expected_scale = permute(x_TD, order, **options, impl="ref")
    rows = rows_in_use(order)
    assert scale_MG is not None and expected_scale is not None
    assert torch.equal(scale_MG[rows], expected_scale[rows])
    assert torch.equal(y_MD.view(torch.uint8)[rows], expected.view(torch.uint8)[rows])


def test_scales_may_lie_transposed(rng, device, canaries):
    order = order_of(9, 2, 4, 16, device)
    x_TD = torch.randn(9, 256, generator=rng).to(device)
    for impl in ("ref", "triton"):
        scale_MG = permute(x_TD, order, quantise=True, is_scale_transposed=True, impl=impl)[1]
        plain_MG = permute(x_TD, order, quantise=True, impl=impl)[1]
        assert scale_MG is not None and plain_MG is not None
        assert scale_MG.stride() == (1, len(scale_MG)) and plain_MG.stride() == (2, 1)
        assert torch.equal(scale_MG[rows_in_use(order)], plain_MG[rows_in_use(order)])


def test_quantisation_follows_its_formula():
    x_TD = torch.zeros(2, 256)
    x_TD[0, :3] = torch.tensor([448.0, -224.0, 1.0])
    x_TD[1, 128:130] = torch.tensor([3.0, -1.0])
    codes, scale_TG = quantise_ref(x_TD)
    assert scale_TG[0].tolist() == pytest.approx([1.0, 1e-10 / 448])
    assert codes[0, :3].tolist() == [448.0, -224.0, 1.0]
    codes, scale_TG = quantise_ref(x_TD, is_power_of_two=True)
    assert math.log2(scale_TG[0, 1]).is_integer() and scale_TG[1, 1] == 2.0**-7  # 3 / 448 is between 2^-8 and 2^-7
    assert (codes[1, 128:130].float() * scale_TG[1, 1]).tolist() == [3.0, -1.0]
    exact = quantise_ref(torch.full((1, 128), 448.0 * 2**-5), is_power_of_two=True)[1]
    assert exact.item() == 2.0**-5  # a power of two stays


def test_quantisation_error_is_at_most_half_a_step(rng):
    x_TD = torch.randn(5, 512, generator=rng)
    for is_power_of_two in (False, True):
        codes, scale_TG = quantise_ref(x_TD, is_power_of_two=is_power_of_two)
        steps = scale_TG.repeat_interleave(128, 1)
        error = (codes.float() * steps - x_TD).abs()
        # half a unit of 4-bit significands, or of the smallest subnormal 2^-9
        assert (error <= torch.maximum(x_TD.abs() * 2**-4, steps * 2**-10) * (1 + 1e-6)).all()


@pytest.mark.parametrize("is_dropping", [False, True], ids=["all local", "some dropped"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_unpermute_adds_the_rows_of_a_token(shape, dtype, is_dropping, rng, device, canaries):
    T, A, E, block, D = shape
    order = order_of(T, A, E, block, device, is_dropping)
    y_MD = torch.full((order.routed_M.numel(), D), math.nan, dtype=dtype, device=device)
    rows = rows_in_use(order)
    y_MD[rows] = torch.randn(len(rows), D, generator=rng).to(dtype).to(device)
    weights_TA = torch.rand(T, A, generator=rng).to(device)
    out_TD = unpermute(y_MD, order, weights_TA, impl="triton")
    wide = torch.zeros(T, D, dtype=torch.float64, device=device)
    for r, row in enumerate(order.position_R.tolist()):
        if row >= 0:
            wide[r // A] += weights_TA[r // A, r % A].double() * y_MD[row].double()
    # A sums of products in float32, then one rounding to dtype
    rounding = torch.finfo(dtype).eps / 2
    torch.testing.assert_close(out_TD.double(), wide, rtol=rounding + 1e-6, atol=2e-6 * A)
    expected = unpermute(y_MD, order, weights_TA, impl="ref")
    if device.type == "cpu":  # a GPU fuses the product and the sum
        assert torch.equal(out_TD, expected)
    torch.testing.assert_close(out_TD, expected, rtol=2 * rounding, atol=1e-6)


def test_a_dropped_choice_with_a_nan_weight_adds_nothing(device):
    order = align(torch.tensor([[0, -1]], device=device), 1, 16, impl="ref")
    y_MD = torch.ones(16, 8, device=device)
    weights_TA = torch.tensor([[2.0, math.nan]], device=device)
    for impl in ("ref", "triton"):
        assert unpermute(y_MD, order, weights_TA, impl=impl).tolist() == [[2.0] * 8]


def test_no_tokens(device):
    order = align(torch.zeros(0, 2, dtype=torch.int32, device=device), 4, 16, impl="ref")
    y_MD, _ = permute(torch.zeros(0, 8, device=device), order, impl="triton")
    assert y_MD.shape == (0, 8)
    assert unpermute(y_MD, order, torch.zeros(0, 2, device=device), impl="triton").shape == (0, 8)


def test_bad_arguments_are_refused():
    order = order_of(5, 2, 4, 16, torch.device("cpu"))
    x_TD, y_MD, weights_TA = torch.zeros(5, 128), torch.zeros(order.routed_M.numel(), 128), torch.zeros(5, 2)
    for message, call in {
        r"x_TD: shape \(5,\)": lambda: permute(torch.zeros(5), order, impl="triton"),
        "x_TD: dtype torch.int32": lambda: permute(x_TD.int(), order, impl="triton"),
        "x_TD: strides": lambda: permute(torch.zeros(128, 5).t(), order, impl="triton"),
        "D=12: must be a multiple of 8": lambda: permute(torch.zeros(5, 12), order, impl="triton"),
        "D=136: must be a multiple of 128": lambda: permute(torch.zeros(5, 136), order, quantise=True, impl="triton"),
        "need quantise=True": lambda: permute(x_TD, order, is_power_of_two=True, impl="triton"),
        "has 10 routed rows; must be a multiple of the 3 tokens": lambda: permute(x_TD[:3], order, impl="triton"),
        r"y_MD: shape \(3, 128\)": lambda: unpermute(y_MD[:3], order, weights_TA, impl="triton"),
        "weights_TA: dtype torch.float64": lambda: unpermute(y_MD, order, weights_TA.double(), impl="triton"),
        r"order.position_R: shape \(10,\); must be \(5\)": lambda: unpermute(
            y_MD, order, weights_TA[:, :1].clone(), impl="triton"
        ),
        "y_MD: strides": lambda: unpermute(y_MD.t().contiguous().t(), order, weights_TA, impl="triton"),
    }.items():
        with pytest.raises(ValueError, match=message):
            call()
