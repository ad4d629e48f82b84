"""Rows shared out over the context axis: a step is that of each sequence alone, unpacked, on one device.

Mixture of experts and dense, on eight emulated devices: loss, gradients, log-probabilities, and the load of the experts
under router replay and the balance loss. Packed sequences cross the borders of chunks and of shards.
"""

import functools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from rl_jax.axes import ROWS
from rl_jax.losses import LossConfig, loss_sum
from rl_jax.mesh import MeshConfig, make_mesh, to_mesh
from rl_jax.models.architecture import Architecture
from rl_jax.models.schema import Params, abstract_params, flat, init_params
from rl_jax.models.transformer import ForwardConfig
from rl_jax.optim import OptimConfig, make_optimizer
from rl_jax.packing import PackingConfig, pack_documents
from rl_jax.trainer.state import weight_roles
from rl_jax.trainer.step import Counts, Programs, put_batch
from rl_jax.types import Batch

MOE = Architecture(
    vocab_size=30,
    width=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_width=6,
    num_experts=24,
    num_active_experts=3,
    expert_width=4,
    shared_expert_width=6,
    router_scores="sigmoid",
    router_bias=True,
    num_expert_groups=4,
    num_active_groups=2,
    routed_scaling=1.5,
)
DENSE = Architecture(
    family="qwen3", vocab_size=30, width=16, num_layers=2, num_heads=6, num_kv_heads=2, head_width=4, mlp_width=10
)
CASES = [
    (MeshConfig(context=8), {"dispatch": "capacity", "dispatch_buffer": 24.0}),
    (MeshConfig(context=3), {"attention": "blockwise", "attention_block_tokens": 5}),
    (
        MeshConfig(context=4, tensor=2),
        {"attention": "blockwise", "context_attention": "ring", "dispatch": "all_to_all"},
    ),
    (MeshConfig(expert=2, context=4), {"grouped_matmul": "ragged", "remat": "dots"}),
    (MeshConfig(data=2, context=2, tensor=2), {"dispatch": "ragged_all_to_all"}),
    (
        MeshConfig(fsdp=2, expert=2, context=2),
        {"context_attention": "ulysses", "dispatch": "all_to_all", "remat": "full"},
    ),
]
LENGTHS = (37, 29, 23, 19, 17, 13, 11, 10, 7, 5, 3)
PACKED = PackingConfig(rows=4, seq_len=48)
ALONE = PackingConfig(rows=1, seq_len=37)


def tokens_of(document: int) -> np.random.Generator:
    return np.random.default_rng((7, document))


def documents() -> list[tuple[np.ndarray, np.ndarray]]:
    draws = [tokens_of(i) for i in range(len(LENGTHS))]
    return [
        (rng.integers(0, 30, n).astype(np.int32), rng.random(n) < 0.8) for rng, n in zip(draws, LENGTHS, strict=True)
    ]


def batches(config: PackingConfig) -> list[Batch]:
    """The documents with sampler log-probabilities and advantages that depend on document and position only."""
    return [_with_samples(batch) for batch in pack_documents(documents(), config)]


def by_token(batch: Batch, draw: np.ndarray) -> np.ndarray:
    """Look up draw[document, position, ...] for each token, 0 in padding."""
    found = draw[batch.rollouts_BT, batch.positions_BT]
    return np.where((batch.segments_BT > 0).reshape(*batch.segments_BT.shape, *(1,) * (found.ndim - 2)), found, 0)


def _with_samples(batch: Batch) -> Batch:
    rng, shape = np.random.default_rng(2), (len(LENGTHS), max(LENGTHS))
    logprobs, advantages, temperatures = (
        rng.normal(-3.4, 0.3, shape),
        rng.normal(size=shape),
        rng.uniform(0.6, 1.4, shape),
    )
    return Batch(
        **vars(batch)
        | {
            "logprobs_BT": np.where(batch.mask_BT, by_token(batch, logprobs), 0).astype(np.float32),
            "advantages_BT": np.where(batch.mask_BT, by_token(batch, advantages), 0).astype(np.float32),
            "temperatures_BT": np.where(batch.segments_BT > 0, by_token(batch, temperatures), 1).astype(np.float32),
        }
    )


