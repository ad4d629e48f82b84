"""FP8 arithmetic of the CPU reference kernels against float64 NumPy and against loops over every element."""

import numpy as np
import pytest
import torch

from bridge.vllm_plugin.cpu_fixes import route_by_sigmoid
from bridge.vllm_plugin.reference import PER_TENSOR, PER_TOKEN, dequantize, quantize, quantize_activations


def e4m3_values() -> np.ndarray:
    """Every finite value of e4m3, by its definition: 1.m * 2**(e - 7), or 0.m * 2**-6."""
    values = []
    for code in range(256):
        sign, exponent, mantissa = -1.0 if code & 0x80 else 1.0, code >> 3 & 15, code & 7
        if exponent == 15 and mantissa == 7:
            continue  # NaN
        size = (1 + mantissa / 8) * 2.0 ** (exponent - 7) if exponent else mantissa / 8 * 2.0**-6
        values.append(sign * size)
    return np.unique(values)


def nearest(x: np.ndarray) -> np.ndarray:
    """Round each number to the nearest e4m3 value; ties go to the even code."""
    values = e4m3_values()
    distance = np.abs(x[..., None] - values)
    best = distance.min(-1)
    chosen = np.empty_like(x)
    for at in np.ndindex(x.shape):
        ties = values[distance[at] == best[at]]
        codes = torch.tensor(ties).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        chosen[at] = ties[np.argmin(codes % 2)] if len(ties) > 1 else ties[0]
    return chosen


def numpy_quantised(x_TK: np.ndarray, group: int) -> np.ndarray:
    """Scale every group by absmax / 448 in float32, round, scale back."""
    out = np.empty_like(x_TK)
    rows, cols = x_TK.shape
    step = {PER_TOKEN: cols, PER_TENSOR: cols}.get(group, group)
    for row in range(rows):
        for start in range(0, cols, step):
            part = (slice(None) if group == PER_TENSOR else row, slice(start, start + step))
            scale = max(np.float32(np.abs(x_TK[part]).max() / np.float32(448)), np.float32(1e-12))
            here = (row, slice(start, start + step))
            out[here] = nearest((x_TK[here] / scale).astype(np.float64)).astype(np.float32) * scale
    return out


@pytest.mark.parametrize("group", [PER_TOKEN, PER_TENSOR, 4])
def test_activations_are_rounded_to_the_nearest_e4m3_value(group: int):
    x_TK = np.random.default_rng(0).normal(size=(5, 11)).astype(np.float32)  # the last group of 4 has 3 members
    x_TK[2] = 0.0
    x_TK[4, 3] = 1e4
    got = quantize_activations(torch.tensor(x_TK), group).numpy()
    np.testing.assert_array_equal(got, numpy_quantised(x_TK, group))


def test_a_static_scale_clips():
    codes, scale = quantize(torch.tensor([[1.0, 2000.0, -3.0]]), PER_TENSOR, torch.tensor([2.0]))
    assert codes.float().tolist() == [[0.5, 448.0, -1.5]]
    assert scale.tolist() == [2.0]


@pytest.mark.parametrize("shape", [(257, 130), (5, 3), (128, 256)])
def test_block_scales_multiply_their_block(shape: tuple[int, int]):
    rng = np.random.default_rng(1)
    w_NK = torch.tensor(rng.normal(size=shape)).to(torch.float8_e4m3fn)
    scale = 2.0 ** rng.integers(-5, 5, (-(-shape[0] // 128), -(-shape[1] // 128)))
    expected = w_NK.double().numpy()
    for (i, j), one in np.ndenumerate(scale):
        expected[i * 128 : (i + 1) * 128, j * 128 : (j + 1) * 128] *= one
    got = dequantize(w_NK, torch.tensor(scale, dtype=torch.float32), (128, 128))
    np.testing.assert_array_equal(got.numpy(), expected)


@pytest.mark.parametrize("scale_shape", [(7, 1), (7,), (1,), ()])
def test_scales_of_rows_and_of_a_matrix(scale_shape: tuple[int, ...]):
    w_NK = torch.arange(-10, 11).reshape(7, 3).to(torch.float8_e4m3fn)
    scale = torch.arange(1.0, 1.0 + np.prod(scale_shape, dtype=int)).reshape(scale_shape)
    per_row = scale.reshape(-1).double().numpy() if scale.numel() > 1 else np.ones(7)
    np.testing.assert_array_equal(dequantize(w_NK, scale, None).numpy(), w_NK.double().numpy() * per_row[:, None])


def test_sigmoid_routing_chooses_with_the_bias_and_weighs_without():
    logits_TE = np.array([[0.0, 1.0, 2.0, -1.0], [3.0, -2.0, 0.5, 0.4]])
    bias_E = np.array([0.0, 0.0, -0.5, 0.9])
    weights, experts = route_by_sigmoid(
        torch.tensor(logits_TE), torch.tensor(bias_E), top_k=2, renormalize=True, scaling=2.5
    )
    score = 1 / (1 + np.exp(-logits_TE))
    expected = np.argsort(-(score + bias_E), axis=1)[:, :2]
    assert experts.tolist() == expected.tolist() == [[3, 1], [3, 0]]
    chosen = np.take_along_axis(score, expected, 1)
    np.testing.assert_allclose(weights.numpy(), 2.5 * chosen / chosen.sum(1, keepdims=True), rtol=1e-6)
