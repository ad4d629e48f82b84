"""The training step of a run as programs to compile: the trainer's own functions, abstract arguments, a mesh."""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rl_jax.axes import BATCH_AXES, ROWS
from rl_jax.cli import RunConfig
from rl_jax.losses import loss_sum
from rl_jax.models.architecture import Architecture
from rl_jax.optim import make_optimizer
from rl_jax.trainer.state import TrainState, abstract_state, weight_roles
from rl_jax.trainer.step import Counts, Gradient, MicroBatch, Programs


def lower(config: RunConfig, arch: Architecture, mesh: Mesh) -> dict[str, Any]:
    """Return the lowered programs of a step: "accumulate", run for each micro-batch, and "apply", run once."""
    optimizer = make_optimizer(config.optim, weight_roles(arch))
    trainer = config.trainer
    programs = Programs(
        arch,
        config.forward,
        optimizer,
        {"rl": partial(loss_sum, config.loss)},
        trainer.balance_coef,
        trainer.z_coef,
        trainer.router_bias_rate,
    )
    state = abstract_state(arch, optimizer, mesh)
    with jax.set_mesh(mesh):
        gradient = _on_mesh(jax.eval_shape(programs.zeros, state.params), mesh)
        batch, counts = abstract_batch(config, arch, mesh), _counts(mesh)
        return {
            "accumulate": programs.accumulate["rl"].trace(gradient, state.params, batch, counts).lower(),
            "apply": programs.apply.trace(state, gradient).lower(),
        }


def abstract_batch(config: RunConfig, arch: Architecture, mesh: Mesh) -> MicroBatch:
    """Return a micro-batch of shapes, with what the config's features add to it."""
    shape = (config.packing.rows, config.packing.seq_len)

    def rows(dtype: Any) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, ROWS))

    forced = None
    if config.trainer.router_replay:
        spec = PartitionSpec(None, BATCH_AXES, None, None)
        size = (arch.num_layers, *shape, arch.num_active_experts)
        forced = jax.ShapeDtypeStruct(size, jnp.int32, sharding=NamedSharding(mesh, spec))
    return MicroBatch(
        tokens_BT=rows(jnp.int32),
        targets_BT=rows(jnp.int32),
        positions_BT=rows(jnp.int32),
        segments_BT=rows(jnp.int32),
        mask_BT=rows(jnp.bool_),
        logprobs_BT=rows(jnp.float32),
        advantages_BT=rows(jnp.float32),
        temperatures_BT=rows(jnp.float32),
        ref_logp_BT=rows(jnp.float32) if config.loss.ref_kl_coef else None,
        forced_LBTA=forced,  # pyright: ignore[reportArgumentType]
    )


def held_bytes(config: RunConfig, arch: Architecture, mesh: Mesh) -> dict[str, int]:
    """Return what a device holds between programs: parameters, optimizer, gradient, from shapes and shardings."""
    optimizer = make_optimizer(config.optim, weight_roles(arch))
    state: TrainState = abstract_state(arch, optimizer, mesh)
    return {
        "params_bytes": _device_bytes(state.params),
        "optimizer_bytes": _device_bytes(state.opt_state),
        "gradient_bytes": _device_bytes(state.params),
    }


def _device_bytes(tree: object) -> int:
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _counts(mesh: Mesh) -> Counts:
    scalar: Any = jax.ShapeDtypeStruct((), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec()))
    return Counts(num_trained=scalar, num_tokens=scalar)


def _on_mesh(tree: Gradient, mesh: Mesh) -> Any:
    def placed(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        spec = PartitionSpec() if leaf.sharding is None else leaf.sharding.spec
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(placed, tree)
