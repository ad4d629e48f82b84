"""bridge/fp8.py bit for bit against float64 and a table of all codes."""

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from references import MIDPOINTS, reference_codes, reference_quantise, reference_scale

from bridge.fp8 import BLOCK, MIN_SCALE, dequantise, quantise, scale_fault

BF16 = np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16)
FINITE = BF16[np.isfinite(BF16.astype(np.float32))]
quantise_jit = jax.jit(quantise, static_argnums=1)


def quantised(w_NK: np.ndarray, block: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    codes, scale = quantise_jit(w_NK, block)
    return np.asarray(codes).view(np.uint8), np.asarray(scale)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32])
@pytest.mark.parametrize("amax", [3.3895e38, 1.0, 0.875, 0.877, 448.0, 450.0, 3e-5, 1.2e-12, 1e-30, 1e-40])
def test_every_bfloat16_value_rounds_as_in_float64(amax: float, dtype: type):
    amax_in_bf16 = np.float32(amax).astype(ml_dtypes.bfloat16)
    values = FINITE[np.abs(FINITE.astype(np.float64)) <= float(amax_in_bf16)]
    rows = -(-len(values) // 127)
    w_NK = np.full((rows, 128), amax_in_bf16)  # one column holds each block's largest element
    w_NK[:, :127].flat[: len(values)] = values
    codes, scale = quantised(w_NK.astype(dtype), (1, 128))
    assert (scale == reference_scale(float(amax_in_bf16))).all()
    np.testing.assert_array_equal(codes, reference_codes(w_NK.astype(np.float64) / scale.astype(np.float64)))


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32])
def test_every_block_maximum_gets_the_reference_scale(dtype: type):
    w_N1 = FINITE.astype(dtype).reshape(-1, 1)
    _, scale = quantised(w_N1, (1, 1))
    expected = reference_scale(np.abs(FINITE.astype(np.float64)))
    np.testing.assert_array_equal(scale[:, 0].astype(np.float64), expected)
    assert scale.min() == MIN_SCALE > 2.0**-60


@pytest.mark.parametrize("ulps", [-1, 0, 1])
@pytest.mark.parametrize("scale_exponent", [-40, -9, 0, 5])
def test_float32_beside_every_midpoint_rounds_as_in_float64(scale_exponent: int, ulps: int):
    ties = np.float32(MIDPOINTS * 2.0**scale_exponent)
    beside = (ties.view(np.int32) + ulps).view(np.float32)
    w_1K = np.concatenate([beside, -beside, [np.float32(448.0 * 2.0**scale_exponent)]])[None]
    codes, scale = quantised(w_1K, (1, w_1K.size))
    assert scale[0, 0] == 2.0**scale_exponent
    np.testing.assert_array_equal(codes, reference_codes(w_1K.astype(np.float64) / 2.0**scale_exponent))


SHAPES = [(1, 1), (127, 130), (256, 384), (3, 257), (129, 1), (300, 200)]


@settings(max_examples=12)
@given(
    shape=st.sampled_from(SHAPES),
    block=st.sampled_from([(BLOCK, BLOCK), (1, 0)]),
    spread=st.floats(-60, 60),
    seed=st.integers(0, 2**31),
    is_bf16=st.booleans(),
)
def test_matrices_of_any_shape_and_range_match_the_loops(shape, block, spread, seed, is_bf16):
    rng = np.random.default_rng(seed)
    w_NK = (rng.normal(size=shape) * 2.0 ** rng.uniform(-abs(spread), spread, shape)).astype(np.float32)
    w_NK[rng.random(shape) < 0.1] = 0.0
    w_NK = w_NK.astype(ml_dtypes.bfloat16) if is_bf16 else w_NK
    block = (block[0], block[1] or shape[1])
    codes, scale = quantised(w_NK, block)
    expected_codes, expected_scale = reference_quantise(w_NK, *block)
    np.testing.assert_array_equal(scale, expected_scale)
    np.testing.assert_array_equal(codes, expected_codes)


def test_zero_blocks_and_dead_blocks_have_a_scale_and_become_zero():
    w_NK = np.zeros((130, 260), np.float32)
    w_NK[:128, 128:256] = 1e-23
    w_NK[129, 259] = -3.0
    codes, scale = quantised(w_NK, (BLOCK, BLOCK))
    expected = np.full((2, 3), MIN_SCALE)
    expected[1, 2] = 2.0**-7
    np.testing.assert_array_equal(scale, expected)
    value = dequantise(codes.view(ml_dtypes.float8_e4m3fn), scale)
    assert value[129, 259] == -3.0
    assert np.count_nonzero(value) == 1


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32])
def test_the_scale_of_a_block_that_is_not_finite_is_nan_and_no_other(bad: float, dtype: type):
    w_NK = np.ones((130, 257), dtype)
    w_NK[128, 256] = bad
    _, scale = quantised(w_NK, (BLOCK, BLOCK))
    assert np.isnan(scale).tolist() == [[False] * 3, [False, False, True]]


def test_dequantise_undoes_quantise_up_to_half_a_step():
    w_NK = np.random.default_rng(1).normal(size=(200, 300)).astype(np.float32)
    for block in ((BLOCK, BLOCK), (1, 300)):
        codes, scale = quantised(w_NK, block)
        error = np.abs(dequantise(codes.view(ml_dtypes.float8_e4m3fn), scale) - w_NK)
        # Half of the last of 3 mantissa bits, or half of the smallest step of a block.
        wide = np.repeat(np.repeat(scale, block[0], 0)[:200], block[1], 1)[:, :300]
        assert (error <= np.maximum(np.abs(w_NK) * 2.0**-4, wide * 2.0**-10)).all()
        assert error.max() > 0


def test_scales_that_fit_no_layout_are_named():
    assert scale_fault((200, 300), (2, 3)) is None
    assert scale_fault((200, 300), (200, 1)) is None
    assert "(3, 2)" in (scale_fault((200, 300), (3, 2)) or "")
