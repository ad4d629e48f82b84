"""The device mesh: its config, its creation with explicit axes, and host arrays onto it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax import Device
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from rl_jax.axes import MESH_AXES
from rl_jax.config import refuse


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Sizes of the mesh axes; their product is the number of devices used."""

    data: int = 1
    """Replicas of the parameters; the batch is split over them."""
    fsdp: int = 1
    """Shards of parameters and optimizer state over the model width; the batch is split over them too."""
    expert: int = 1
    """Shards of the experts; outside the experts the batch is split over them."""
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
    """Make the mesh of `config` from the first devices of `devices` (default: all).

    Raises:
        ValueError: if there are too few devices.
    """
    devices = list(jax.devices() if devices is None else devices)
    if len(devices) < config.num_devices:
        raise ValueError(
            f"mesh {config} needs {config.num_devices} devices, but there are {len(devices)} ({devices[0].platform}); "
            "make an axis smaller (on CPU: JAX_NUM_CPU_DEVICES=8 emulates eight)"
        )
    shape = tuple(getattr(config, axis) for axis in MESH_AXES)
    return jax.make_mesh(shape, MESH_AXES, (AxisType.Explicit,) * len(MESH_AXES), devices=devices[: config.num_devices])


def to_mesh(array: np.ndarray, mesh: Mesh, spec: PartitionSpec) -> jax.Array:
    """Put a host array, whole on every process, onto the mesh; each process copies its own shards only."""
    return jax.make_array_from_callback(array.shape, NamedSharding(mesh, spec), lambda index: array[index])
