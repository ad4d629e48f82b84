"""TEST EQUIPMENT, active on CPU only: FP8 linear and expert layers in plain torch, exact and slow.

vLLM runs FP8 on CPUs with AMX only. With these classes its own config parsing, parameter creation, weight loaders and
reload run on real FP8 checkpoints on any CPU; production serves on GPUs with vLLM's kernels and never sees this file.

By default activations are quantised as the GPU kernels do (W8A8): per token, per tensor, or per group of 128. With
`additional_config={"rl_jax_activations": "exact"}` they are not (W8A16), and the layers compute what the dequantised
weights would: bridge.verify compares those two.
"""

import torch
import vllm._custom_ops as custom_ops
import vllm.model_executor.kernels.linear as linear_kernels
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.config import get_current_vllm_config
from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import Fp8BlockScaledMMLinearKernel
from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import FP8ScaledMMLinearKernel
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.oracle import fp8 as moe_oracle
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP
from vllm.model_executor.layers.quantization.fp8 import Fp8Config
from vllm.platforms import PlatformEnum, current_platform

from bridge.vllm_plugin.reference import PER_TENSOR, PER_TOKEN, dequantize, quantize, quantize_activations

ACTIVATIONS = "rl_jax_activations"


def activations_are_exact() -> bool:
    """Tell whether the engine under construction asked for W8A16.

    Raises:
        ValueError: the key has another value than "fp8" or "exact".
    """
    config = get_current_vllm_config().additional_config
    asked = config.get(ACTIVATIONS, "fp8") if isinstance(config, dict) else "fp8"
    if asked not in ("fp8", "exact"):
        raise ValueError(f'additional_config["{ACTIVATIONS}"] is {asked!r}; expected "fp8" or "exact"')
    return asked == "exact"


class ReferenceBlockLinear(Fp8BlockScaledMMLinearKernel):
    """y = x W^T with W [N, K] in blocks of 128 x 128 and x in groups of 128."""

    def __init__(self, config) -> None:
        super().__init__(config)
        self.is_exact = activations_are_exact()

    @classmethod
    def is_supported(cls, compute_capability=None):
        return current_platform.is_cpu(), "made for CPUs"

    def process_weights_after_loading(self, layer):
        """Keep the checkpoint's layout."""

    def apply_weights(self, layer, x, bias=None, **kwargs):
        params, group = self._get_layer_params(layer), self.weight_group_shape
        x_TK = x.reshape(-1, x.shape[-1]).float()
        if not self.is_exact:
            x_TK = quantize_activations(x_TK, group.col)
        y_TN = x_TK @ dequantize(params.weight, params.block_scale, (group.row, group.col)).T
        if bias is not None:
            y_TN = y_TN + bias
        return y_TN.to(x.dtype).view(*x.shape[:-1], -1)

    def apply_block_scaled_mm(self, A, B, As, Bs):
        raise NotImplementedError("ReferenceBlockLinear.apply_weights does not split off the product")


class ReferenceScaledLinear(FP8ScaledMMLinearKernel):
    """y = x W with W [K, N], as vLLM hands it over, scaled per tensor or per output channel."""

    def __init__(self, config, layer_param_names) -> None:
        super().__init__(config, layer_param_names)
        self.is_exact = activations_are_exact()

    @classmethod
    def is_supported(cls, compute_capability=None):
        return current_platform.is_cpu(), "made for CPUs"

    @classmethod
    def can_implement(cls, config):
        return True, None

    def apply_weights(self, layer, x, bias=None):
        w_KN, w_scale, x_scale, _ = self._get_layer_params(layer)
        x_TK = x.reshape(-1, x.shape[-1]).float()
        if not self.is_exact:
            per_token = self.config.activation_quant_key.scale.group_shape.is_per_token()
            x_TK = quantize_activations(x_TK, PER_TOKEN if per_token else PER_TENSOR, x_scale)
        y_TN = (x_TK @ w_KN.float()) * w_scale.float().reshape(-1)
        if bias is not None:
            y_TN = y_TN + bias
        return y_TN.to(x.dtype).view(*x.shape[:-1], -1)

    def apply_scaled_mm(self, **kwargs):
        raise NotImplementedError("ReferenceScaledLinear.apply_weights does not split off the product")


