"""Expert routing of vLLM by `gate` and `align`.

vLLM makes one router object for each MoE layer and asks it for weights and ids; the classes named in ROUTERS answer by
`gate`. moe_align_block_size keeps its contract, but the order inside an expert is stable and the same every time.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import vllm.envs as envs
from vllm.forward_context import get_forward_context, is_forward_context_available

from kernels.align.cases import MAX_EXPERTS as MAX_ALIGNED
from kernels.align.op import align
from kernels.checks import Impl
from kernels.gate.cases import MAX_ACTIVE, MAX_EXPERTS
from kernels.gate.op import LOGIT_TYPES, gate
from kernels.router import Router
from kernels.vllm_plugin import places

ROOM = "vllm.model_executor.layers.fused_moe"
ROUTERS = {
    "cpu_router": "CPURouter",
    "fused_topk_router": "FusedTopKRouter",
    "fused_topk_bias_router": "FusedTopKBiasRouter",
    "grouped_topk_router": "GroupedTopKRouter",
}


@dataclass(frozen=True)
class Routing:
    """What a router object computes, in the words of `gate`."""

    router: Router
    bias_E: torch.Tensor | None
    masks_padding: bool


def install(impl: Impl) -> None:
    """Replace the routing of every router class and the alignment; a second call does nothing."""
    for file, name in ROUTERS.items():
        router = getattr(importlib.import_module(f"{ROOM}.router.{file}"), name)
        if not places.is_replaced(router, "_compute_routing"):
            places.replace(router, "_compute_routing", routed(router._compute_routing, impl))
    owner = importlib.import_module(f"{ROOM}.moe_align_block_size")
    if not places.is_replaced(owner, "moe_align_block_size"):
        places.replace(owner, "moe_align_block_size", aligned(owner.moe_align_block_size, impl))


def describe(router: Any, num_experts: int) -> Routing | str:
    """Read a router object of vLLM 0.32; return the reason where `gate` cannot do what it does."""
    kind = type(router).__name__
    is_grouped = kind == "GroupedTopKRouter" or getattr(router, "use_grouped_topk", False)
    groups, kept = (router.num_expert_group, router.topk_group) if is_grouped else (1, 1)
    for name in ("custom_routing_function", "hash_indices_table", "_hash_indices_table", "bias_vl"):
        if getattr(router, name, None) is not None:
            return f"{kind} has {name.lstrip('_')}"
    if router.scoring_func not in ("softmax", "sigmoid"):
        return f"scoring {router.scoring_func}"
    if getattr(router, "num_fused_shared_experts", 0):
        return "shared experts are fused into routing"
    if num_experts > MAX_EXPERTS or router.top_k > MAX_ACTIVE:
        return f"{num_experts} experts, {router.top_k} active"
    if groups > 1 and (groups & (groups - 1) or num_experts & (num_experts - 1) or groups >= num_experts):
        return f"{groups} groups of {num_experts} experts are not fewer and powers of two"
    # The plain softmax of a CPU knows neither bias nor scale, and no rows that pad a graph.
    is_plain = kind == "CPURouter" and not is_grouped
    bias_E = None if is_plain else getattr(router, "e_score_correction_bias", None)
    ours = Router(
        num_active=router.top_k,
        scoring=router.scoring_func,
        num_groups=groups,
        num_kept_groups=kept,
        renormalize=bool(router.renormalize),
        scale=1.0 if is_plain else float(getattr(router, "routed_scaling_factor", 1.0)),
    )
    masks = kind != "CPURouter" and getattr(router, "skip_padding", kind != "GroupedTopKRouter")
    return Routing(ours, None if bias_E is None else bias_E.float(), masks)


def padding_of(num_tokens: int) -> torch.Tensor | None:
    """Return which rows only pad a recorded graph, or None."""
    if not envs.VLLM_MOE_SKIP_PADDING or not is_forward_context_available():
        return None
    is_padding = get_forward_context().is_padding
    return None if is_padding is None else is_padding[:num_tokens]


def routed(stock: Callable, impl: Impl) -> Callable:
    """Return the method that answers by `gate`, or by `stock` where `gate` cannot."""

    def _compute_routing(
        self: Any,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        indices_type: torch.dtype | None,
        *,
        input_ids: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        routing = describe(self, router_logits.shape[1])
        if router_logits.dtype not in LOGIT_TYPES or router_logits.stride(1) != 1:
            routing = f"logits in {router_logits.dtype} with strides {router_logits.stride()}"
        if isinstance(routing, str):
            places.fall_back("gate", routing)
            return stock(self, hidden_states, router_logits, indices_type, input_ids=input_ids)
        weights_TA, ids_TA = gate(router_logits, routing.router, routing.bias_E, impl=impl)
        places.calls["gate"] += 1
        is_padding_T = padding_of(len(ids_TA)) if routing.masks_padding else None
        if is_padding_T is not None:
            weights_TA = weights_TA.masked_fill(is_padding_T[:, None], 0.0)
            ids_TA = ids_TA.masked_fill(is_padding_T[:, None], -1)
        return weights_TA, ids_TA

    return _compute_routing


def aligned(stock: Callable, impl: Impl) -> Callable:
    """Return moe_align_block_size by `align`, or by `stock` where `align` cannot."""

    def moe_align_block_size(
        topk_ids: torch.Tensor,
        block_size: int,
        num_experts: int,
        expert_map: torch.Tensor | None = None,
        pad_sorted_ids: bool = False,
        ignore_invalid_experts: bool = False,
        *,
        return_scatter_idx: bool = False,
    ) -> tuple[torch.Tensor, ...]:
        is_odd = topk_ids.dtype not in (torch.int32, torch.int64) or not topk_ids.is_contiguous()
        if block_size & (block_size - 1) or num_experts > MAX_ALIGNED or return_scatter_idx or is_odd:
            ids = f"{topk_ids.dtype}{'' if topk_ids.is_contiguous() else ' not contiguous'}"
            what = f"ids {ids}, block {block_size}, {num_experts} experts, scatter_idx={return_scatter_idx}"
            places.fall_back("align", what)
            arguments = (topk_ids, block_size, num_experts, expert_map, pad_sorted_ids, ignore_invalid_experts)
            return stock(*arguments, return_scatter_idx=return_scatter_idx)
        has_map = expert_map is not None and ignore_invalid_experts
        order = align(
            topk_ids,
            num_experts,
            block_size,
            expert_map_E=expert_map if has_map else None,
            num_local_experts=num_experts if has_map else None,  # how many are local, only the device knows
            impl=impl,
        )
        places.calls["align"] += 1
        experts_J = order.expert_J
        if expert_map is not None and not ignore_invalid_experts:
            # Blocks of experts elsewhere stay in the order, marked -1: the matmul writes zeros for their rows.
            experts_J = torch.where(experts_J >= 0, expert_map[experts_J.clamp(min=0)], -1)
        return order.routed_M, experts_J, order.num_rows_1

    return moe_align_block_size
