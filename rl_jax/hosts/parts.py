"""Which rows of a batch each process holds, and a batch cut accordingly for its way to that process (walk: step 11).

A row lies on one or more processes: where context or tensor axes cross them, each gets the rows that it shares. What
arrives is checked against a hash that process 0 made of what it sent.
"""

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from jax.sharding import Mesh, NamedSharding

from rl_jax.axes import ROWS
from rl_jax.hosts.line import Message, bytes_of
from rl_jax.types import Batch

FIELDS = tuple(f.name for f in fields(Batch) if f.name != "rollouts_BT")
"""What travels: which rollout a token is of is for the metrics of process 0."""


@dataclass(frozen=True, kw_only=True)
class PartOfBatch(Batch):
    """A micro-batch of which this process has its own rows; the others are zeros in memory that nobody touches."""

    num_trained: int
    """Trained tokens of the whole micro-batch."""
    num_real: int
    """Tokens of the whole micro-batch that are no padding."""

    @property
    def num_trained_tokens(self) -> int:
        """Number of trained tokens of the whole micro-batch."""
        return self.num_trained

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the whole micro-batch that are no padding."""
        return self.num_real


@functools.lru_cache(maxsize=4096)
def rows_of(mesh: Mesh, process: int, num_rows: int) -> np.ndarray:
    """Return which rows of a batch lie on devices of a process, ascending."""
    indices = NamedSharding(mesh, ROWS).devices_indices_map((num_rows, 1))
    held = {tuple(index[0].indices(num_rows)) for device, index in indices.items() if device.process_index == process}
    return np.unique(np.concatenate([np.arange(*part) for part in held] or [np.zeros(0, np.int64)]))


def cut(
    kind: str, mesh: Mesh, process: int, batches: Sequence[Batch], routes_BTLA: Sequence[np.ndarray] | None
) -> Message:
    """Return the order that brings a process its rows of each micro-batch."""
    arrays: list[np.ndarray] = []
    for i, batch in enumerate(batches):
        rows = rows_of(mesh, process, len(batch.tokens_BT))
        arrays += [getattr(batch, name)[rows] for name in FIELDS]
        arrays += [] if routes_BTLA is None else [routes_BTLA[i][rows]]
    facts: dict[str, object] = {
        "num_rows": [len(batch.tokens_BT) for batch in batches],
        "num_trained": [batch.num_trained_tokens for batch in batches],
        "num_real": [batch.num_tokens for batch in batches],
        "has_routes": routes_BTLA is not None,
        "hash": hash_of(arrays),
    }
    return Message(kind=kind, facts=facts, arrays=arrays)


def joined(mesh: Mesh, process: int, message: Message) -> tuple[list[Batch], list[np.ndarray] | None]:
    """Return the micro-batches, and routes if there are any, that `cut` made the message of.

    Raises:
        ValueError: what arrived is not what was sent.
    """
    facts, arrays = message.facts, list(message.arrays)
    found = hash_of(arrays)
    if found != facts["hash"]:
        raise ValueError(f"process {process}: its part of the batch has hash {found}, process 0 sent {facts['hash']}")
    batches: list[Batch] = []
    routes: list[np.ndarray] = []
    counts = zip(*(_integers(facts[name]) for name in ("num_rows", "num_trained", "num_real")), strict=True)
    for num_rows, num_trained, num_real in counts:
        rows = rows_of(mesh, process, num_rows)
        whole = {name: _spread(arrays.pop(0), rows, num_rows) for name in FIELDS}
        routes += [_spread(arrays.pop(0), rows, num_rows)] if facts["has_routes"] else []
        nobody_BT = np.zeros(whole["tokens_BT"].shape, np.int32)
        batches.append(PartOfBatch(**whole, rollouts_BT=nobody_BT, num_trained=num_trained, num_real=num_real))
    return batches, routes if facts["has_routes"] else None


def hash_of(arrays: Sequence[np.ndarray]) -> str:
    """Return a hash of values, shapes and dtypes."""
    total = hashlib.blake2b(digest_size=8)
    for array in arrays:
        total.update(f"{array.dtype.str}{array.shape}".encode())
        total.update(bytes_of(np.asarray(array, order="C")))
    return total.hexdigest()


def _spread(part: np.ndarray, rows: np.ndarray, num_rows: int) -> np.ndarray:
    """Return the rows at their places among zeros, for which the system gives memory only when they are touched."""
    whole = np.zeros((num_rows, *part.shape[1:]), part.dtype)
    whole[rows] = part
    return whole


def _integers(value: object) -> list[int]:
    assert isinstance(value, list), value
    return [int(item) for item in value]
