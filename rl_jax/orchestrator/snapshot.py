"""What the orchestrator puts into a checkpoint, to bytes and back: finished and pending work, nothing lost.

A zip of NumPy arrays (npz) with one JSON header; no pickle. Knows no files, no ledger but its position.
"""

import dataclasses
import io
import json
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rl_jax.orchestrator.buffer import Group
from rl_jax.types import FinishReason, Rollout

FORMAT = 1
COLUMNS = {"tokens_T": np.int32, "sampled_T": np.bool_, "logprobs_T": np.float32, "versions_T": np.int32}
SCALARS = (
    "rollout_id",
    "group_id",
    "member",
    "env",
    "task_id",
    "temperature",
    "finish",
    "reward",
    "reward_parts",
    "num_turns",
)


@dataclass(frozen=True, kw_only=True)
class Ticket:
    """A group that was admitted. Example: Ticket(group_id=7, env="reverse_text", task_id=1041, attempt=0)."""

    group_id: int
    env: str
    task_id: int
    attempt: int = 0


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The orchestrator at one moment.

    Example: next_version=4 after step 4; groups 17 and 19 are ready; pending tickets 18 and 20 are to be played again.
    """

    next_version: int
    """Policy version that trains on the next batch."""
    next_group_id: int
    position: int
    """Where the ledger's log stood."""
    curriculum: Mapping[str, Mapping[str, float]]
    baselines: Mapping[str, float]
    """State of the advantages."""
    pending: tuple[Ticket, ...]
    groups: tuple[Group, ...]
    """Ready, and those of batches that were handed out and not trained yet."""

    def to_bytes(self) -> bytes:
        """Return bytes for `from_bytes`."""
        rollouts = [rollout for group in self.groups for rollout in group.rollouts]
        header = {
            "format": FORMAT,
            "next_version": self.next_version,
            "next_group_id": self.next_group_id,
            "position": self.position,
            "curriculum": self.curriculum,
            "baselines": self.baselines,
            "pending": [dataclasses.asdict(ticket) for ticket in self.pending],
            "groups": [[len(g.rollouts), g.landed_version, g.advantages] for g in self.groups],
            "rollouts": [{name: getattr(rollout, name) for name in SCALARS} for rollout in rollouts],
        }
        arrays: dict[str, np.ndarray] = {"header": np.frombuffer(json.dumps(header).encode(), np.uint8)}
        arrays["lengths"] = np.array([len(rollout.tokens_T) for rollout in rollouts], np.int64)
        for name, dtype in COLUMNS.items():
            arrays[name] = np.concatenate([np.zeros(0, dtype), *(getattr(rollout, name) for rollout in rollouts)])
        routed = {i: r.routed_experts_TLA for i, r in enumerate(rollouts)}
        arrays |= {f"routed_{i}": routes_TLA for i, routes_TLA in routed.items() if routes_TLA is not None}
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w") as archive:
            for name, array in arrays.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                    np.lib.format.write_array(entry, array, allow_pickle=False)
        return file.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes) -> "Snapshot":
        """Return what `to_bytes` was called on.

        Raises:
            ValueError: the bytes are damaged or of another format.
        """
        try:
            with np.load(io.BytesIO(data), allow_pickle=False) as file:
                arrays = dict(file)
        except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
            raise ValueError(f"orchestrator state of {len(data)} bytes: damaged ({error})") from error
        header = json.loads(arrays["header"].tobytes())
        if header["format"] != FORMAT:
            raise ValueError(f"orchestrator state has format {header['format']}: expected {FORMAT}")
        rollouts = _rollouts(header["rollouts"], arrays)
        return cls(
            next_version=header["next_version"],
            next_group_id=header["next_group_id"],
            position=header["position"],
            curriculum=header["curriculum"],
            baselines=header["baselines"],
            pending=tuple(Ticket(**ticket) for ticket in header["pending"]),
            groups=tuple(_groups(header["groups"], rollouts)),
        )


def _rollouts(scalars: Sequence[dict], arrays: Mapping[str, np.ndarray]) -> list[Rollout]:
    bounds = np.concatenate([[0], np.cumsum(arrays["lengths"])]).tolist()
    rollouts = []
    for i, values in enumerate(scalars):
        columns: dict = {name: arrays[name][bounds[i] : bounds[i + 1]] for name in COLUMNS}
        values["finish"] = FinishReason(values["finish"])
        rollouts.append(Rollout(**values, **columns, routed_experts_TLA=arrays.get(f"routed_{i}")))
    return rollouts


def _groups(sizes: Sequence[tuple[int, int, list[float] | None]], rollouts: Sequence[Rollout]) -> list[Group]:
    groups, start = [], 0
    for num_rollouts, landed_version, advantages in sizes:
        members = tuple(rollouts[start : start + num_rollouts])
        start += num_rollouts
        known = None if advantages is None else tuple(advantages)
        groups.append(Group(rollouts=members, landed_version=landed_version, advantages=known))
    return groups
