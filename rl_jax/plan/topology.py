"""Devices of a chip that is not here: a description from the compiler, and a mesh of it."""

import importlib.metadata
import importlib.util
import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils, topologies
from jax.sharding import AxisType, Mesh

from rl_jax.axes import MESH_AXES
from rl_jax.config import ConfigError
from rl_jax.mesh import MeshConfig
from rl_jax.plan.chips import Chip, gpu_target, num_devices

PACKAGES = {"tpu": ("libtpu",), "gpu": ("jax_cuda12_plugin", "jax_plugins.xla_cuda12")}
"""Platform -> modules that compile for it."""

INSTALL = (
    "make compilers, then .venv-compilers/bin/python -m rl_jax.plan (or pip install -r requirements/compilers.txt)"
)

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",  # for GPU targets too
    "TPU_SKIP_MDS_QUERY": "1",  # else libtpu asks a metadata server for the machine it is on
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "true",  # two compilers at once
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",  # these two only silence warnings, for any topology
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "CUDA_VISIBLE_DEVICES": "-1",
    "JAX_ENABLE_COMPILATION_CACHE": "false",  # the plan has its own
}
"""What a process that compiles needs before it imports JAX."""


def compiler_faults(chip: Chip) -> list[str]:
    """Return why this environment cannot compile for a chip."""
    missing = [name for name in PACKAGES[chip.platform] if importlib.util.find_spec(name.split(".")[0]) is None]
    if not missing:
        return []
    return [f"plan.chip={chip.name!r}: the compiler for it ({missing[0]}) is not installed; install it with: {INSTALL}"]


def versions() -> dict[str, str]:
    """Return the versions that decide what is compiled: they stand beside every number."""
    found = {}
    for name in ("jax", "jaxlib", "libtpu", "jax-cuda12-plugin"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = ""
    return found


def describe(chip: Chip, topology: str, num_slices: int = 1) -> Sequence[jax.Device]:  # pyright: ignore[reportInvalidTypeForm]
    """Return the devices of a topology.

    Raises:
        ConfigError: the compiler knows no such topology.
    """
    num_devices(chip, topology, num_slices)
    if chip.platform == "gpu":
        shape = f"{num_slices}x{topology}"
        return topologies.get_topology_desc(
            platform="cuda", topology_name="", target_config=gpu_target(chip), topology=shape
        ).devices
    options = {"num_slices": num_slices} if num_slices > 1 else {}
    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=f"{chip.name}:{topology}", **options).devices
    except jax.errors.JaxRuntimeError as error:
        raise ConfigError(
            [
                f"plan.topology={topology!r}: the compiler knows no such {chip.name} slice "
                f"({str(error).splitlines()[0][:160]}); known are {', '.join(chip.topologies)}"
            ]
        ) from error


def mesh_on(devices: Sequence[jax.Device], config: MeshConfig, num_slices: int = 1) -> Mesh:  # pyright: ignore[reportInvalidTypeForm]
    """Return the mesh of `config` on these devices, the axes laid along the torus; data spans slices.

    Raises:
        ConfigError: the mesh has another number of devices, or data does not divide by the slices.
    """
    shape = tuple(getattr(config, axis) for axis in MESH_AXES)
    if math.prod(shape) != len(devices):
        raise ConfigError([f"mesh: its axes multiply to {math.prod(shape)}, the topology has {len(devices)} devices"])
    explicit = (AxisType.Explicit,) * len(MESH_AXES)
    if devices[0].platform == "gpu":
        return Mesh(np.asarray(devices).reshape(shape), MESH_AXES, axis_types=explicit)
    if num_slices == 1:
        placed = mesh_utils.create_device_mesh(shape, devices=devices, allow_split_physical_axes=True)
        return Mesh(placed, MESH_AXES, axis_types=explicit)
    if config.data % num_slices:
        raise ConfigError([f"mesh.data={config.data}: must be a multiple of plan.num_slices={num_slices}"])
    inside = (config.data // num_slices, *shape[1:])
    across = (num_slices, *(1,) * (len(MESH_AXES) - 1))
    placed = mesh_utils.create_hybrid_device_mesh(inside, across, devices=devices, allow_split_physical_axes=True)
    return Mesh(placed, MESH_AXES, axis_types=explicit)
