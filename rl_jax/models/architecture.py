"""The shape of a model, read from a Hugging Face config.json or written in a TOML file.

Families: llama, qwen3, qwen3_moe. Knows no tensor; models/schema.py makes the parameter table from it.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal

from rl_jax.config import ConfigError, refuse

Family = Literal["llama", "qwen3", "qwen3_moe"]
RopeType = Literal["default", "linear", "dynamic", "llama3", "yarn"]


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary position embedding; the scaling fields mean what they mean in a Hugging Face config."""

    theta: float = 10_000.0
    """Base of the frequencies."""
    type: RopeType = "default"
    """How positions beyond the trained length are scaled."""
    factor: float = 1.0
    """Ratio of the extended to the trained length."""
    original_max_position: int = 0
    """Trained length in tokens; needed by dynamic, llama3 and yarn."""
    low_freq_factor: float = 1.0
    """llama3 only."""
    high_freq_factor: float = 4.0
    """llama3 only."""
    beta_fast: float = 32.0
    """yarn only."""
    beta_slow: float = 1.0
    """yarn only."""
    attention_factor: float = 0.0
    """yarn only: scale of cos and sin; 0 = from factor, mscale and mscale_all_dim."""
    mscale: float = 0.0
    """yarn only."""
    mscale_all_dim: float = 0.0
    """yarn only."""
    truncate: bool = True
    """yarn only: round the corrected dimensions to integers."""

    def __post_init__(self) -> None:
        needs_length = self.type in ("dynamic", "llama3", "yarn")
        refuse(
            [
                None if self.theta > 0 else f"theta={self.theta}: must be positive",
                None if self.factor >= 1 else f"factor={self.factor}: must be at least 1",
                f"original_max_position={self.original_max_position}: type {self.type!r} needs the trained length"
                if needs_length and self.original_max_position < 1
                else None,
            ]
        )


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Shape of a decoder of the Llama, Qwen3 and Qwen3-MoE families. num_experts=0 is a dense model."""

    family: Family = "qwen3_moe"
    """Names and order of the tensors in a Hugging Face directory."""
    vocab_size: int
    """Rows of the embedding (V)."""
    width: int
    """Model width (D), hidden_size."""
    num_layers: int
    """Layers (L)."""
    num_heads: int
    """Query heads (N)."""
    num_kv_heads: int
    """Key/value heads (K); must divide num_heads."""
    head_width: int
    """Width of a head (H)."""
    mlp_width: int = 0
    """Width of the dense MLP (F), intermediate_size; unused with experts."""
    num_experts: int = 0
    """Experts of each layer (E); 0 = dense MLP."""
    num_active_experts: int = 0
    """Experts that each token goes to (A)."""
    expert_width: int = 0
    """MLP width of one expert (F)."""
    shared_expert_width: int = 0
    """MLP width of an expert that every token goes to; 0 = none."""
    normalise_routing: bool = True
    """Divide the chosen routing weights by their sum (norm_topk_prob)."""
    router_scores: Literal["softmax", "sigmoid"] = "softmax"
    """From router logits to scores: over all experts together, or each by itself."""
    router_bias: bool = False
    """Add a correction to the scores, for the choice only: it balances the load and gets no gradient."""
    num_expert_groups: int = 1
    """Groups of experts of which each token may use some only; must divide num_experts (n_group)."""
    num_active_groups: int = 1
    """Groups that each token may use, those with the highest sum of two scores (topk_group)."""
    routed_scaling: float = 1.0
    """Factor of the routing weights (routed_scaling_factor)."""
    qk_norm: bool = True
    """RMS norm on queries and keys of each head."""
    attention_bias: bool = False
    """Biases on the query, key, value and output projections."""
    tie_embeddings: bool = True
    """Use the embedding as the output head."""
    norm_eps: float = 1e-6
    """Epsilon of the RMS norms."""
    max_positions: int = 4096
    """Longest sequence in tokens."""
    rope: Rope = field(default_factory=Rope)
    """Rotary position embedding."""

    def __post_init__(self) -> None:
        positive = ("vocab_size", "width", "num_layers", "num_heads", "num_kv_heads", "head_width", "max_positions")
        faults = [f"{k}={getattr(self, k)}: must be at least 1" for k in positive if getattr(self, k) < 1]
        if self.num_kv_heads > 0 and self.num_heads % self.num_kv_heads:
            faults.append(f"num_kv_heads={self.num_kv_heads}: must divide num_heads={self.num_heads}")
        if self.head_width % 2:
            faults.append(f"head_width={self.head_width}: must be even for the rotary embedding")
        if self.num_experts and not 1 <= self.num_active_experts <= self.num_experts:
            faults.append(f"num_active_experts={self.num_active_experts}: must be 1..num_experts={self.num_experts}")
        if self.shared_expert_width < 0:
            faults.append(f"shared_expert_width={self.shared_expert_width}: must be at least 0 (none)")
        if self.norm_eps <= 0:
            faults.append(f"norm_eps={self.norm_eps}: must be positive")
        if self.num_experts and self.expert_width < 1:
            faults.append(f"expert_width={self.expert_width}: must be at least 1 with num_experts={self.num_experts}")
        if not self.num_experts and self.mlp_width < 1:
            faults.append(f"mlp_width={self.mlp_width}: must be at least 1 in a dense model (num_experts=0)")
        if self.num_experts and not self._fits_groups():
            faults.append(
                f"num_expert_groups={self.num_expert_groups}: must divide num_experts={self.num_experts}, and "
                f"num_active_groups={self.num_active_groups} of them must hold num_active_experts={self.num_active_experts}"
            )
        if (self.num_experts > 0) != (self.family == "qwen3_moe"):
            faults.append(f"family={self.family!r}: num_experts={self.num_experts} needs " + self._fitting_family())
        refuse(faults)

    def _fits_groups(self) -> bool:
        groups, active = self.num_expert_groups, self.num_active_groups
        is_divided = 1 <= active <= groups and self.num_experts % groups == 0
        return is_divided and active * (self.num_experts // groups) >= self.num_active_experts

    def _fitting_family(self) -> str:
        return "family 'qwen3_moe'" if self.num_experts else "family 'llama' or 'qwen3'"

    @property
    def queries_per_kv(self) -> int:
        """Query heads per key/value head (Q)."""
        return self.num_heads // self.num_kv_heads

    def size(self, letter: str) -> int:
        """Return the size of a dimension of the experts' and attention's weights by its letter."""
        sizes = {
            "V": self.vocab_size,
            "D": self.width,
            "L": self.num_layers,
            "K": self.num_kv_heads,
            "Q": self.queries_per_kv,
            "H": self.head_width,
            "E": self.num_experts,
            "A": self.num_active_experts,
            "F": self.expert_width if self.num_experts else self.mlp_width,
        }
        return sizes[letter]


def read_architecture(directory: str | Path) -> Architecture:
    """Read the Architecture of a Hugging Face directory.

    Raises:
        ConfigError: no such directory, no config.json, a family or a feature that is not supported.
    """
    file = Path(directory) / "config.json"
    if not Path(directory).is_dir():
        raise ConfigError([f"{directory}: no such directory; give a Hugging Face model directory"])
    if not file.is_file():
        raise ConfigError([f"{directory}: is no model directory, it has no config.json"])
    try:
        raw = json.loads(file.read_text())
    except ValueError as error:
        raise ConfigError([f"{file}: not valid JSON ({error})"]) from error
    if not isinstance(raw, dict):
        raise ConfigError([f"{file}: expected a JSON object, got {type(raw).__name__}"])
    try:
        return from_hf_config(raw)
    except ConfigError as error:
        raise ConfigError([f"{file}: {fault}" for fault in error.faults]) from error
    except KeyError as error:
        raise ConfigError([f"{file}: key {error} is missing"]) from error


def from_hf_config(raw: Mapping[str, object]) -> Architecture:
    """Translate the content of a config.json; see read_architecture."""
    families: dict[object, Family] = {"llama": "llama", "qwen3": "qwen3", "qwen3_moe": "qwen3_moe"}
    family = families.get(raw.get("model_type"))
    refuse(
        [
            None if family else f"model_type={raw.get('model_type')!r}: supported are {', '.join(map(repr, families))}",
            _unsupported(raw, "hidden_act", ("silu", None)),
            _unsupported(raw, "mlp_bias", (False, None)),
            _unsupported(raw, "use_sliding_window", (False, None)),
            _unsupported(raw, "mlp_only_layers", ([], None)),
            _unsupported(raw, "decoder_sparse_step", (1, None)),
            _quantization_fault(raw),
        ]
    )
    is_moe = family == "qwen3_moe"
    width, num_heads = _int(raw, "hidden_size"), _int(raw, "num_attention_heads")
    assert family is not None
    return Architecture(
        family=family,
        vocab_size=_int(raw, "vocab_size"),
        width=width,
        num_layers=_int(raw, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=_int(raw, "num_key_value_heads", num_heads),
        head_width=_int(raw, "head_dim", width // num_heads if family == "llama" else 128),
        mlp_width=0 if is_moe else _int(raw, "intermediate_size"),
        num_experts=_int(raw, _experts_key(raw)) if is_moe else 0,
        num_active_experts=_int(raw, "num_experts_per_tok") if is_moe else 0,
        expert_width=_int(raw, "moe_intermediate_size") if is_moe else 0,
        shared_expert_width=_int(raw, "shared_expert_intermediate_size", 0) if is_moe else 0,
        normalise_routing=bool(raw.get("norm_topk_prob", False)) if is_moe else True,
        qk_norm=family != "llama",
        attention_bias=bool(raw.get("attention_bias", False)),
        tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
        norm_eps=_float(raw, "rms_norm_eps", 1e-6),
        max_positions=_int(raw, "max_position_embeddings"),
        rope=_rope(raw),
    )


def export_faults(arch: Architecture) -> list[str]:
    """Return a line for each setting that the Hugging Face family of an Architecture has no key for."""
    keys = ("router_scores", "router_bias", "num_expert_groups", "num_active_groups", "routed_scaling")
    plain = {field.name: field.default for field in fields(Architecture)}
    return [
        f"model.architecture.{key}={getattr(arch, key)!r}: a model of family {arch.family!r} cannot say so in its "
        f"config.json; use {plain[key]!r}"
        for key in keys
        if getattr(arch, key) != plain[key]
    ]


def to_hf_config(arch: Architecture) -> dict[str, object]:
    """Return the config.json content of an Architecture; from_hf_config gives the Architecture back.

    Raises:
        ConfigError: the family has no key for a setting.
    """
    refuse(export_faults(arch))
    names = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}
    config: dict[str, object] = {
        "architectures": [names[arch.family]],
        "model_type": arch.family,
        "vocab_size": arch.vocab_size,
        "hidden_size": arch.width,
        "intermediate_size": arch.mlp_width or arch.expert_width,
        "num_hidden_layers": arch.num_layers,
        "num_attention_heads": arch.num_heads,
        "num_key_value_heads": arch.num_kv_heads,
        "head_dim": arch.head_width,
        "hidden_act": "silu",
        "attention_bias": arch.attention_bias,
        "tie_word_embeddings": arch.tie_embeddings,
        "rms_norm_eps": arch.norm_eps,
        "max_position_embeddings": arch.max_positions,
        "rope_theta": arch.rope.theta,
        "rope_parameters": {"rope_theta": arch.rope.theta, **_rope_to_hf(arch.rope)},
    }
    if arch.rope.type != "default":
        config["rope_scaling"] = _rope_to_hf(arch.rope)
    if arch.num_experts:
        config |= {
            "num_experts": arch.num_experts,
            "num_experts_per_tok": arch.num_active_experts,
            "moe_intermediate_size": arch.expert_width,
            "norm_topk_prob": arch.normalise_routing,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    if arch.shared_expert_width:
        config["shared_expert_intermediate_size"] = arch.shared_expert_width
    return config


_ROPE_NAMES = {
    "original_max_position": "original_max_position_embeddings",
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "attention_factor": "attention_factor",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
    "truncate": "truncate",
}


def _rope(raw: Mapping[str, object]) -> Rope:
    """Read both forms: rope_theta + rope_scaling, and the newer rope_parameters."""
    nested = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(nested, Mapping):
        raise ConfigError([f"rope_parameters={nested!r}: expected a table"])
    kind = nested.get("rope_type") or nested.get("type") or "default"
    theta = nested.get("rope_theta", raw.get("rope_theta", 10_000.0))
    if kind not in ("default", "linear", "dynamic", "llama3", "yarn"):
        raise ConfigError([f"rope type={kind!r}: supported are default, linear, dynamic, llama3, yarn"])
    values = {ours: nested[theirs] for ours, theirs in _ROPE_NAMES.items() if nested.get(theirs) is not None}
    if kind in ("dynamic", "yarn", "llama3"):
        values.setdefault("original_max_position", raw["max_position_embeddings"])
    return Rope(theta=float(str(theta)), type=kind, **values)


def _rope_to_hf(rope: Rope) -> dict[str, object]:
    plain = Rope(original_max_position=rope.original_max_position)
    changed: dict[str, object] = {n: getattr(rope, n) for n in _ROPE_NAMES if getattr(rope, n) != getattr(plain, n)}
    if rope.original_max_position:
        changed["original_max_position"] = rope.original_max_position
    return {"rope_type": rope.type, **{_ROPE_NAMES[name]: value for name, value in changed.items()}}


def _unsupported(raw: Mapping[str, object], key: str, allowed: tuple[object, ...]) -> str | None:
    return None if raw.get(key) in allowed else f"{key}={raw[key]!r}: not supported, expected {allowed[0]!r}"


def _quantization_fault(raw: Mapping[str, object]) -> str | None:
    """Return why quantised weights cannot be read; bridge/safetensors_reader.py dequantises FP8."""
    quantised = raw.get("quantization_config")
    if quantised is None or (
        isinstance(quantised, Mapping)
        and (
            (quantised.get("quant_method") == "fp8" and quantised.get("weight_block_size", [128, 128]) == [128, 128])
            or (quantised.get("quant_method"), quantised.get("format")) == ("compressed-tensors", "float-quantized")
        )
    ):
        return None
    expected = "none, fp8 with blocks of [128, 128], or compressed-tensors float-quantized"
    return f"quantization_config={quantised!r}: not supported, expected {expected}"


def _experts_key(raw: Mapping[str, object]) -> str:
    """Return the name of the number of experts: what transformers 5 saves calls it num_local_experts."""
    return "num_local_experts" if raw.get("num_experts") is None and "num_local_experts" in raw else "num_experts"


def _int(raw: Mapping[str, object], key: str, default: int | None = None) -> int:
    value = raw.get(key)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError([f"{key}={value!r}: expected an integer"])
    return value


def _float(raw: Mapping[str, object], key: str, default: float) -> float:
    value = raw.get(key, default)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ConfigError([f"{key}={value!r}: expected a number"])
    return float(value)
