"""Weights of a trainer, a checkpoint or NumPy -> the sampler's own copy on its mesh."""

from typing import cast

import jax
import jax.numpy as jnp
from flax import traverse_util
from jax.sharding import Mesh, NamedSharding

from rl_jax.axes import spec
from rl_jax.models.architecture import Architecture
from rl_jax.models.schema import Params, flat_table


def place_weights(arch: Architecture, weights: Params, dtype: jnp.dtype, mesh: Mesh) -> Params:
    """Copy weights of any float dtype, NumPy or on any mesh, to `mesh`, in `dtype` but for the float32 islands.

    The caller may donate or overwrite `weights` afterwards: nothing here is shared with them.

    Raises:
        ValueError: a weight is missing, extra or has another shape than the architecture says.
    """
    # NumPy or JAX: both have shape and astype.
    flat = cast(dict[str, jax.Array], traverse_util.flatten_dict(weights, sep="/"))
    table = flat_table(arch)
    faults = [f"{name}: missing" for name in table.keys() - flat.keys()]
    faults += [f"{name}: no such weight in this architecture" for name in flat.keys() - table.keys()]
    faults += [
        f"{name}: shape {flat[name].shape}, expected {param.sizes}"
        for name, param in table.items()
        if name in flat and flat[name].shape != param.sizes
    ]
    if faults:
        raise ValueError("weights do not fit the model: " + "; ".join(sorted(faults)))
    placed = {}
    for name, param in table.items():
        value = flat[name].astype(jnp.float32 if param.is_island else dtype)
        placed[name] = jax.device_put(value, NamedSharding(mesh, spec(param.axes)), may_alias=False)
    return traverse_util.unflatten_dict(placed, sep="/")
