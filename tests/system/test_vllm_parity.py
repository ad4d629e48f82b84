"""Log-probabilities of real text: this trainer, vLLM and transformers agree in float32 on all families.

Tied and untied heads, grouped queries, odd sizes, one file and many; prompts up to 4,096 tokens.
"""

import functools
import json
import os
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bridge import hf
from bridge.verify_vllm import ENVIRONMENT
from rl_jax.axes import ROWS
from rl_jax.mesh import MeshConfig, make_mesh, to_mesh
from rl_jax.models.architecture import Architecture, read_architecture
from rl_jax.models.context import packed_attention
from rl_jax.models.head import head_weight, token_logprobs
from rl_jax.models.schema import Params
from rl_jax.models.transformer import ForwardConfig, decoder
from rl_jax.models.zigzag import gather, spread

ROOT = Path(__file__).resolve().parents[2]
FLEET_PYTHON = ROOT / ".venv-fleet/bin/python"
NAMES = ("llama", "llama-tied", "qwen3", "qwen3-tied", "qwen3-moe", "qwen3-moe-tied")
TEXTS = ("docs/walk.md", "docs/configuration.md")
TOLERANCE = 2e-5
FORWARD = ForwardConfig()

pytestmark = pytest.mark.skipif(not FLEET_PYTHON.is_file(), reason="needs the fleet environment: make fleet")


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each model, with the scores of vLLM and transformers."""
    out = tmp_path_factory.mktemp("parity")
    command = [str(FLEET_PYTHON), str(ROOT / "tests/fleet/parity.py"), str(out), *(str(ROOT / text) for text in TEXTS)]
    environment = {**os.environ, **ENVIRONMENT}
    run = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=environment)
    assert run.returncode == 0, (run.stdout + run.stderr)[-4000:]
    return out


@functools.partial(jax.jit, static_argnums=0)
def scores_of(arch: Architecture, params: Params, tokens_BT: jax.Array) -> jax.Array:
    segments_BT = jnp.ones_like(tokens_BT)
    rows = (tokens_BT, jnp.roll(tokens_BT, -1, 1), jnp.cumsum(segments_BT, 1) - 1, segments_BT)
    tokens_BT, targets_BT, positions_BT, segments_BT = map(spread, rows)
    decoded = decoder(arch, FORWARD, params, tokens_BT, positions_BT, packed_attention(segments_BT, positions_BT))
    head_VD = head_weight(arch, params, jnp.dtype(jnp.float32))
    ones_BT = jnp.ones_like(tokens_BT, jnp.float32)
    return gather(token_logprobs(decoded.hidden_BTD, head_VD, targets_BT, ones_BT, 1024)[0])


@pytest.mark.parametrize("name", NAMES)
def test_trainer_vllm_and_transformers_agree(scored: Path, name: str):
    folder = scored / name
    arch, mesh = read_architecture(folder), make_mesh(MeshConfig())
    params = hf.load_params(folder, arch, mesh)
    prompts, scores = (json.loads((folder / file).read_text()) for file in ("prompts.json", "scores.json"))
    with jax.set_mesh(mesh):
        for prompt, by_vllm, by_transformers in zip(prompts, scores["vllm"], scores["transformers"], strict=True):
            padded = np.zeros((1, -(-len(prompt) // 64) * 64), np.int32)  # later tokens change no earlier score
            padded[0, : len(prompt)] = prompt
            tokens_BT = to_mesh(padded, mesh, ROWS)
            ours = np.asarray(scores_of(arch, params, tokens_BT))[0, : len(prompt) - 1]
            assert np.abs(ours - by_vllm).max() < TOLERANCE
            assert np.abs(ours - by_transformers).max() < TOLERANCE
            assert len(prompt) < 9 or np.std(ours) > 0.1, "a flat model would agree with anything"
