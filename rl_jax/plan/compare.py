"""Which mesh shapes a plan compiles, and what it found of each."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from rl_jax.config import ConfigError, refuse
from rl_jax.models.architecture import Architecture
from rl_jax.plan import report
from rl_jax.plan.chips import Chip
from rl_jax.plan.compiled import CompileFailed, compile_all, read
from rl_jax.plan.config import PlanConfig, num_micro_batches, with_mesh
from rl_jax.plan.outcome import Outcome, outcome_of
from rl_jax.plan.shapes import shape_faults, sweep


def chosen_shapes(config: PlanConfig, arch: Architecture, chip: Chip, is_sweep: bool) -> tuple[list[PlanConfig], str]:
    """Return the configs to compile, and what to say of the shapes that are not among them.

    Raises:
        ConfigError: the mesh is not legal, or no shape is.
    """
    num_devices = config.plan.num_devices
    if config.mesh.num_devices == num_devices and not is_sweep:
        shape = with_mesh(config, config.mesh)
        refuse(shape_faults(shape, arch))
        return [shape], ""
    if config.mesh.num_devices not in (1, num_devices):
        raise ConfigError(
            [
                f"mesh: its axes multiply to {config.mesh.num_devices}, plan.topology={config.plan.topology!r} of "
                f"{chip.name} has {num_devices} devices; change one, or leave [mesh] out to try all shapes"
            ]
        )
    legal, refused = sweep(config, arch, chip)
    if not legal:
        raise ConfigError([f"no mesh shape of {num_devices} devices is left; one of many reasons: {refused[0][1]}"])
    chosen = legal[: config.plan.max_shapes]
    return [with_mesh(config, one.mesh) for one in chosen], report.refused_text(refused, len(legal) - len(chosen))


def outcomes_of(shapes: Sequence[PlanConfig], arch: Architecture, chip: Chip, cache: Path) -> Iterator[Outcome]:
    """Yield what is found of each shape, as soon as it is compiled."""
    for shape, found in compile_all(shapes, cache):
        if isinstance(found, CompileFailed):
            yield Outcome(
                mesh=shape.mesh,
                rows=shape.packing.rows,
                num_micro_batches=num_micro_batches(shape),
                verdict="failed",
                reason=str(found),
            )
        else:
            yield outcome_of(shape, arch, chip, *read(found))
