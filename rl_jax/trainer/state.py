"""What a training step changes: parameters, optimizer state and the step count, one record, sharded on the mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rl_jax.mesh import to_mesh
from rl_jax.models.architecture import Architecture
from rl_jax.models.schema import Param, Params, abstract_params, parameter_table
from rl_jax.optim import Role


@struct.dataclass
class TrainState:
    """The state of the trainer: arrays on the mesh, NumPy once read back, or shapes.

    Example: after the third step, step=3, and the weights are policy version 3.
    """

    params: Params
    """float32 masters, keys of the parameter table."""
    opt_state: optax.OptState
    """float32 moments, sharded like their parameters (Muon's: see optim.py), and int32 counts."""
    step: jax.Array | np.ndarray | jax.ShapeDtypeStruct
    """int32, steps taken."""


def weight_roles(arch: Architecture) -> object:
    """Return the tree of optim.Role of an architecture, from its parameter table."""
    return jax.tree.map(_role, parameter_table(arch), is_leaf=lambda node: isinstance(node, Param))


def init_state(optimizer: optax.GradientTransformation, params: Params, mesh: Mesh) -> TrainState:
    """Return the state of step 0 around `params`, which it takes over: the first step donates them."""
    with jax.set_mesh(mesh):
        opt_state = jax.jit(optimizer.init)(params)
    step = to_mesh(np.zeros((), np.int32), mesh, PartitionSpec())
    return TrainState(params=params, opt_state=opt_state, step=step)


def abstract_state(arch: Architecture, optimizer: optax.GradientTransformation, mesh: Mesh) -> TrainState:
    """Return the state as ShapeDtypeStructs with their shardings on `mesh`: what a checkpoint restores into."""
    params = abstract_params(arch, mesh)
    with jax.set_mesh(mesh):
        opt_state = jax.eval_shape(optimizer.init, params)

    def on_mesh(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        spec = PartitionSpec() if leaf.sharding is None else leaf.sharding.spec
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    step = on_mesh(jax.ShapeDtypeStruct((), jnp.int32))
    return TrainState(params=params, opt_state=jax.tree.map(on_mesh, opt_state), step=step)


def _role(param: Param) -> Role:
    """A matrix is what Hugging Face stores as one, the router, embedding and head excepted."""
    letters = param.axes.split()
    is_matrix = param.init == "normal" and not param.is_island and "V" not in letters
    inputs = tuple(i for i, letter in enumerate(letters) if letter in param.fan_in)
    outputs = tuple(i for i, letter in enumerate(letters) if letter not in (*param.fan_in, *param.stacked))
    sides = (inputs, outputs) if is_matrix else ((), ())
    return Role(axes=param.axes, is_decayed=param.init == "normal", inputs=sides[0], outputs=sides[1])
