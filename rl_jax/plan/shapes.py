"""Mesh shapes of a number of devices: which are legal, and which promise most, before anything is compiled."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from rl_jax import cli
from rl_jax.axes import MESH_AXES, RULES
from rl_jax.config import ConfigError
from rl_jax.mesh import MeshConfig
from rl_jax.models.architecture import Architecture
from rl_jax.models.schema import flat_table
from rl_jax.plan.chips import Chip
from rl_jax.plan.config import PlanConfig, num_micro_batches, run_of, with_mesh


@dataclass(frozen=True, kw_only=True)
class Prior:
    """What arithmetic says of a shape."""

    mesh: MeshConfig
    least_bytes: float
    """Of a device: parameters, optimizer, gradient, and the layers' inputs that full remat keeps. More is certain."""
    wire_bytes: float
    """That a device sends in a step, roughly: only to choose what to compile first."""


def all_shapes(num_devices: int) -> Iterator[MeshConfig]:
    """Yield every mesh of this many devices."""

    def split(left: int, axes: tuple[str, ...]) -> Iterator[dict[str, int]]:
        if len(axes) == 1:
            yield {axes[0]: left}
            return
        for size in (n for n in range(1, left + 1) if left % n == 0):
            for rest in split(left // size, axes[1:]):
                yield {axes[0]: size} | rest

    for sizes in split(num_devices, MESH_AXES):
        yield MeshConfig(**sizes)


def shape_faults(config: PlanConfig, arch: Architecture) -> list[str]:
    """Return what the mesh of a config does not divide, the batch of a step among it."""
    try:
        cli.check(run_of(config), arch, "sft")
        faults = []
    except ConfigError as error:
        faults = list(error.faults)
    batch, rows = config.plan.batch, config.packing.rows
    if batch % rows:
        near = sorted({max(rows, batch // rows * rows), -(-batch // rows) * rows})
        faults.append(
            f"plan.batch={batch}: the mesh takes micro-batches of {rows} rows (data*fsdp*expert*plan.rows_per_shard); "
            f"try {' or '.join(map(str, near))}"
        )
    return faults


def sweep(config: PlanConfig, arch: Architecture, chip: Chip) -> tuple[list[Prior], list[tuple[MeshConfig, str]]]:
    """Return the legal shapes that may fit, most promising first, and all others with the reason."""
    found, refused = [], []
    for mesh in all_shapes(config.plan.num_devices):
        shaped = with_mesh(config, mesh)
        faults = shape_faults(shaped, arch)
        if config.plan.num_slices > 1 and mesh.data % config.plan.num_slices:
            faults.append(f"mesh.data={mesh.data}: must be a multiple of plan.num_slices={config.plan.num_slices}")
        one = prior(shaped, arch)
        if faults:
            refused.append((mesh, faults[0]))
        elif one.least_bytes > chip.memory_bytes:
            gib, limit = one.least_bytes / 2**30, chip.memory_bytes / 2**30
            refused.append((mesh, f"state and layer inputs alone need {gib:.1f} GiB of {limit:.1f}"))
        else:
            found.append(one)
    return sorted(found, key=lambda prior: prior.wire_bytes), refused


def prior(config: PlanConfig, arch: Architecture) -> Prior:
    """Return what arithmetic says of the config's mesh."""
    mesh, micro_batches = config.mesh, num_micro_batches(config)
    sizes = {axis: getattr(mesh, axis) for axis in MESH_AXES}
    held, gathered = 0.0, 0.0
    for param in flat_table(arch).values():
        axes = [axis for letter in param.axes.split() for axis in RULES.get(letter, ())]
        size = math.prod(param.sizes)
        held += size / math.prod(sizes[axis] for axis in axes)
        gathered += size / math.prod(sizes[axis] for axis in axes if axis != "fsdp")
    tokens = config.packing.rows * config.packing.seq_len * mesh.tensor / mesh.num_devices
    activations = 2.0 * arch.num_layers * tokens * arch.width * (config.forward.remat == "full")
    return Prior(
        mesh=mesh,
        least_bytes=16.0 * held + activations,
        wire_bytes=micro_batches * (_weight_bytes(mesh, gathered, held) + _token_bytes(arch, mesh, tokens)),
    )


def _weight_bytes(mesh: MeshConfig, gathered: float, held: float) -> float:
    """Two gathers and one scatter in bfloat16 over fsdp; a sum in float32 over data."""
    return 6.0 * gathered * (1 - 1 / mesh.fsdp) + 8.0 * held * (1 - 1 / mesh.data)


def _token_bytes(arch: Architecture, mesh: MeshConfig, tokens: float) -> float:
    """Of all layers: keys and values over context, rows over the experts' devices, sums over tensor."""
    shards = mesh.expert * mesh.context
    context = 3 * 4.0 * arch.num_kv_heads / mesh.tensor * arch.head_width * (mesh.context - 1)
    experts = 4 * 4.0 * arch.num_active_experts * arch.width * (1 - 1 / shards)
    tensor = 4 * 8.0 * arch.width * (1 - 1 / mesh.tensor)
    return arch.num_layers * tokens * (context + experts + tensor)
