"""One MoE training step is the same on every mesh: loss, gradients, log-probabilities, and what a checkpoint restores."""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util

from rl_jax.checkpoint import CheckpointConfig, Checkpointer
from rl_jax.losses import LossConfig, loss_sum
from rl_jax.mesh import MeshConfig, make_mesh
from rl_jax.models.architecture import Architecture
from rl_jax.models.schema import Params, abstract_params, init_params
from rl_jax.models.transformer import ForwardConfig
from rl_jax.optim import OptimConfig, make_optimizer
from rl_jax.packing import PackingConfig, pack_documents
from rl_jax.trainer.state import abstract_state, weight_roles
from rl_jax.trainer.step import Counts, Programs, put_batch
from rl_jax.types import Batch

ARCH = Architecture(
    vocab_size=30,
    width=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_width=6,
    num_experts=8,
    num_active_experts=3,
    expert_width=4,
    shared_expert_width=6,
)
MESHES = [
    MeshConfig(data=8),
    MeshConfig(fsdp=4, tensor=2),
    MeshConfig(expert=4, data=2),
    MeshConfig(fsdp=2, expert=2, tensor=2),
    MeshConfig(expert=8),
]
NUM_TOKENS = 91


@pytest.fixture(scope="module")
def batch() -> Batch:
    """Rows of two or three documents and padding, with advantages and sampler log-probabilities."""
    rng = np.random.default_rng(0)
    lengths = [11, 7, 6, 5, 5, 4, 9, 8, 4, 6, 5, 2, 12, 7]
    documents = [(rng.integers(0, 30, length).astype(np.int32), rng.random(length) < 0.8) for length in lengths]
    (batch,) = pack_documents(documents, PackingConfig(rows=8, seq_len=13))
    shape = batch.tokens_BT.shape
    return Batch(
        **vars(batch)
        | {
            "logprobs_BT": np.where(batch.mask_BT, rng.normal(-3.4, 0.3, shape), 0).astype(np.float32),
            "advantages_BT": np.where(batch.mask_BT, rng.normal(0, 1, shape), 0).astype(np.float32),
            "temperatures_BT": rng.uniform(0.6, 1.4, shape).astype(np.float32),
        }
    )


@pytest.fixture(scope="module")
def params() -> Params:
    return jax.device_get(init_params(ARCH, make_mesh(MeshConfig()), jax.random.key(1)))


def gradient_on(config: MeshConfig, batch: Batch, params: Params) -> dict[str, np.ndarray]:
    """Gradients by name, and with them the loss, the log-probabilities and the load of the experts."""
    mesh = make_mesh(config)
    programs = Programs(
        ARCH,
        ForwardConfig(head_chunk_tokens=7),
        make_optimizer(OptimConfig(), weight_roles(ARCH)),
        {"rl": partial(loss_sum, LossConfig())},
        balance_coef=0.01,
    )
    with jax.set_mesh(mesh):
        params = jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), params, abstract_params(ARCH, mesh))
        counts = Counts(num_trained=jnp.float32(batch.num_trained_tokens), num_tokens=jnp.float32(NUM_TOKENS))
        gradient, told = programs.accumulate["rl"](programs.zeros(params), params, put_batch(batch, mesh), counts)
        gradient, told = jax.device_get((gradient, told))
    return traverse_util.flatten_dict(gradient.params, sep="/") | {
        "loss": gradient.loss,
        "logp_BT": told.logp_BT,
        "load_LE": told.load_LE,
    }


@pytest.fixture(scope="module")
def on_one_device(batch: Batch, params: Params) -> dict[str, np.ndarray]:
    return gradient_on(MeshConfig(), batch, params)


@pytest.mark.parametrize("config", MESHES, ids=str)
def test_step_is_the_same_on_every_mesh(
    config: MeshConfig, batch: Batch, params: Params, on_one_device: dict[str, np.ndarray]
) -> None:
    found = gradient_on(config, batch, params)
    np.testing.assert_array_equal(found["load_LE"], on_one_device["load_LE"])
    for name, expected in on_one_device.items():
        # Only the order of float32 sums differs. An element of a gradient sums over NUM_TOKENS tokens, and each term
        # went through some 4 sums of at most 16 terms in each direction of each of the 2 layers: a random walk of
        # sqrt(104 + 16 * 16) roundings of 2**-24, relative to the largest element, with 4 standard deviations.
        tolerance = 4 * np.sqrt(NUM_TOKENS + 16 * 16) * 2**-24
        np.testing.assert_allclose(found[name], expected, rtol=0, atol=tolerance * np.abs(expected).max(), err_msg=name)


@pytest.mark.parametrize("optimizer_type", ["adamw", "muon"])
def test_checkpoint_restores_exactly_on_another_mesh(tmp_path: Path, optimizer_type: str) -> None:
    optimizer = make_optimizer(OptimConfig(type=optimizer_type), weight_roles(ARCH))
    one, many = make_mesh(MeshConfig()), make_mesh(MeshConfig(fsdp=4, tensor=2))
    noise = np.random.default_rng(3)

    def draw(like: jax.ShapeDtypeStruct) -> jax.Array:
        return jax.device_put(noise.normal(0, 9, like.shape).astype(like.dtype), like.sharding)

    state = jax.tree.map(draw, abstract_state(ARCH, optimizer, one))
    with Checkpointer(tmp_path, CheckpointConfig(), ARCH) as checkpointer:
        checkpointer.save(5, state, b"")
        checkpointer.wait()
        abstract = abstract_state(ARCH, optimizer, many)
        restored = checkpointer.restore(abstract).state
        for leaf, expected in zip(jax.tree.leaves(restored), jax.tree.leaves(abstract), strict=True):
            assert leaf.sharding == expected.sharding
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(restored), jax.device_get(state))
        checkpointer.save(6, restored, b"")
        checkpointer.wait()
        back = checkpointer.restore(abstract_state(ARCH, optimizer, one)).state
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(back), jax.device_get(state))
