"""From counts to a step time: peak compute, HBM, links; the largest bounds the step from below, their sum from above."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rl_jax.plan.chips import Chip
from rl_jax.plan.hlo_cost import Cost
from rl_jax.plan.links import Place, wire_seconds


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """Seconds of one step on its slowest resource.

    Example: compute_s=11.0, hbm_s=1.5, wire_s=0.8 is bound by compute: 11.0 s if all overlaps, 13.3 s if nothing does.
    """

    compute_s: float
    hbm_s: float
    wire_s: float

    @property
    def step_s(self) -> float:
        """If everything overlaps."""
        return max(self.compute_s, self.hbm_s, self.wire_s)

    @property
    def serial_s(self) -> float:
        """If nothing overlaps."""
        return self.compute_s + self.hbm_s + self.wire_s

    @property
    def limit(self) -> str:
        """The largest term."""
        terms = {"compute": self.compute_s, "HBM": self.hbm_s, "wire": self.wire_s}
        return max(terms, key=lambda name: terms[name])


def roofline(
    chip: Chip,
    topology: str,
    places: Sequence[Place],
    programs: Sequence[tuple[Cost, float]],
    executed_flops: float,
    kernel_bytes: float = 0.0,
) -> Roofline:
    """Return the time of a step.

    Args:
        programs: each with how often a step runs it.
        executed_flops: of one device in the step, by formula: kernels that declare nothing are in it.
        kernel_bytes: of one device in the step, that kernels read more than once and the text does not show.
    """
    wire_s = 0.0
    for cost, times in programs:
        for (kind, group), sent in cost.collectives.items():
            wire_s += times * wire_seconds(chip, topology, places, kind, group, sent)
    hbm_bytes = sum(cost.hbm_bytes * times for cost, times in programs) + kernel_bytes
    return Roofline(compute_s=executed_flops / chip.flops_s, hbm_s=hbm_bytes / chip.memory_bytes_s, wire_s=wire_s)


def bytes_by_axis(programs: Sequence[tuple[Cost, float]]) -> Mapping[tuple[str, str], float]:
    """Return the bytes that one device sends in a step, by mesh axes ("fsdp", "expert*context") and kind."""
    found: dict[tuple[str, str], float] = {}
    for cost, times in programs:
        for (kind, group), sent in cost.collectives.items():
            key = ("*".join(group.axes) or "none", kind)
            found[key] = found.get(key, 0.0) + sent * times
    return found
