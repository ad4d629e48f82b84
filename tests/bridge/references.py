"""What the bridge is compared with: FP8 in float64 by a table of all codes, layouts by einsum, small checkpoints."""

import dataclasses
import json
from pathlib import Path

import ml_dtypes
import numpy as np

from bridge.orbax_writer import WeightWriter
from rl_jax.checkpoint import Meta
from rl_jax.models.architecture import Architecture
from rl_jax.models.schema import flat_table
from rl_jax.tokenizer import Tokenizer

CODES = np.arange(0x7F, dtype=np.uint8)
VALUES = CODES.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
"""All magnitudes of e4m3, ascending: 0 to 448."""
MIDPOINTS = (VALUES[1:] + VALUES[:-1]) / 2

MOE = Architecture(
    vocab_size=37,
    width=160,
    num_layers=2,
    num_heads=8,
    num_kv_heads=4,
    head_width=32,
    num_experts=3,
    num_active_experts=2,
    expert_width=128,
    tie_embeddings=False,
    max_positions=512,
)
"""Every matrix that vLLM stacks has whole blocks of rows; columns are ragged."""
DENSE = Architecture(
    family="llama",
    vocab_size=53,
    width=96,
    num_layers=3,
    num_heads=6,
    num_kv_heads=2,
    head_width=16,
    mlp_width=136,
    qk_norm=False,
    attention_bias=True,
)
"""No matrix that vLLM stacks has whole blocks of rows."""


def reference_scale(amax: np.ndarray | float) -> np.ndarray:
    """Return the smallest powers of two that bring max(amax, 1e-12) to at most 448, by trying all."""
    powers = 2.0 ** np.arange(-60.0, 125.0)
    return powers[np.searchsorted(448.0 * powers, np.maximum(amax, 1e-12))]


def reference_codes(ratio: np.ndarray) -> np.ndarray:
    """Return the codes (uint8) nearest to float64 numbers of at most 448, ties to the even code, signed zeros kept."""
    below = np.searchsorted(MIDPOINTS, np.abs(ratio), side="left")
    is_tie = (below < len(MIDPOINTS)) & (np.abs(ratio) == MIDPOINTS[np.minimum(below, len(MIDPOINTS) - 1)])
    code = below + (is_tie & (below % 2 == 1))
    return (code | np.where(np.signbit(ratio), 0x80, 0)).astype(np.uint8)


def reference_quantise(w_NK: np.ndarray, rows: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Return codes (uint8) and scales of a matrix by loops over its blocks."""
    exact_NK = w_NK.astype(np.float64)
    high, wide = -(-w_NK.shape[0] // rows), -(-w_NK.shape[1] // columns)
    codes, scales = np.zeros(w_NK.shape, np.uint8), np.zeros((high, wide), np.float32)
    for i in range(high):
        for j in range(wide):
            at = np.s_[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
            scales[i, j] = reference_scale(np.abs(exact_NK[at]).max())
            codes[at] = reference_codes(exact_NK[at] / np.float64(scales[i, j]))
    return codes, scales


def hf_matrices(arch: Architecture, params: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the Hugging Face tensors of a model in float32, each written out by hand."""
    out = {"model.embed_tokens.weight": params["embed_VD"], "model.norm.weight": params["final_norm_D"]}
    if not arch.tie_embeddings:
        out["lm_head.weight"] = params["unembed_VD"]
    for i in range(arch.num_layers):
        one = {key.removeprefix("layers/"): value[i] for key, value in params.items() if key.startswith("layers/")}
        at = f"model.layers.{i}."
        out[at + "input_layernorm.weight"] = one["attention_norm_LD"]
        out[at + "post_attention_layernorm.weight"] = one["mlp_norm_LD"]
        out |= {at + "self_attn." + name: value for name, value in _attention(arch, one).items()}
        out |= {at + "mlp." + name: value for name, value in _mlp(arch, one).items()}
    return out


def _attention(arch: Architecture, one: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    width = arch.width
    out = {
        "q_proj.weight": np.einsum("dkqh->kqhd", one["wq_LDKQH"]).reshape(-1, width),
        "k_proj.weight": np.einsum("dkh->khd", one["wk_LDKH"]).reshape(-1, width),
        "v_proj.weight": np.einsum("dkh->khd", one["wv_LDKH"]).reshape(-1, width),
        "o_proj.weight": np.einsum("kqhd->dkqh", one["wo_LKQHD"]).reshape(width, -1),
    }
    if arch.qk_norm:
        out |= {"q_norm.weight": one["q_norm_LH"], "k_norm.weight": one["k_norm_LH"]}
    if arch.attention_bias:
        names = {"q_proj.bias": "bq_LKQH", "k_proj.bias": "bk_LKH", "v_proj.bias": "bv_LKH", "o_proj.bias": "bo_LD"}
        out |= {name: one[key].reshape(-1) for name, key in names.items()}
    return out


def _mlp(arch: Architecture, one: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    if not arch.num_experts:
        keys = {"gate_proj.weight": "gate_LDF", "up_proj.weight": "up_LDF", "down_proj.weight": "down_LFD"}
        return {name: one[key].T for name, key in keys.items()}
    out = {"gate.weight": one["router_LDE"].T}
    for e in range(arch.num_experts):
        keys = {"gate_proj.weight": "gate_LEDF", "up_proj.weight": "up_LEDF", "down_proj.weight": "down_LEFD"}
        out |= {f"experts.{e}.{name}": one[key][e].T for name, key in keys.items()}
    return out


def draw_params(arch: Architecture, seed: int = 0) -> dict[str, np.ndarray]:
    """Return float32 weights by the table's flat keys; no two elements are likely to be equal."""
    rng = np.random.default_rng(seed)
    return {key: rng.normal(0, 0.1, param.sizes).astype(np.float32) for key, param in flat_table(arch).items()}


def write_checkpoint(run: Path, arch: Architecture, params: dict[str, np.ndarray], step: int = 7) -> Path:
    """Write a folder like that of a run, with weights and a byte-level tokenizer; return its checkpoint."""
    folder = run / "checkpoints" / f"step_{step:06d}"
    table = flat_table(arch)
    with WeightWriter(folder / "params", table, {key: params[key].dtype for key in table}) as writer:
        for key, value in params.items():
            for index in np.ndindex(*value.shape[: len(table[key].stacked)]):
                writer.write(key, index, value[index])
    meta = Meta(step=step, architecture=arch, config_hash="", holds="weights")
    (folder / "meta").mkdir()
    (folder / "meta" / "metadata").write_text(json.dumps(dataclasses.asdict(meta)))
    Tokenizer.byte_level().save(run / "tokenizer")
    return folder


def load_safetensors(path: Path) -> dict[str, np.ndarray]:
    """Read a file by its format's definition; the NumPy reader of safetensors knows no FP8."""
    words = {"F32": np.float32, "BF16": ml_dtypes.bfloat16, "F8_E4M3": ml_dtypes.float8_e4m3fn}
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header.pop("__metadata__")
    tensors, end = {}, start
    for name, entry in header.items():
        at, until = (start + offset for offset in entry["data_offsets"])
        assert at == end, f"{name}: the format allows no holes"
        end = until
        tensors[name] = np.frombuffer(data[at:until], words[entry["dtype"]]).reshape(entry["shape"])
    assert end == len(data)
    return tensors
