"""What serving needs to know of a model: its matrices, how vLLM splits each, and its KV cache.

Made from an architecture's parameter table, or, for families that the trainer does not have yet, from the numbers of a
config with latent attention (MLA) and a sparse-attention indexer. Knows no hardware.
"""

import math
from dataclasses import dataclass
from typing import Literal

from rl_jax.config import refuse
from rl_jax.models.architecture import Architecture
from rl_jax.models.fp8_rule import BLOCK, Format, fp8_block
from rl_jax.models.schema import flat_table
from rl_jax.plan.cache import Cache, HeadCache, LatentCache

Split = Literal["rows", "kv_rows", "columns", "vocab", "none"]
"""By what a matrix is shared out over tensor-parallel devices; kv_rows are repeated where devices outnumber heads."""

SPLITS: dict[str, Split] = {
    "embed_VD": "vocab",
    "unembed_VD": "vocab",
    "wq_LDKQH": "rows",
    "bq_LKQH": "rows",
    "wk_LDKH": "kv_rows",
    "wv_LDKH": "kv_rows",
    "bk_LKH": "kv_rows",
    "bv_LKH": "kv_rows",
    "wo_LKQHD": "columns",
    "gate_LDF": "rows",
    "up_LDF": "rows",
    "down_LFD": "columns",
    "shared_gate_LDF": "rows",
    "shared_up_LDF": "rows",
    "shared_down_LFD": "columns",
    "gate_LEDF": "rows",
    "up_LEDF": "rows",
    "down_LEFD": "columns",
}
"""Parameters that tensor parallelism splits; all others stand on every device."""


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """One kind of Hugging Face tensor, of which a model holds `count`.

    Example: the down projections of Qwen3-30B-A3B: shape (2048, 768), count 48 * 128, is_expert, split by columns.
    """

    name: str
    """Hugging Face name, * for layer and expert."""
    shape: tuple[int, ...]
    count: int
    is_fp8: bool
    split: Split
    is_expert: bool = False
    """One of the routed experts."""
    is_read: bool = True
    """Goes through every token's decode step; an untied embedding does not."""

    @property
    def elements(self) -> int:
        """Elements of one tensor."""
        return math.prod(self.shape)

    def nbytes(self, fmt: Format) -> int:
        """Bytes of one tensor with its scales."""
        if not self.is_fp8:
            return self.elements * (4 if fmt == "float32" else 2)
        rows, columns = self.shape
        scales = -(-rows // BLOCK) * -(-columns // BLOCK) if fmt == "fp8-block" else rows
        return self.elements + 4 * scales


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """A model as a server sees it."""

    name: str
    fmt: Format
    width: int
    num_layers: int
    num_moe_layers: int
    num_heads: int
    num_kv_heads: int
    """Of grouped-query attention; 0 = latent attention, where every device keeps all of the cache."""
    vocab_size: int
    num_experts: int
    num_active_experts: int
    expert_width: int
    mlp_width: int
    """Of the widest MLP that every token goes through: dense layers or shared experts."""
    max_positions: int
    matrices: tuple[Matrix, ...]
    cache: Cache

    @property
    def num_params(self) -> int:
        """All parameters."""
        return sum(m.elements * m.count for m in self.matrices)

    @property
    def num_active_params(self) -> float:
        """Parameters that one token is multiplied with."""
        share = self.num_active_experts / max(self.num_experts, 1)
        return sum(m.elements * m.count * (share if m.is_expert else 1.0) for m in self.matrices if m.is_read)

    @property
    def nbytes(self) -> int:
        """Bytes of an export: what one weight update carries to one replica."""
        return sum(m.nbytes(self.fmt) * m.count for m in self.matrices)


def served_model(arch: Architecture, fmt: Format, name: str = "") -> ServedModel:
    """Return what serving needs to know of an architecture of the parameter table."""
    return ServedModel(
        name=name or arch.family,
        fmt=fmt,
        width=arch.width,
        num_layers=arch.num_layers,
        num_moe_layers=arch.num_layers if arch.num_experts else 0,
        num_heads=arch.num_heads,
        num_kv_heads=arch.num_kv_heads,
        vocab_size=arch.vocab_size,
        num_experts=arch.num_experts,
        num_active_experts=arch.num_active_experts,
        expert_width=arch.expert_width,
        mlp_width=arch.shared_expert_width if arch.num_experts else arch.mlp_width,
        max_positions=arch.max_positions,
        matrices=_table_matrices(arch, fmt),
        cache=HeadCache(
            num_layers=arch.num_layers,
            num_heads=arch.num_heads,
            num_kv_heads=arch.num_kv_heads,
            head_width=arch.head_width,
        ),
    )


def _table_matrices(arch: Architecture, fmt: Format) -> tuple[Matrix, ...]:
    matrices = []
    for key, param in flat_table(arch).items():
        name = key.removeprefix("layers/")
        is_embedding = name == "embed_VD"
        matrices.append(
            Matrix(
                name=param.hf.replace("{L}", "*").replace("{E}", "*"),
                shape=param.hf_shape,
                count=math.prod(param.dims[letter] for letter in param.stacked),
                is_fp8=fp8_block(arch, fmt, key) is not None,
                split=SPLITS.get(name, "none"),
                is_expert="E" in param.stacked,
                is_read=not is_embedding or arch.tie_embeddings,
            )
        )
    return tuple(matrices)


@dataclass(frozen=True, kw_only=True)
class LatentModelConfig:
    """A mixture with latent attention, DeepSeek-V3 or GLM-5: the names of its config.json in brackets."""

    name: str
    width: int
    """hidden_size."""
    num_layers: int
    """num_hidden_layers."""
    num_dense_layers: int = 0
    """Leading layers with a dense MLP (first_k_dense_replace)."""
    num_heads: int
    """num_attention_heads."""
    vocab_size: int
    mlp_width: int
    """Of the dense layers (intermediate_size)."""
    num_experts: int
    """n_routed_experts."""
    num_active_experts: int
    """num_experts_per_tok."""
    expert_width: int
    """moe_intermediate_size."""
    num_shared_experts: int = 1
    """n_shared_experts."""
    query_rank: int
    """q_lora_rank."""
    latent_width: int = 512
    """kv_lora_rank."""
    rope_width: int = 64
    """qk_rope_head_dim."""
    plain_width: int
    """qk_nope_head_dim."""
    value_width: int
    """v_head_dim."""
    index_heads: int = 0
    """index_n_heads; 0 = no sparse attention."""
    index_width: int = 128
    """index_head_dim."""
    index_top: int = 2048
    """Tokens that each token attends to (index_topk)."""
    num_index_layers: int = 0
    """Layers with an indexer of their own; 0 = all, if there are index_heads."""
    max_positions: int
    """max_position_embeddings."""

    def __post_init__(self) -> None:
        whole = {k: v for k, v in vars(self).items() if k != "name"}
        may_be_zero = ("num_dense_layers", "num_shared_experts", "index_heads", "num_index_layers")
        refuse(
            [
                *(
                    f"{k}={v}: must be at least {int(k not in may_be_zero)}"
                    for k, v in whole.items()
                    if v < (k not in may_be_zero)
                ),
                None
                if self.num_dense_layers <= self.num_layers
                else f"num_dense_layers={self.num_dense_layers}: must be at most num_layers={self.num_layers}",
                None
                if self.num_active_experts <= self.num_experts
                else f"num_active_experts={self.num_active_experts}: must be at most num_experts={self.num_experts}",
                None
                if self.num_index_layers <= self.num_layers
                else f"num_index_layers={self.num_index_layers}: must be at most num_layers={self.num_layers}",
            ]
        )


def latent_model(config: LatentModelConfig, fmt: Format) -> ServedModel:
    """Return what serving needs to know of a model with latent attention."""
    num_moe = config.num_layers - config.num_dense_layers
    has_index = config.index_heads > 0
    return ServedModel(
        name=config.name,
        fmt=fmt,
        width=config.width,
        num_layers=config.num_layers,
        num_moe_layers=num_moe,
        num_heads=config.num_heads,
        num_kv_heads=0,
        vocab_size=config.vocab_size,
        num_experts=config.num_experts,
        num_active_experts=config.num_active_experts,
        expert_width=config.expert_width,
        mlp_width=max(
            config.mlp_width if config.num_dense_layers else 0, config.num_shared_experts * config.expert_width
        ),
        max_positions=config.max_positions,
        matrices=_latent_matrices(config, fmt in ("fp8-block", "fp8-channel")),
        cache=LatentCache(
            num_layers=config.num_layers,
            num_heads=config.num_heads,
            latent_width=config.latent_width,
            rope_width=config.rope_width,
            num_index_layers=(config.num_index_layers or config.num_layers) if has_index else 0,
            index_heads=config.index_heads,
            index_width=config.index_width,
            index_top=config.index_top,
        ),
    )


def _latent_matrices(c: LatentModelConfig, is_fp8: bool) -> tuple[Matrix, ...]:
    """Return the tensors; norms and biases, below a thousandth, are left out."""
    num_moe = c.num_layers - c.num_dense_layers
    num_index = (c.num_index_layers or c.num_layers) if c.index_heads else 0
    shared = c.num_shared_experts * c.expert_width
    layer, mlp = "model.layers.*.self_attn.", "model.layers.*.mlp."

    def fp8(name: str, rows: int, columns: int, count: int, split: Split, is_expert: bool = False) -> Matrix:
        return Matrix(name=name, shape=(rows, columns), count=count, is_fp8=is_fp8, split=split, is_expert=is_expert)

    def plain(name: str, rows: int, columns: int, count: int, split: Split, is_read: bool = True) -> Matrix:
        return Matrix(name=name, shape=(rows, columns), count=count, is_fp8=False, split=split, is_read=is_read)

    per_head = c.plain_width + c.rope_width
    matrices = [
        plain("model.embed_tokens.weight", c.vocab_size, c.width, 1, "vocab", is_read=False),
        plain("lm_head.weight", c.vocab_size, c.width, 1, "vocab"),
        fp8(layer + "q_a_proj.weight", c.query_rank, c.width, c.num_layers, "none"),
        fp8(layer + "q_b_proj.weight", c.num_heads * per_head, c.query_rank, c.num_layers, "rows"),
        fp8(layer + "kv_a_proj_with_mqa.weight", c.latent_width + c.rope_width, c.width, c.num_layers, "none"),
        fp8(
            layer + "kv_b_proj.weight",
            c.num_heads * (c.plain_width + c.value_width),
            c.latent_width,
            c.num_layers,
            "rows",
        ),
        fp8(layer + "o_proj.weight", c.width, c.num_heads * c.value_width, c.num_layers, "columns"),
        fp8(layer + "indexer.wq_b.weight", c.index_heads * c.index_width, c.query_rank, num_index, "none"),
        fp8(layer + "indexer.wk.weight", c.index_width, c.width, num_index, "none"),
        plain(layer + "indexer.weights_proj.weight", c.index_heads, c.width, num_index, "none"),
        plain(mlp + "gate.weight", c.num_experts, c.width, num_moe, "none"),
        fp8(mlp + "gate_proj.weight", c.mlp_width, c.width, c.num_dense_layers, "rows"),
        fp8(mlp + "up_proj.weight", c.mlp_width, c.width, c.num_dense_layers, "rows"),
        fp8(mlp + "down_proj.weight", c.width, c.mlp_width, c.num_dense_layers, "columns"),
        fp8(mlp + "shared_experts.gate_proj.weight", shared, c.width, num_moe, "rows"),
        fp8(mlp + "shared_experts.up_proj.weight", shared, c.width, num_moe, "rows"),
        fp8(mlp + "shared_experts.down_proj.weight", c.width, shared, num_moe, "columns"),
        fp8(mlp + "experts.*.gate_proj.weight", c.expert_width, c.width, num_moe * c.num_experts, "rows", True),
        fp8(mlp + "experts.*.up_proj.weight", c.expert_width, c.width, num_moe * c.num_experts, "rows", True),
        fp8(mlp + "experts.*.down_proj.weight", c.width, c.expert_width, num_moe * c.num_experts, "columns", True),
    ]
    return tuple(m for m in matrices if m.count and m.elements)
