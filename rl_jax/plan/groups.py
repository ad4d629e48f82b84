"""Which mesh axes a collective of compiled HLO spans, and over how many devices."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from rl_jax.plan.hlo import Instruction

_EXPLICIT = re.compile(r"replica_groups=\{(\{[\d,{}\s]*\})\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_NAMED = re.compile(
    r"replica_groups=\w*mesh\[([^\]]*)\](?:, device_ids=\((?:\[([\d,]+)\](?:T\(([\d,]+)\))?|([\d,]+))\))? ?\{([^}]*)\}"
)
_PAIRS = re.compile(r"source_target_pairs=\{(\{[\d,{}\s]*\})\}")


@dataclass(frozen=True)
class Group:
    """Devices that take part in one collective together."""

    axes: tuple[str, ...]
    """Mesh axes along which they differ."""
    size: int
    members: tuple[int, ...]
    """Places in the mesh, row by row, of one such group."""


def group_of(instruction: Instruction, mesh: Mapping[str, int]) -> Group:
    """Return the first group of a collective on a mesh of these axis sizes, in order.

    Partition n of the program is device n of the mesh, row by row.

    Raises:
        ValueError: the replica groups have a form that is not known.
    """
    text = instruction.attributes
    if found := _EXPLICIT.search(text):
        members = [int(n) for n in found[1].strip("{").split("}")[0].split(",")]
    elif found := _IOTA.search(text):
        shape, *iota = map(_numbers, found.groups())
        members = _iota(*iota).reshape(shape)[0].tolist()
    elif found := _NAMED.search(text):
        members = _named(*found.groups())
    elif found := _PAIRS.search(text):
        members = _cycle(found[1])
    elif "replica_groups={}" in text:
        members = list(range(math.prod(mesh.values())))
    else:
        raise ValueError(f"HLO instruction {instruction.name}: unknown replica groups in {text[:200]!r}")
    return Group(_varying(members, mesh), len(members), tuple(members))


def _named(sizes: str, dims: str | None, order: str | None, ids: str | None, names: str) -> list[int]:
    """Read mesh['a'=2,'b'=4] {'b'}: the group of the device that is first along the other axes.

    Devices are counted row by row, unless `device_ids=([4,2]T(1,0))` or a list says in which order they fill the mesh.
    """
    shape = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", sizes)}
    axes = re.findall(r"'([^']+)'", names)
    plain = np.arange(math.prod(shape.values()))
    filled = _iota(_numbers(dims), _numbers(order)) if dims else np.asarray(_numbers(ids)) if ids else plain
    index = tuple(slice(None) if name in axes else 0 for name in shape)
    return filled.reshape(list(shape.values()))[index].reshape(-1).tolist()


def _iota(dims: list[int], order: list[int]) -> np.ndarray:
    ids = np.arange(math.prod(dims)).reshape(dims)
    return ids.transpose(order) if order else ids


def _numbers(text: str | None) -> list[int]:
    return [int(n) for n in (text or "").split(",") if n]


def _cycle(pairs: str) -> list[int]:
    """Follow source-target pairs from the first source until they come back or end."""
    targets = {int(a): int(b) for a, b in re.findall(r"\{(\d+),(\d+)\}", pairs)}
    start = next(iter(targets))
    members, place = [start], targets[start]
    while place != start and place not in members:
        members.append(place)
        if place not in targets:
            break
        place = targets[place]
    return members


def _varying(members: list[int], mesh: Mapping[str, int]) -> tuple[str, ...]:
    places = np.unravel_index(np.asarray(members), tuple(mesh.values()))
    return tuple(axis for axis, place in zip(mesh, places, strict=True) if len(set(place.tolist())) > 1)
