"""A whole mixture-of-experts layer from these kernels alone equals the float64 layer; the FP8 one stays near."""

import pytest
import torch
from test_grouped_matmul import quantise_weights
from torch.nn.functional import silu

from kernels.align.op import align
from kernels.gate.op import gate
from kernels.gate_align.op import gate_align
from kernels.grouped_matmul.op import grouped_matmul
from kernels.permute.op import permute, unpermute
from kernels.permute.ref import quantise_ref
from kernels.router import Router

T, E, D, F = 13, 8, 128, 128
ROUTERS = {
    "softmax": (Router(num_active=2), False),
    "grouped": (Router(num_active=3, scoring="sigmoid", num_groups=4, num_kept_groups=2, scale=2.5), True),
}


def layer_inputs(rng: torch.Generator, dtype: torch.dtype, device: torch.device):
    x_TD = torch.randn(T, D, generator=rng)
    logits_TE, bias_E = torch.randn(T, E, generator=rng), torch.randn(E, generator=rng) * 0.1
    up_EFD = torch.randn(E, 2 * F, D, generator=rng) / D**0.5
    down_EDF = torch.randn(E, D, F, generator=rng) / F**0.5
    return [t.to(dtype).to(device) for t in (x_TD, up_EFD, down_EDF)], logits_TE.to(device), bias_E.to(device)


def plain_layer(x_TD, up_EFD, down_EDF, weights_TA, ids_TA) -> torch.Tensor:
    """One token and one expert at a time, in float64."""
    out_TD = torch.zeros_like(x_TD, dtype=torch.float64)
    for t, ids in enumerate(ids_TA.tolist()):
        for weight, e in zip(weights_TA[t].double(), ids, strict=True):
            gate_F, up_F = (up_EFD[e].double() @ x_TD[t].double()).chunk(2)
            out_TD[t] += weight * (down_EDF[e].double() @ (silu(gate_F) * up_F))
    return out_TD


def act(y_MF: torch.Tensor) -> torch.Tensor:
    gate_MF, up_MF = y_MF.float().chunk(2, 1)
    return (silu(gate_MF) * up_MF).to(y_MF.dtype)


@pytest.mark.parametrize("is_one_launch", [True, False], ids=["gate_align", "gate, align"])
@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_layer_equals_float64(dtype, router, is_one_launch, rng, device, canaries):
    (x_TD, up_EFD, down_EDF), logits_TE, bias_E = layer_inputs(rng, dtype, device)
    router, has_bias = ROUTERS[router]
    bias_E = bias_E if has_bias else None
    if is_one_launch:
        weights_TA, ids_TA, order = gate_align(logits_TE, router, 16, bias_E=bias_E, impl="triton")
    else:
        weights_TA, ids_TA = gate(logits_TE, router, bias_E, impl="triton")
        order = align(ids_TA, E, 16, impl="triton")
    x_MD, _ = permute(x_TD, order, impl="triton")
    y_MF = act(grouped_matmul(x_MD, up_EFD, order, dtype=dtype, impl="triton"))
    z_MD = grouped_matmul(y_MF.nan_to_num(), down_EDF, order, dtype=dtype, impl="triton")
    out_TD = unpermute(z_MD, order, weights_TA, impl="triton")
    expected = plain_layer(x_TD, up_EFD, down_EDF, weights_TA, ids_TA)
    # bfloat16 is rounded five times on the way (two products, activation, rows, sum), float32 adds 128 terms twice
    tolerance = 5 * 2**-9 * 2 if dtype == torch.bfloat16 else 1e-5
    assert ((out_TD.double() - expected).abs() <= tolerance * expected.abs().max()).all()
    reference = gate(logits_TE, router, bias_E, impl="ref")
    assert torch.equal(ids_TA, reference[1])


def test_a_layer_split_over_two_devices_adds_up_to_the_whole(rng, device):
    (x_TD, up_EFD, down_EDF), logits_TE, _ = layer_inputs(rng, torch.float32, device)
    whole = torch.zeros(T, D, dtype=torch.float64, device=device)
    for part in (slice(0, 5), slice(5, E)):
        expert_map_E = torch.full((E,), -1, dtype=torch.int32, device=device)
        num_local = len(range(E)[part])
        expert_map_E[part] = torch.arange(num_local, dtype=torch.int32, device=device)
        maps = {"expert_map_E": expert_map_E, "num_local_experts": num_local}
        weights_TA, ids_TA, order = gate_align(logits_TE, Router(num_active=3), 16, **maps, impl="triton")
        x_MD, _ = permute(x_TD, order, impl="triton")
        y_MF = act(grouped_matmul(x_MD, up_EFD[part], order, dtype=torch.float32, impl="triton")).nan_to_num()
        z_MD = grouped_matmul(y_MF, down_EDF[part], order, dtype=torch.float32, impl="triton")
        whole += unpermute(z_MD, order, weights_TA, impl="triton")
    expected = plain_layer(x_TD, up_EFD, down_EDF, weights_TA, ids_TA)
    torch.testing.assert_close(whole, expected, rtol=0, atol=1e-5)


def test_the_fp8_layer_stays_near(rng, device):
    (x_TD, up_EFD, down_EDF), logits_TE, _ = layer_inputs(rng, torch.bfloat16, device)
    weights_TA, ids_TA, order = gate_align(logits_TE, Router(num_active=2), 16, impl="triton")
    up, up_scale = (t.to(device) for t in quantise_weights(up_EFD.float().cpu()))
    down, down_scale = (t.to(device) for t in quantise_weights(down_EDF.float().cpu()))
    x_MD, x_scale = permute(x_TD, order, quantise=True, impl="triton")
    y_MF = act(grouped_matmul(x_MD, up, order, x_scale_RG=x_scale, w_scale_EFG=up_scale, impl="triton"))
    codes, scale = quantise_ref(y_MF.float().nan_to_num())
    z_MD = grouped_matmul(codes, down, order, x_scale_RG=scale, w_scale_EFG=down_scale, impl="triton")
    out_TD = unpermute(z_MD, order, weights_TA, impl="triton").double()
    expected = plain_layer(x_TD, up_EFD, down_EDF, weights_TA, ids_TA)
    similarity = 2 * (out_TD * expected).sum() / (out_TD.square() + expected.square()).sum()
    # four factors rounded to 3 bits of mantissa: relative noise 2^-4 / sqrt(3) each, so 1 - similarity is about 4 * 0.0013 / 2
    assert 1 - similarity < 4e-3
