"""How fast a replica decodes and prefills: a roofline of its kernels, one after another, plus links and overheads.

    step(n, context) = overhead * layers
                     + max(weights read / memory, matrix FLOPs / peak)          each expert is read if any token chose it
                     + max(KV read / memory, attention FLOPs / peak)            linear in the tokens of all contexts
                     + all-to-all or all-reduce / links

Every sequence of a replica gets one token a step. Efficiencies and the overhead are the config's; nothing overlaps but
what stands inside a max. Speculative decoding is not modelled.
"""

import functools
from dataclasses import dataclass

from rl_jax.plan.cache import AttentionCost
from rl_jax.plan.kv_budget import device_bytes
from rl_jax.plan.sampler_config import ServingConfig
from rl_jax.plan.served import ServedModel


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Where the seconds of one decode step go."""

    overhead_s: float
    linear_s: float
    attention_s: float
    links_s: float

    @property
    def total_s(self) -> float:
        """All of it."""
        return self.overhead_s + self.linear_s + self.attention_s + self.links_s


class Speed:
    """The speed of one replica. Its matrices, and what they are split over, are read once."""

    def __init__(self, model: ServedModel, serving: ServingConfig):
        self._model, self._serving = model, serving
        self._cost = model.cache.decode_cost(serving.tensor, serving.kv_dtype)
        self._whole_cost = model.cache.decode_cost(1, serving.kv_dtype)
        read = [m for m in model.matrices if m.is_read]
        self._dense_bytes = sum(device_bytes(model, serving, m) for m in read if not m.is_expert)
        self._expert_bytes = sum(device_bytes(model, serving, m) for m in read if m.is_expert)
        experts = sum(m.elements * m.count for m in read if m.is_expert)
        self._expert_flops = 2 * experts * model.num_active_experts / max(model.num_experts, 1)
        self._dense_flops = 2 * sum(m.elements * m.count for m in read if not m.is_expert)
        gpu = serving.spec
        self._memory_bytes_s = gpu.memory_bytes_s * serving.memory_frac
        peak = gpu.fp8_flops_s if model.fmt.startswith("fp8") else gpu.bf16_flops_s
        self._flops_s = peak * serving.compute_frac
        self._attention_flops_s = gpu.bf16_flops_s * serving.compute_frac
        self._base_s = functools.cache(self._compute_base_s)

    @property
    def token_s(self) -> float:
        """Seconds that each token of context of the replica's sequences adds to a step."""
        cost = self._cost
        return self._attention_s(cost.bytes_per_token, cost.flops_per_token) / self._serving.data

    def base_s(self, num_running: int) -> float:
        """Return the seconds of a step of `num_running` sequences without the part that grows with their context."""
        return self._base_s(num_running)

    def step(self, num_running: int, context_tokens: float) -> StepTime:
        """Return the seconds of a step whose sequences have `context_tokens` tokens in all."""
        sequences_s = self._sequence_s * num_running
        return StepTime(
            overhead_s=self._model.num_layers * self._serving.layer_overhead_us * 1e-6,
            linear_s=self._linear_s(num_running),
            attention_s=sequences_s + self.token_s * context_tokens,
            links_s=self._links_s(num_running),
        )

    def prefill_s(self, new_tokens: int, context_tokens: float) -> float:
        """Return the seconds in which a replica, or one of its prefill servers, computes `new_tokens` after a context.

        Bound by compute: matrix FLOPs at the peak of the weights' format, attention at bf16's.
        """
        serving, cost = self._serving, self._whole_cost
        gpus = serving.prefill_gpus / serving.prefill_servers if serving.prefill_gpus else serving.num_gpus
        matrix_s = (self._dense_flops + self._expert_flops) * new_tokens / self._flops_s
        reach = context_tokens + new_tokens / 2
        attention = new_tokens * (cost.flops_per_token * reach + cost.flops_per_sequence)
        return (matrix_s + attention / self._attention_flops_s) / gpus

    def training_flops(self, tokens: float, mean_context: float) -> float:
        """Return the model FLOPs of a training step: three times the forward pass, whose tokens see half the context."""
        cost: AttentionCost = self._whole_cost
        attention = cost.flops_per_token * mean_context / 2 + cost.flops_per_sequence
        return 3 * tokens * (self._dense_flops + self._expert_flops + attention)

    def _compute_base_s(self, num_running: int) -> float:
        return self.step(num_running, 0.0).total_s

    @property
    def _sequence_s(self) -> float:
        cost = self._cost
        return self._attention_s(cost.bytes_per_sequence, cost.flops_per_sequence) / self._serving.data

    def _attention_s(self, nbytes: float, flops: float) -> float:
        return max(nbytes / self._memory_bytes_s, flops / self._attention_flops_s)

    def _linear_s(self, num_running: int) -> float:
        """Read what is needed of the weights, or multiply, whichever is longer.

        Tokens choose experts evenly and independently: of n tokens, a share 1 - (1 - A/E)^n of the experts is chosen.
        """
        model, serving = self._model, self._serving
        share = 1 - (1 - model.num_active_experts / max(model.num_experts, 1)) ** num_running
        nbytes = self._dense_bytes + self._expert_bytes * share
        flops = num_running * (self._dense_flops / serving.num_gpus + self._expert_flops / serving.num_gpus)
        return max(nbytes / self._memory_bytes_s, flops / self._flops_s)

    def _links_s(self, num_running: int) -> float:
        """Two all-reduces a layer over the tensor axis; with expert parallelism rows go to their experts in FP8 and
        come back in bf16. Links within a node are NVLink, beyond it the network."""
        model, serving, gpu = self._model, self._serving, self._serving.spec
        rows = num_running / serving.data
        seconds = 0.0
        if serving.tensor > 1:
            link = gpu.nvlink_bytes_s if serving.tensor <= gpu.per_node else gpu.network_bytes_s
            wire = 2 * (serving.tensor - 1) / serving.tensor * 2 * model.width * rows
            seconds += 2 * model.num_layers * wire / link
        if serving.expert_parallel and serving.num_gpus > 1:
            link = gpu.nvlink_bytes_s if serving.num_gpus <= gpu.per_node else gpu.network_bytes_s
            wire = rows / serving.tensor * model.num_active_experts * model.width * (1 + 2)
            seconds += model.num_moe_layers * wire * (1 - 1 / serving.num_gpus) / link
        return seconds / serving.network_frac
