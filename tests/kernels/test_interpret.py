"""The corrected interpreter against closed forms: every code of bfloat16 and FP8, ties, saturation, products, NaN."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from conftest import DEVICE
from kernels import interpret

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="there is no interpreter on a GPU")
N = 4096
FP8 = {torch.float8_e4m3fn: (4, 3, 7), torch.float8_e5m2: (5, 2, 15)}  # exponent bits, mantissa bits, bias


@triton.jit
def cast_all(x_pointer, y_pointer, num, N: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    x = tl.load(x_pointer + i, mask=i < num)
    tl.store(y_pointer + i, x.to(y_pointer.dtype.element_ty), mask=i < num)


def cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    y = torch.zeros(x.shape, dtype=dtype)
    cast_all[(triton.cdiv(x.numel(), N),)](x, y, x.numel(), N)
    return y


def codes(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(256, dtype=torch.uint8).view(dtype)


def decoded(dtype: torch.dtype) -> np.ndarray:
    """Return the value of each of the 256 codes, from the definition of the format."""
    num_exponent, num_mantissa, bias = FP8[dtype]
    code = np.arange(256)
    mantissa, exponent = code % 2**num_mantissa, code // 2**num_mantissa % 2**num_exponent
    scaled = np.where(
        exponent == 0, mantissa * 2.0 ** (1 - bias), (2**num_mantissa + mantissa) * 2.0 ** (exponent - bias)
    )
    value = scaled / 2**num_mantissa * np.where(code < 128, 1, -1)
    if dtype == torch.float8_e4m3fn:
        value[code % 128 == 127] = np.nan
    else:
        value[(exponent == 31) & (mantissa > 0)] = np.nan
        value[(exponent == 31) & (mantissa == 0)] = np.where(
            code[(exponent == 31) & (mantissa == 0)] < 128, np.inf, -np.inf
        )
    return value


@pytest.mark.parametrize("dtype", FP8)
def test_every_fp8_code_reads_as_its_value_and_comes_back(dtype):
    values = cast(codes(dtype), torch.float32)
    np.testing.assert_array_equal(values.numpy(), decoded(dtype).astype(np.float32))
    back = cast(values, dtype).view(torch.uint8)
    finite = values.isfinite()
    assert torch.equal(back[finite], torch.arange(256, dtype=torch.uint8)[finite])
    assert cast(values, dtype).float().isnan().equal(values.isnan())


@pytest.mark.parametrize("dtype", FP8)
def test_float32_to_fp8_takes_the_nearest_code_ties_to_even_and_saturates(dtype):
    table = decoded(dtype)[:128]
    finite = np.flatnonzero(np.isfinite(table))
    values, limit = table[finite], table[finite].max()
    middle = ((values[1:] + values[:-1]) / 2).astype(np.float32)
    noise = np.random.default_rng(0).lognormal(0, 4, 4001).astype(np.float32)
    around = [np.nextafter(middle, np.float32(0)), middle, np.nextafter(middle, np.float32(np.inf))]
    x = np.concatenate([*around, noise, np.float32([limit * 1.01, 1e30, np.inf])])
    distance = np.abs(np.minimum(x.astype(np.float64), limit)[:, None] - values[None, :])
    nearest = distance == distance.min(1, keepdims=True)
    is_even = (np.arange(len(values)) % 2 == 0)[None, :]
    expected = np.where(nearest.sum(1) > 1, (nearest & is_even).argmax(1), nearest.argmax(1))
    for sign, bit in ((1, 0), (-1, 128)):
        found = cast(torch.from_numpy(sign * x), dtype).view(torch.uint8).numpy()
        np.testing.assert_array_equal(found, expected + bit)


def test_every_bfloat16_code_reads_as_its_value_and_comes_back():
    code = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    values = cast(code.view(torch.bfloat16), torch.float32)
    assert torch.equal(values.view(torch.int32), code.to(torch.int32) << 16)
    back = cast(values, torch.bfloat16)
    is_number = ~values.isnan()
    assert torch.equal(back.view(torch.int16)[is_number], code[is_number])
    assert back.isnan().equal(values.isnan())


def test_float32_to_bfloat16_rounds_to_nearest_even():
    high = np.arange(65536, dtype=np.uint32) << 16
    bits = np.concatenate([high | low for low in (0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]).astype(np.uint32)
    bits = bits[np.isfinite(bits.view(np.float32))]
    expected = (bits.astype(np.uint64) + 0x7FFF + (bits >> 16 & 1)) >> 16  # carries into the exponent, up to infinity
    found = cast(torch.from_numpy(bits.view(np.float32)), torch.bfloat16).view(torch.int16).numpy().astype(np.uint16)
    np.testing.assert_array_equal(found, expected.astype(np.uint16))


def test_integers_become_bfloat16_and_back_by_truncation():
    x = torch.arange(-300, 301, dtype=torch.int32)
    assert torch.equal(cast(x, torch.bfloat16), x.float().bfloat16())
    eighths = (x.float() / 8).bfloat16()
    assert torch.equal(cast(eighths, torch.int32), eighths.float().trunc().to(torch.int32))


@triton.jit
def arithmetic(x_pointer, y_pointer, out_pointer, less_pointer, N: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(x_pointer + i)
    y = tl.load(y_pointer + i)
    tl.store(out_pointer + i, x + y)
    tl.store(out_pointer + N + i, x - y)
    tl.store(out_pointer + 2 * N + i, x * y)
    tl.store(out_pointer + 3 * N + i, tl.maximum(x, y))
    tl.store(out_pointer + 4 * N + i, tl.fma(x, y, y))
    tl.store(out_pointer + 5 * N + i, -x)
    tl.store(out_pointer + 6 * N + i, tl.abs(x))
    tl.store(out_pointer + 7 * N + i, tl.where(x < y, x, y))
    tl.store(less_pointer + i, (x < y).to(tl.int32))


def test_bfloat16_arithmetic_equals_torch(rng):
    x, y = (torch.randn(64, generator=rng).bfloat16() for _ in range(2))
    out, less = torch.zeros(8, 64, dtype=torch.bfloat16), torch.zeros(64, dtype=torch.int32)
    arithmetic[(1,)](x, y, out, less, 64)
    fused = (x.double() * y.double() + y.double()).float().bfloat16()  # the float32 in between is exact to 2^-24
    expected = [x + y, x - y, x * y, torch.maximum(x, y), fused, -x, x.abs(), torch.minimum(x, y)]
    assert torch.equal(out, torch.stack(expected))
    assert torch.equal(less.bool(), x < y)


@triton.jit
def multiply(a_pointer, b_pointer, out_pointer, M: tl.constexpr, K: tl.constexpr, N: tl.constexpr):
    m, k, n = tl.arange(0, M), tl.arange(0, K), tl.arange(0, N)
    a = tl.load(a_pointer + m[:, None] * K + k[None, :])
    b = tl.load(b_pointer + k[:, None] * N + n[None, :])
    tl.store(out_pointer + m[:, None] * N + n[None, :], tl.dot(a, b))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, *FP8])
def test_dot_of_narrow_types_equals_the_float64_product(dtype, rng):
    a, b = torch.randn(16, 32, generator=rng).to(dtype), torch.randn(32, 64, generator=rng).to(dtype)
    out = torch.zeros(16, 64)
    multiply[(1,)](a, b, out, 16, 32, 64)
    # products are exact in float32; 32 of them are added
    torch.testing.assert_close(out.double(), a.double() @ b.double(), rtol=0, atol=32 * 2**-24 * 16)


@triton.jit
def extremes(x_pointer, out_pointer, N: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(x_pointer + i)
    tl.store(out_pointer + i, tl.maximum(x, 1.0))
    tl.store(out_pointer + N + i, tl.minimum(x, 1.0))
    tl.store(out_pointer + 2 * N + i, tl.maximum(x, 1.0, propagate_nan=tl.PropagateNan.ALL))
    tl.store(out_pointer + 3 * N + i, tl.clamp(x, -2.0, 2.0))


def test_minimum_and_maximum_drop_a_nan_unless_told_to_keep_it():
    x = torch.tensor([float("nan"), 3.0, -3.0, 0.5])
    out = torch.zeros(4, 4)
    extremes[(1,)](x, out, 4)
    nan = float("nan")
    expected = torch.tensor([[1.0, 3.0, 1.0, 1.0], [1.0, 1.0, -3.0, 0.5], [nan, 3.0, 1.0, 1.0], [-2.0, 2.0, -2.0, 0.5]])
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)


@triton.jit
def add_up_codes(x_pointer, out_pointer, N: tl.constexpr):
    tl.store(out_pointer, tl.sum(tl.load(x_pointer + tl.arange(0, N)), 0))


@triton.jit
def claim(x_pointer):
    tl.device_assert(tl.load(x_pointer) > 0, "must be positive")


def test_what_cannot_be_right_is_loud():
    with pytest.raises(triton.runtime.errors.InterpreterError, match=r"cast to .* first"):
        add_up_codes[(1,)](torch.zeros(16).to(torch.float8_e4m3fn), torch.zeros(1), 16)
    claim[(1,)](torch.ones(1, dtype=torch.int32))
    with pytest.raises(triton.runtime.errors.InterpreterError, match="must be positive"):
        claim[(1,)](torch.zeros(1, dtype=torch.int32))


def test_install_refuses_an_unknown_triton_and_compiled_kernels(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(triton, "__version__", "9.9.9")
        with pytest.raises(NotImplementedError, match=r"triton 9\.9\.9.*3\.6\.0"):
            interpret.install()
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="TRITON_INTERPRET"):
        patch.setattr(triton.knobs.runtime, "interpret", False)
        interpret.install()


def test_self_test_refuses_the_stock_interpreter(monkeypatch):
    monkeypatch.setattr(interpret.Builder, "create_dot", interpret.stock_dot)
    with pytest.raises(RuntimeError, match="fails its own test"):
        interpret.self_test()
