"""Time of a collective on the links of a machine: torus of a TPU slice, switch and network of GPUs. Crude by intent.

Rings run along every torus dimension that a group spans, both ways where the dimension closes to a ring; an all-to-all
is bounded by the middle of its longest dimension. Nothing overlaps, and no latency counts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rl_jax.plan.chips import Chip
from rl_jax.plan.groups import Group

ALL_TO_ALL = ("all-to-all", "ragged-all-to-all")


@dataclass(frozen=True)
class Place:
    """Where a device is."""

    coords: tuple[int, ...]
    """In the torus of its slice; of a GPU its number in the host."""
    domain: int
    """Slice, or host of a GPU."""


def wire_seconds(chip: Chip, topology: str, places: Sequence[Place], kind: str, group: Group, sent: float) -> float:
    """Return the time in which each device of a group sends `sent` bytes.

    Args:
        places: of all devices, in the order of the mesh.
    """
    if group.size == 1 or not sent:
        return 0.0
    members = [places[i] for i in group.members]
    local = sum(place.domain == members[0].domain for place in members)
    network = sent / chip.network_bytes_s
    if local < len(members):
        across = network * (1 - local / len(members)) if kind in ALL_TO_ALL else network / local
        return max(across, sent / chip.link_bytes_s if local > 1 else 0.0)
    if not chip.torus_dims:
        return sent / chip.link_bytes_s
    torus = tuple(map(int, topology.split("x")))
    extents = [len({place.coords[d] for place in members}) for d in range(len(torus))]
    spans = [(extent, _is_ring(extent, size, len(torus))) for extent, size in zip(extents, torus, strict=True)]
    spans = [span for span in spans if span[0] > 1] or [(2, False)]  # two devices of one chip
    if kind in ALL_TO_ALL:
        return max(sent * extent / (8 if is_ring else 4) for extent, is_ring in spans) / chip.link_bytes_s
    return sent / (sum(2 if is_ring else 1 for _, is_ring in spans) * chip.link_bytes_s)


def _is_ring(extent: int, size: int, num_dims: int) -> bool:
    """A dimension closes where a group spans all of it and it is long enough to be wired so: 4 in 3D, 16 in 2D."""
    return extent == size and size >= (4 if num_dims == 3 else 16)
