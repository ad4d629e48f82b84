"""The device mesh: its config, its creation with explicit axes, and host arrays onto it."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import jax
import numpy as np
import numpy.typing as npt
from jax import Device
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from rl_jax.axes import MESH_AXES
from rl_jax.config import refuse

T = TypeVar("T")

GATHER_BYTES = 1 << 30
"""Arrays of weights up to this size are gathered from several processes whole."""


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Sizes of the mesh axes; their product is the number of devices used."""

    data: int = 1
    """Replicas of the parameters; the batch is split over them."""
    fsdp: int = 1
    """Shards of parameters and optimizer state over the model width; the batch is split over them too."""
    expert: int = 1
    """Shards of the experts; outside the experts the batch is split over them."""
    context: int = 1
    """Shards of the tokens of a row; the experts are split over expert * context, so with expert = 1 the same devices
    share sequences in attention and experts in MoE."""
    tensor: int = 1
    """Shards of heads, MLP width and vocabulary."""

    def __post_init__(self) -> None:
        refuse(f"{a}={getattr(self, a)}: must be at least 1" for a in MESH_AXES if getattr(self, a) < 1)

    @property
    def num_devices(self) -> int:
        """Devices that this mesh needs."""
        return math.prod(getattr(self, axis) for axis in MESH_AXES)

    @property
    def num_batch_shards(self) -> int:
        """Ways in which the rows of a batch are split."""
        return self.data * self.fsdp * self.expert


def make_mesh(config: MeshConfig, devices: Sequence[Device] | None = None) -> Mesh:  # pyright: ignore[reportInvalidTypeForm]
    """Make the mesh of `config` from the first devices of `devices` (default: all, of all processes).

    Raises:
        ValueError: if there are too few devices, or if some of several processes would have none.
    """
    if devices is None and jax.process_count() > 1 and jax.device_count() != config.num_devices:
        held = [sum(d.process_index == p for d in jax.devices()) for p in range(jax.process_count())]
        told = ", ".join(f"process {p}: {count}" for p, count in enumerate(held))
        raise ValueError(
            f"mesh {config} needs {config.num_devices} devices, but the {len(held)} processes together have "
            f"{sum(held)} ({told}), and all of them must be in it; change an axis or hosts.num_processes"
        )
    devices = list(jax.devices() if devices is None else devices)
    if len(devices) < config.num_devices:
        raise ValueError(
            f"mesh {config} needs {config.num_devices} devices, but there are {len(devices)} ({devices[0].platform}); "
            "make an axis smaller (on CPU: JAX_NUM_CPU_DEVICES=8 emulates eight)"
        )
    shape = tuple(getattr(config, axis) for axis in MESH_AXES)
    return jax.make_mesh(shape, MESH_AXES, (AxisType.Explicit,) * len(MESH_AXES), devices=devices[: config.num_devices])


def place(array: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Put an array, whole on a device of every process, onto the mesh."""
    if sharding.is_fully_addressable:
        return jax.device_put(array, sharding)
    host_array = np.asarray(array)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: host_array[index])


def to_host(tree: T) -> T:
    """Copy arrays to the host, whole; those that lie on several processes are gathered, so all must call this together.

    Moves, where an array is sharded over processes, its size to every device for a moment.
    """
    return jax.device_get(jax.tree.map(_whole, tree))


def to_first_host(tree: T, mesh: Mesh) -> T:
    """Copy arrays on the mesh to the host of process 0, one after the other; elsewhere None stands for each.

    An array larger than GATHER_BYTES is gathered by slices of its first dimension that is not sharded: weights of a layer.
    A mesh of one process is left alone.
    """
    if not mesh.is_multi_process:
        return tree
    return jax.tree.map(_to_first_host, tree)


def _to_first_host(array: jax.Array) -> np.ndarray | None:
    is_first = jax.process_index() == 0
    parts = (*array.sharding.spec, *[None] * array.ndim)[: array.ndim]  # type: ignore[attr-defined]
    if array.nbytes <= GATHER_BYTES or None not in parts:
        whole = jax.device_get(_whole(array))
        return whole if is_first else None
    dim = parts.index(None)
    found = np.empty(array.shape, array.dtype) if is_first else None
    for i in range(array.shape[dim]):
        piece = jax.device_get(_whole_slice(array, i, dim))
        if found is not None:
            found[(*[slice(None)] * dim, i)] = piece
    return found


@functools.partial(jax.jit, static_argnums=2)
def _whole_slice(array: jax.Array, i: int | jax.Array, dim: int) -> jax.Array:
    piece = jax.lax.dynamic_index_in_dim(array, i, dim, keepdims=False)
    return jax.sharding.reshard(piece, NamedSharding(jax.typeof(array).sharding.mesh, PartitionSpec()))


def _whole(array: jax.Array) -> jax.Array:
    """Gather an array that lies on several processes; all of them must call this."""
    if array.is_fully_addressable or array.is_fully_replicated:
        return array
    sharding = NamedSharding(array.sharding.mesh, PartitionSpec())  # type: ignore[attr-defined]
    return jax.device_put(array, sharding)


def to_mesh(array: np.ndarray, mesh: Mesh, spec: PartitionSpec, dtype: npt.DTypeLike | None = None) -> jax.Array:
    """Put a host array onto the mesh, as `dtype` if one is given; each process reads and copies its own shards only."""

    def shard(index: tuple[slice, ...] | None) -> np.ndarray:
        return np.asarray(array[() if index is None else index], dtype)

    return jax.make_array_from_callback(array.shape, NamedSharding(mesh, spec), shard)
