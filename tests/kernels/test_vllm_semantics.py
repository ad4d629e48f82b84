"""Our routing and our layer equal vLLM's own where vLLM runs on a CPU: its router for CPU, and its fused layer."""

import warnings

import pytest
import torch
from torch.nn.functional import silu

from conftest import DEVICE
from kernels.align.op import align
from kernels.gate.op import gate
from kernels.grouped_matmul.op import grouped_matmul
from kernels.permute.op import permute, unpermute
from kernels.router import Router

with warnings.catch_warnings(action="ignore"):  # vLLM warns while it is imported
    vllm_ops = pytest.importorskip("vllm._custom_ops")
    cpu_router = pytest.importorskip("vllm.model_executor.layers.fused_moe.router.cpu_router")

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="compares with vLLM for CPU")
ROUTERS = {
    "softmax": (Router(num_active=5), False),
    "softmax before": (Router(num_active=3, renormalize=False), False),
    "softmax grouped": (Router(num_active=4, num_groups=4, num_kept_groups=2), False),
    "sigmoid grouped with a bias": (
        Router(num_active=6, scoring="sigmoid", num_groups=8, num_kept_groups=3, scale=2.5),
        True,
    ),
    "sigmoid with a bias": (Router(num_active=4, scoring="sigmoid", num_groups=1, num_kept_groups=1), True),
}


@pytest.mark.parametrize("name", ROUTERS)
def test_gate_chooses_as_vllm(name, rng):
    T, E = 11, 64
    router, has_bias = ROUTERS[name]
    logits_TE = torch.randn(T, E, generator=rng)
    bias_E = torch.randn(E, generator=rng) * 0.1 if has_bias else None
    is_grouped = router.num_groups > 1 or has_bias
    theirs = cpu_router.select_experts(
        hidden_states=torch.zeros(T, 1),
        router_logits=logits_TE,
        top_k=router.num_active,
        use_grouped_topk=is_grouped,
        renormalize=router.renormalize,
        topk_group=router.num_kept_groups,
        num_expert_group=router.num_groups,
        scoring_func=router.scoring,
        routed_scaling_factor=router.scale,
        e_score_correction_bias=bias_E,
    )
    for impl in ("ref", "triton"):
        weights_TA, ids_TA = gate(logits_TE, router, bias_E, impl=impl)
        assert torch.equal(dense(*theirs, E) != 0, dense(weights_TA, ids_TA, E) != 0)  # theirs are in no order
        torch.testing.assert_close(dense(weights_TA, ids_TA, E), dense(*theirs, E), rtol=3e-6, atol=0)


def dense(weights_TA: torch.Tensor, ids_TA: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Return the weight of every expert, 0 where it was not chosen."""
    return torch.zeros(len(ids_TA), num_experts).scatter_(1, ids_TA.long(), weights_TA)


def test_the_layer_equals_vllm_s_fused_layer(rng):
    T, E, D, F = 7, 4, 64, 32
    router = Router(num_active=2)
    x_TD = torch.randn(T, D, generator=rng).bfloat16()
    up_EFD = (torch.randn(E, 2 * F, D, generator=rng) / D**0.5).bfloat16()
    down_EDF = (torch.randn(E, D, F, generator=rng) / F**0.5).bfloat16()
    weights_TA, ids_TA = gate(torch.randn(T, E, generator=rng), router, impl="triton")

    theirs = torch.empty_like(x_TD)
    packed = [vllm_ops.cpu_prepack_moe_weight(w, "vec") for w in (up_EFD, down_EDF)]
    vllm_ops.cpu_fused_moe(theirs, x_TD, *packed, None, None, weights_TA, ids_TA, "silu", "vec")

    order = align(ids_TA, E, 16, impl="triton")
    x_MD, _ = permute(x_TD, order, impl="triton")
    gate_MF, up_MF = grouped_matmul(x_MD, up_EFD, order, impl="triton").float().chunk(2, 1)
    y_MF = (silu(gate_MF) * up_MF).bfloat16().nan_to_num()
    out_TD = unpermute(grouped_matmul(y_MF, down_EDF, order, impl="triton"), order, weights_TA, impl="triton")
    # each rounds to bfloat16 three or four times on the way; results are about 1
    torch.testing.assert_close(out_TD.float(), theirs.float(), rtol=2**-7, atol=2**-7)