def routes(arch: Architecture, batch: Batch) -> np.ndarray:
    """Experts [L, B, T, A] to replay: two thirds of the tokens are forced, the others free (-1)."""
    rng = np.random.default_rng(3)
    shape = (len(LENGTHS), max(LENGTHS), arch.num_layers, arch.num_experts)
    chosen = np.argsort(rng.random(shape), axis=-1)[..., : arch.num_active_experts]
    chosen = np.where(rng.random(shape[:2])[..., None, None] < 2 / 3, chosen, -1)
    return np.moveaxis(by_token(batch, chosen), 2, 0).astype(np.int32)


@functools.cache
def params_of(arch: Architecture) -> Params:
    return jax.device_get(init_params(arch, make_mesh(MeshConfig()), jax.random.key(1)))


def step_on(
    mesh_config: MeshConfig, arch: Architecture, forward: ForwardConfig, packing: PackingConfig
) -> dict[str, np.ndarray]:
    """Gradients by name, and with them the loss, the load, and log-probabilities by document and position."""
    mesh, split = make_mesh(mesh_config), batches(packing)
    programs = Programs(
        arch,
        forward,
        make_optimizer(OptimConfig(), weight_roles(arch)),
        {"rl": partial(loss_sum, LossConfig(entropy_coef=0.1))},
        balance_coef=0.3 if arch.num_experts else 0.0,
        z_coef=0.2 if arch.num_experts else 0.0,
    )
    logp, load = np.zeros((len(LENGTHS), max(LENGTHS))), 0
    with jax.set_mesh(mesh):
        params = jax.tree.map(
            lambda x, like: jax.device_put(x, like.sharding), params_of(arch), abstract_params(arch, mesh)
        )
        trained = sum(batch.num_trained_tokens for batch in split)
        counts = Counts(num_trained=jnp.float32(trained), num_tokens=jnp.float32(sum(LENGTHS)))
        gradient = programs.zeros(params)
        for batch in split:
            forced = to_mesh(routes(arch, batch), mesh, PartitionSpec(None, *ROWS)) if arch.num_experts else None
            micro = put_batch(batch, mesh, forced_LBTA=forced)
            gradient, told = programs.accumulate["rl"](gradient, params, micro, counts)
            is_real = batch.segments_BT > 0
            logp[batch.rollouts_BT[is_real], batch.positions_BT[is_real]] = np.asarray(told.logp_BT)[is_real]
            load = load + (np.asarray(told.load_LE) if arch.num_experts else 0)
        gradient = jax.device_get(gradient)
    return flat(gradient.params) | {"loss": gradient.loss, "logp": logp, "load": np.asarray(load)}


@functools.cache
def alone(arch: Architecture) -> dict[str, np.ndarray]:
    return step_on(MeshConfig(), arch, ForwardConfig(grouped_matmul="dense"), ALONE)


def check(mesh_config: MeshConfig, arch: Architecture, forward: ForwardConfig) -> None:
    found, expected = step_on(mesh_config, arch, forward, PACKED), alone(arch)
    for name in expected:
        # Only the order of float32 sums differs, as in test_mesh_parity.py: a walk of sqrt(tokens + 16 * 16) roundings
        # of 2**-24, relative to the largest element, with 4 standard deviations.
        tolerance = 4 * np.sqrt(sum(LENGTHS) + 16 * 16) * 2**-24
        atol = tolerance * np.abs(expected[name]).max()
        np.testing.assert_allclose(found[name], expected[name], rtol=0, atol=atol, err_msg=name)


@pytest.mark.parametrize(("mesh_config", "forward"), CASES, ids=str)
def test_moe_step_is_that_of_each_sequence_alone(mesh_config: MeshConfig, forward: dict) -> None:
    check(mesh_config, MOE, ForwardConfig(head_chunk_tokens=7, **forward))


def test_dense_step_is_that_of_each_sequence_alone() -> None:
    check(MeshConfig(data=2, context=3), DENSE, ForwardConfig(head_chunk_tokens=7, context_attention="ring"))
