"""TEST EQUIPMENT, active on CPU only: three repairs of vLLM 0.32.0 without which a CPU cannot stand in for a GPU."""

from weakref import WeakKeyDictionary

import torch
from torch import nn
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod


def install() -> None:
    """Wrap the methods."""
    _repack_experts_at_every_load()
    _let_tied_heads_follow()
    _route_by_sigmoid()


def _repack_experts_at_every_load() -> None:
    """Unquantised experts are packed for the CPU kernel at the first load only; a reload leaves them unpacked."""
    set_up = UnquantizedFusedMoEMethod._setup_kernel

    def set_up_and_repack(self, layer, w13, w2):
        is_reload = self.moe_kernel is not None
        set_up(self, layer, w13, w2)
        if is_reload:
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    UnquantizedFusedMoEMethod._setup_kernel = set_up_and_repack


def _let_tied_heads_follow() -> None:
    """A tied head is packed for the CPU kernel at the first load; a reload packs the embedding only, the head stays old."""
    tie, pack = UnquantizedEmbeddingMethod.tie_weights, UnquantizedEmbeddingMethod.process_weights_after_loading
    embedding_of: WeakKeyDictionary[nn.Module, nn.Module] = WeakKeyDictionary()

    def tie_and_remember(self, layer, embed_tokens):
        embedding_of[layer] = embed_tokens
        return tie(self, layer, embed_tokens)

    def pack_or_follow(self, layer):
        pack(self, layer)
        if layer in embedding_of:
            layer.cpu_linear = lambda x, weight, bias: embedding_of[layer].cpu_linear(x, weight, bias)

    UnquantizedEmbeddingMethod.tie_weights = tie_and_remember
    UnquantizedEmbeddingMethod.process_weights_after_loading = pack_or_follow


def _route_by_sigmoid() -> None:
    """The router of CPU experts knows softmax only; MiniMax-M2 scores by sigmoid, with a correction bias."""
    compute = CPURouter._compute_routing

    def compute_with_sigmoid(self, hidden_states, router_logits, indices_type, *, input_ids=None):
        is_plain = not self.use_grouped_topk and self.custom_routing_function is None
        if not (is_plain and self.scoring_func == "sigmoid"):
            return compute(self, hidden_states, router_logits, indices_type, input_ids=input_ids)
        return route_by_sigmoid(
            router_logits, self.e_score_correction_bias, self.top_k, self.renormalize, self.routed_scaling_factor
        )

    CPURouter._compute_routing = compute_with_sigmoid


def route_by_sigmoid(
    logits_TE: torch.Tensor, bias_E: torch.Tensor | None, top_k: int, renormalize: bool, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose experts by sigmoid + bias, weigh them by sigmoid alone.

    Returns:
        weights [T, k] float32 and experts [T, k] int32.
    """
    score_TE = logits_TE.float().sigmoid()
    biased_TE = score_TE if bias_E is None else score_TE + bias_E
    expert_TA = biased_TE.topk(top_k, -1).indices
    weight_TA = score_TE.gather(1, expert_TA)
    if renormalize:
        weight_TA = weight_TA / weight_TA.sum(-1, keepdim=True)
    return weight_TA * scaling, expert_TA.to(torch.int32)