class ReferenceExperts(mk.FusedMoEExpertsModular):
    """Gated experts, one after the other: w1 [E, 2F, D] holds the gate's rows above the up projection's, w2 [E, D, F]."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.is_exact = activations_are_exact()

    @property
    def expects_unquantized_inputs(self):
        return True

    @staticmethod
    def activation_format():
        return mk.FusedMoEActivationFormat.Standard

    @staticmethod
    def _supports_current_device():
        return current_platform.is_cpu()

    @staticmethod
    def _supports_no_act_and_mul():
        return False

    @staticmethod
    def _supports_activation(activation):
        return activation == MoEActivation.SILU

    @staticmethod
    def _supports_parallel_config(moe_parallel_config):
        return True

    @staticmethod
    def _supports_quant_scheme(weight_key, activation_key):
        return weight_key is not None

    def workspace_shapes(self, M, N, K, *sizes):
        return (0,), (0,), (M, K)

    def finalize_weight_and_reduce_impl(self):
        return TopKWeightAndReduceNoOP()

    def apply(self, output, hidden_states, w1, w2, topk_weights, topk_ids, *, expert_map, **options):
        """Write the weighted sum of the chosen experts, [T, D]; with expert parallelism, of those that live here."""
        weigh_input = options["apply_router_weight_on_input"]
        x_TD = self._quantized(hidden_states.float())
        y_TD = torch.zeros_like(x_TD)
        for local in range(w1.shape[0]):
            expert = local if expert_map is None else int((expert_map == local).nonzero()[0])
            rows, choice = (topk_ids == expert).nonzero(as_tuple=True)
            if not rows.numel():
                continue
            y_RD = self._expert(local, x_TD[rows], w1, w2, hidden_states.dtype)
            y_TD.index_add_(0, rows, y_RD if weigh_input else y_RD * topk_weights[rows, choice, None].float())
        output.copy_(y_TD)

    def _expert(self, local, x_RD, w1, w2, dtype):
        """Return [R, D] of one expert; between its two products values have the model's dtype, as in the GPU kernels."""
        block = self.quant_config.block_shape
        h_R2F = (x_RD @ dequantize(w1[local], self.w1_scale[local], block).T).to(dtype)
        gate_RF, up_RF = h_R2F.float().chunk(2, -1)
        h_RF = self._quantized((torch.nn.functional.silu(gate_RF) * up_RF).to(dtype).float())
        return (h_RF @ dequantize(w2[local], self.w2_scale[local], block).T).to(dtype).float()

    def _quantized(self, x):
        if self.is_exact:
            return x
        if self.quant_config.block_shape:
            return quantize_activations(x, self.quant_config.block_shape[1])
        return quantize_activations(x, PER_TOKEN if self.quant_config.per_act_token_quant else PER_TENSOR)


def scaled_fp8_quant(
    input: torch.Tensor,
    scale: torch.Tensor | None = None,
    num_token_padding: int | None = None,
    scale_ub: torch.Tensor | None = None,
    use_per_token_if_dynamic: bool = False,
    output: torch.Tensor | None = None,
    group_shape: tuple[int, int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Stand in for vLLM's operation, which has no CPU implementation: [T, K] -> FP8 and scale [1] or [T, 1]."""
    if scale is not None and scale.numel() != 1 and scale.dim() != 2:
        raise NotImplementedError(f"scale of shape {list(scale.shape)}; the reference takes one scale or [T, 1]")
    quantized, scale = quantize(input.float(), PER_TOKEN if use_per_token_if_dynamic else PER_TENSOR, scale)
    return (quantized if output is None else output.copy_(quantized)), scale


def install() -> None:
    """Put the reference classes where vLLM looks for FP8 kernels of a CPU, first in line."""
    linear_kernels._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU].insert(0, ReferenceBlockLinear)
    linear_kernels._POSSIBLE_FP8_KERNELS[PlatformEnum.CPU].insert(0, ReferenceScaledLinear)
    of_vllm = moe_oracle.backend_to_kernel_cls

    def with_reference(backend):
        """TRITON is the backend that leaves the weights in the checkpoint's layout."""
        mine = [ReferenceExperts] if backend == moe_oracle.Fp8MoeBackend.TRITON else []
        return [*of_vllm(backend), *mine]

    moe_oracle.backend_to_kernel_cls = with_reference
    custom_ops.scaled_fp8_quant = scaled_fp8_quant
    Fp8Config.get_supported_act_dtypes = classmethod(lambda cls: [torch.bfloat16, torch.half, torch.float32])
