"""Tiny random checkpoints as transformers writes them, and their FP8 forms by a quantiser of its own in plain torch."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file

# vLLM's attention on a CPU takes heads of 32, 64, 80, 96, 112, 128 ... only.
COMMON = {"vocab_size": 323, "num_hidden_layers": 2, "max_position_embeddings": 8192, "num_attention_heads": 4}
EXPERTS = {"moe_intermediate_size": 128, "num_experts": 5, "num_experts_per_tok": 2, "norm_topk_prob": True}
NOT_QUANTISED = ("embed_tokens", "lm_head", "norm", "mlp.gate.weight")
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Tiny:
    """A model small enough for a test: a class of transformers, and what its config says beside COMMON."""

    config: str
    options: dict[str, object] = field(default_factory=dict)

    def save(
        self, folder: Path, seed: int = 0, max_shard_size: str = "5GB", dtype: torch.dtype = torch.bfloat16
    ) -> Path:
        """Write a random checkpoint whose logits and routing are not flat."""
        torch.manual_seed(seed)
        config = getattr(transformers, self.config)(**COMMON | self.options)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() >= 2:
                    parameter.mul_(3.0)
                elif "norm" in name:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
        model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
        return folder


LLAMA_TIED = Tiny(
    "LlamaConfig",
    {
        "hidden_size": 96,
        "intermediate_size": 208,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "tie_word_embeddings": True,
    },
)
LLAMA = Tiny(
    "LlamaConfig",
    {
        "hidden_size": 64,
        "intermediate_size": 144,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "tie_word_embeddings": False,
    },
)
QWEN3 = Tiny(
    "Qwen3Config",
    {
        "hidden_size": 80,
        "intermediate_size": 176,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "tie_word_embeddings": False,
    },
)
QWEN3_TIED = Tiny(
    "Qwen3Config",
    {
        "hidden_size": 112,
        "intermediate_size": 96,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "tie_word_embeddings": True,
    },
)
QWEN3_MOE = Tiny(
    "Qwen3MoeConfig",
    {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "tie_word_embeddings": False,
    }
    | EXPERTS,
)
QWEN3_MOE_TIED = Tiny(
    "Qwen3MoeConfig",
    {"hidden_size": 96, "intermediate_size": 64, "num_key_value_heads": 4, "head_dim": 96, "tie_word_embeddings": True}
    | EXPERTS
    | {"moe_intermediate_size": 72, "num_experts": 7, "num_experts_per_tok": 3},
)
QWEN3_MOE_FP8 = Tiny(
    "Qwen3MoeConfig",
    {
        "hidden_size": 256,
        "intermediate_size": 64,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "tie_word_embeddings": False,
    }
    | EXPERTS
    | {"moe_intermediate_size": 384},
)


def quantise(weight: torch.Tensor, block: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return e4m3 codes and power-of-two scales of a matrix: of blocks of 128 x 128, one by one, or of rows."""
    weight = weight.float()
    if not block:
        scales = _power_of_two(weight.abs().amax(1, keepdim=True))
        return (weight / scales).to(torch.float8_e4m3fn), scales
    rows, cols = weight.shape
    codes = torch.empty(rows, cols, dtype=torch.float8_e4m3fn)
    scales = torch.empty(-(-rows // 128), -(-cols // 128))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            part = (slice(i * 128, (i + 1) * 128), slice(j * 128, (j + 1) * 128))
            scales[i, j] = _power_of_two(weight[part].abs().max())
            codes[part] = (weight[part] / scales[i, j]).to(torch.float8_e4m3fn)
    return codes, scales


def _power_of_two(absmax: torch.Tensor) -> torch.Tensor:
    return torch.exp2((absmax.double().clamp(min=1e-12) / 448).log2().ceil()).float()


def quantised(plain: Tensors, block: bool) -> Tensors:
    """Return the tensors of an FP8 checkpoint."""
    out: Tensors = {}
    for name, weight in plain.items():
        if weight.dim() != 2 or any(part in name for part in NOT_QUANTISED):
            out[name] = weight
            continue
        out[name], out[f"{name}_scale_inv" if block else f"{name}_scale"] = quantise(weight, block)
    return out


def dequantised(tensors: Tensors) -> Tensors:
    """Return the twin: float32 codes times scales, everything else in float32 too."""
    out: Tensors = {}
    for name, tensor in tensors.items():
        if "weight_scale" in name:
            continue
        value = tensor.float()
        if f"{name}_scale_inv" in tensors:
            scale = tensors[f"{name}_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)
            value = value * scale[: value.shape[0], : value.shape[1]]
        elif f"{name}_scale" in tensors:
            value = value * tensors[f"{name}_scale"]
        out[name] = value
    return out


def quantisation_config(tensors: Tensors, block: bool) -> dict[str, object]:
    """Return what config.json says about an FP8 checkpoint."""
    ignored = ["lm_head"] + [name.removesuffix(".weight") for name in tensors if name.endswith("mlp.gate.weight")]
    if block:
        blocks = {"weight_block_size": [128, 128], "modules_to_not_convert": ignored}
        return {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"} | blocks
    eight = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": eight | {"dynamic": False, "strategy": "channel"},
        "input_activations": eight | {"dynamic": True, "strategy": "token"},
    }
    words = {"quant_method": "compressed-tensors", "format": "float-quantized", "quantization_status": "compressed"}
    return words | {"config_groups": {"group_0": group}, "ignore": ignored}


def write_folder(source: Path, folder: Path, tensors: Tensors, quantisation: dict[str, object] | None) -> Path:
    """Write a checkpoint with the config.json of another one."""
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((source / "config.json").read_text())
    config["dtype"] = "bfloat16" if quantisation else "float32"
    (folder / "config.json").write_text(
        json.dumps(config | ({"quantization_config": quantisation} if quantisation else {}))
    )
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    return folder


def read_folder(folder: Path) -> Tensors:
    """Return all tensors of a checkpoint."""
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}
