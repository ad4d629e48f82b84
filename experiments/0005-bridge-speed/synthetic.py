"""A checkpoint of any size, written slice by slice: Gaussian weights in bfloat16, the shapes of a Qwen3-30B-A3B."""

import dataclasses
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from bridge.orbax_writer import WeightWriter
from rl_jax.checkpoint import Meta
from rl_jax.checksums import write_checksums
from rl_jax.models.architecture import Architecture
from rl_jax.models.schema import flat_table, num_params
from rl_jax.tokenizer import Tokenizer

BYTES = 2  # of bfloat16
SHAPE = Architecture(
    vocab_size=32_768,
    width=2048,
    num_layers=1,
    num_heads=32,
    num_kv_heads=4,
    head_width=128,
    num_experts=128,
    num_active_experts=8,
    expert_width=768,
    tie_embeddings=False,
)


def architecture(
    num_layers: int, vocab_size: int = SHAPE.vocab_size, num_experts: int = SHAPE.num_experts
) -> Architecture:
    """Return the shape with as many layers, rows of the embedding, and experts."""
    return dataclasses.replace(SHAPE, num_layers=num_layers, vocab_size=vocab_size, num_experts=num_experts)


def weight_bytes(arch: Architecture) -> int:
    """Return the bytes of all weights in bfloat16."""
    return num_params(arch) * BYTES


def write(run: Path, arch: Architecture, compress: bool = False) -> Path:
    """Write a run folder with one checkpoint and a tokenizer; return the checkpoint."""
    table = flat_table(arch)
    largest = max(int(np.prod(param.sizes[len(param.stacked) :])) for param in table.values())
    rng = np.random.default_rng(0)
    # Slices are windows of one buffer at random places: all differ, and a compressor does not see that.
    pool = (rng.standard_normal(2 * largest, np.float32) * SHAPE.width**-0.5).astype(jnp.bfloat16)
    checkpoint = run / "checkpoints" / "step_000001"
    dtypes = dict.fromkeys(table, pool.dtype)
    with WeightWriter(checkpoint / "params", table, dtypes, compress=compress) as writer:
        for key, param in table.items():
            inner = param.sizes[len(param.stacked) :]
            size = int(np.prod(inner))
            for index in np.ndindex(*param.sizes[: len(param.stacked)]):
                start = int(rng.integers(largest))
                writer.write(key, index, pool[start : start + size].reshape(inner))
    meta = Meta(step=1, architecture=arch, config_hash="", holds="weights")
    (checkpoint / "meta").mkdir()
    (checkpoint / "meta" / "metadata").write_text(json.dumps(dataclasses.asdict(meta)))
    write_checksums(checkpoint)
    Tokenizer.byte_level().save(run / "tokenizer")
    return checkpoint
