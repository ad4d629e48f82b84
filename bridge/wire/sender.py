"""The trainer's side of live updates: writes one folder for each version and remembers the newest for the next delta."""

import shutil
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import numpy as np

from bridge.wire.delta import Delta, find_delta, grid_of
from bridge.wire.manifest import DATA, Entry, Kind, Manifest, write_manifest, written_aside
from bridge.wire.tensors import Spec, WireError, bits_of, digest_of, open_folder, room_for, sha256_of

Tensor = tuple[str, str, tuple[int, ...], np.ndarray]
"""Name, safetensors dtype word, shape, and an array of any dtype that has the tensor's bytes."""


@dataclass(frozen=True)
class Update:
    """One update folder, ready to be staged.

    Attributes:
        base_version: what a replica must hold before it; None: anything (a full update).
        num_bytes: of data.bin, which is what travels beside a small manifest.
        changed_frac: elements that differ from the version before, 0 to 1; 1 where there is none.
        changed_blocks_frac: blocks with a change (128 x 128, or runs of 16,384 elements), 0 to 1.
        seconds: from the first tensor to the renamed folder.
        reason: why the update is full; empty for a delta.
        digest: identity of the version, equal on every replica that committed it.

    Example: Update(Path("updates/v000017-delta"), 17, 16, "delta", 6214, 0.0011, 0.93, 0.02, "", "9f3c..").
    """

    path: Path
    version: int
    base_version: int | None
    kind: Kind
    num_bytes: int
    changed_frac: float
    changed_blocks_frac: float
    seconds: float
    reason: str
    digest: str


@dataclass
class _Held:
    """One tensor of the newest version: flat elements and their checksum."""

    spec: Spec
    bits: np.ndarray
    sha256: str = ""


class _NoSmaller(Exception):
    """The delta takes as many bytes as the whole version."""


class Sender:
    """Writes the updates of one run into a directory of its own.

        sender = Sender(run / "updates", base=(0, run / "hf"))
        update = sender.write(1, tensors)              # a delta against version 0
        for_another = sender.update_for(None)          # full, for a replica that holds something else

    Holds the bytes of the newest version: in memory, or on the disk of `scratch`. One thread at a time.
    """

    def __init__(
        self,
        directory: str | Path,
        max_kept: int = 2,
        *,
        base: tuple[int, str | Path] | None = None,
        scratch: str | Path | None = None,
    ) -> None:
        """Open the directory; update folders that an earlier process left there are removed.

        Args:
            max_kept: how many versions keep their folders, at least 1; a replica may still be staging the one before.
            base: version and Hugging Face folder that the fleet starts from; None: the first update is full.
            scratch: directory on whose disk the newest version is held, memory-mapped; None: in memory.
        """
        if max_kept < 1:
            raise ValueError(f"max_kept={max_kept}; keep at least 1 version, 2 to let a slow replica finish staging")
        self._directory = Path(directory)
        self._directory.mkdir(parents=True, exist_ok=True)
        for left in [*self._directory.glob("v[0-9]*-*"), *self._directory.glob(".writing-v*")]:
            shutil.rmtree(left)
        self._max_kept = max_kept
        self._scratch = None if scratch is None else Path(scratch)
        self._held: dict[str, _Held] = {}
        self._version: int | None = None
        self._digest = ""
        self._changed = (1.0, 1.0)
        self._why_full = "no version was sent before it"
        self._newest: dict[Kind, Update] = {}
        if base is not None:
            spec_and_bits = open_folder(base[1]).values()
            self._hold((spec.name, spec.dtype, spec.shape, bits) for spec, bits in spec_and_bits)
            self._accept(base[0], "it is the version that the fleet starts from")

    @property
    def version(self) -> int | None:
        """The newest version, whose bytes are held; None before the first and after a write that failed."""
        return self._version

    def write(self, version: int, tensors: Iterable[Tensor]) -> Update:
        """Write the update that leads to `version`: a delta from the one before, or full, with the reason.

        Args:
            version: above every version written before.
            tensors: every checkpoint tensor, one at a time; arrays are not kept.
        Raises:
            WireError: names, dtypes or shapes differ from the version before.
            OSError: the disk. After any error nothing half-written stays, and the next update is full.
        """
        if self._version is not None and version <= self._version:
            raise ValueError(f"version {version} does not follow {self._version}, which was sent last")
        start = time.perf_counter()
        base, self._version, self._newest = self._version, None, {}
        why_full, self._why_full = self._why_full, "the write before it failed"
        delta = None
        if base is None:
            self._changed = (1.0, 1.0)
            self._hold(tensors)
        else:
            why_full = "a delta would be no smaller"
            delta = self._write_delta(version, base, tensors)
        self._accept(version, why_full)
        if delta is not None:
            self._newest["delta"] = delta
        self._remove_old(version)
        update = replace(delta or self.full(version), seconds=time.perf_counter() - start)
        self._newest[update.kind] = update
        return update

    def full(self, version: int) -> Update:
        """Return the full update of the newest version, written at the first call.

        Raises:
            ValueError: the bytes of that version are not held (any more).
        """
        if version != self._version:
            raise ValueError(f"version {version} is not held; only the newest, {self._version}, can be sent full")
        if "full" not in self._newest:
            self._newest["full"] = self._write_full(version)
        return self._newest["full"]

    def update_for(self, held_version: int | None) -> Update:
        """Return the update that brings a replica with `held_version` (None: unknown) to the newest version.

        Raises:
            ValueError: nothing was written yet, or the last write failed.
        """
        if self._version is None:
            raise ValueError(f"there is no version to send: {self._why_full}; write one first")
        delta = self._newest.get("delta")
        if delta is not None and delta.base_version == held_version:
            return delta
        if delta is not None and "full" not in self._newest:
            self._why_full = f"the replica holds version {held_version}, the delta starts from {delta.base_version}"
        return self.full(self._version)

    def _accept(self, version: int, why_full: str) -> None:
        self._version, self._why_full = version, why_full
        self._digest = digest_of((held.spec, held.sha256) for held in self._held.values())

    def _hold(self, tensors: Iterable[Tensor]) -> None:
        """Take over every tensor of a version; nothing is written."""
        self._held = {}
        for name, dtype, shape, array in tensors:
            spec = Spec(name, dtype, tuple(shape))
            if name in self._held:
                raise WireError(f"{name} was given twice")
            self._held[name] = _Held(spec, room_for(spec, self._scratch))
            self._held[name].bits[...] = bits_of(spec, array)
        if not self._held:
            raise WireError("an update without tensors; give every tensor of the checkpoint")
        with ThreadPoolExecutor() as hashers:
            checksums = hashers.map(lambda held: sha256_of(held.bits), self._held.values())
            for held, checksum in zip(self._held.values(), checksums, strict=True):
                held.sha256 = checksum

    def _write_delta(self, version: int, base: int, tensors: Iterable[Tensor]) -> Update | None:
        """Take over the new version and write what changed; None where that is no smaller than the whole."""
        target = self._directory / f"v{version:06d}-delta"
        start_digest, tally = self._digest, _Tally(limit_bytes=self._total("num_bytes"))
        try:
            with written_aside(target) as aside, ThreadPoolExecutor(1) as hasher:
                with (aside / DATA).open("wb") as file:
                    for held, bits in self._matched(tensors):
                        checksum = hasher.submit(sha256_of, bits)
                        delta = find_delta(held.bits, bits, held.spec.shape)
                        held.bits[...] = bits
                        held.sha256 = checksum.result()
                        tally.add(file, held, delta)
                self._changed = self._fractions(tally)
                if tally.num_bytes >= tally.limit_bytes:
                    raise _NoSmaller
                manifest = self._manifest(version, tally.entries, tally.num_bytes)
                manifest = replace(manifest, kind="delta", base_version=base, base_digest=start_digest)
                write_manifest(aside, manifest)
        except _NoSmaller:
            return None
        return Update(target, version, base, "delta", tally.num_bytes, *self._changed, 0.0, "", manifest.digest)

    def _matched(self, tensors: Iterable[Tensor]) -> Iterable[tuple[_Held, np.ndarray]]:
        """Pair the new tensors with those of the version before: the same, each once."""
        missing = set(self._held)
        for name, dtype, shape, array in tensors:
            spec = Spec(name, dtype, tuple(shape))
            if name not in missing:
                fault = "was given twice" if name in self._held else "is not in the version before"
                raise WireError(f"{spec} {fault}; every version has the same tensors")
            missing.remove(name)
            if spec != self._held[name].spec:
                raise WireError(f"{spec} does not fit the version before, which has {self._held[name].spec}")
            yield self._held[name], bits_of(spec, array)
        if missing:
            raise WireError(f"{len(missing)} tensors of the version before are missing, first {sorted(missing)[:3]}")

    def _write_full(self, version: int) -> Update:
        start, entries, end = time.perf_counter(), [], 0
        target = self._directory / f"v{version:06d}-full"
        with written_aside(target) as aside:
            with (aside / DATA).open("wb") as file:
                for held in self._held.values():
                    file.write(held.bits.data)
                    size = held.spec.num_bytes
                    entries.append(Entry(held.spec, held.sha256, end, size, None, held.spec.num_elements))
                    end += size
            write_manifest(aside, self._manifest(version, entries, end))
        seconds = time.perf_counter() - start
        return Update(target, version, None, "full", end, *self._changed, seconds, self._why_full, self._digest)

    def _manifest(self, version: int, entries: Iterable[Entry], data_bytes: int) -> Manifest:
        digest = digest_of((held.spec, held.sha256) for held in self._held.values())
        return Manifest("full", version, None, digest, None, tuple(entries), self._total("num_elements"), data_bytes)

    def _total(self, what: str) -> int:
        return sum(getattr(held.spec, what) for held in self._held.values())

    def _fractions(self, tally: "_Tally") -> tuple[float, float]:
        num_blocks = sum(grid_of(held.spec.shape).num_blocks for held in self._held.values())
        return tally.num_changed / max(1, self._total("num_elements")), tally.num_blocks / max(1, num_blocks)

    def _remove_old(self, version: int) -> None:
        numbers = {int(path.name[1:].split("-")[0]) for path in self._directory.glob("v[0-9]*-*")} | {version}
        for number in sorted(numbers)[: -self._max_kept]:
            for path in self._directory.glob(f"v{number:06d}-*"):
                shutil.rmtree(path)


class _Tally:
    """The delta as far as it is written; past `limit_bytes` it is only counted."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.entries: list[Entry] = []
        self.num_bytes = 0
        self.num_changed = 0
        self.num_blocks = 0

    def add(self, file: BinaryIO, held: _Held, delta: Delta) -> None:
        """Append one tensor; one without a change does not travel."""
        if delta.num_changed == 0:
            return
        start = self.num_bytes
        self.num_bytes += delta.num_bytes
        self.num_changed += delta.num_changed
        self.num_blocks += delta.blocks.size
        if self.num_bytes >= self.limit_bytes:
            return
        for part in delta.parts:
            file.write(np.ascontiguousarray(part).data)
        lengths = (delta.blocks.size, delta.places.size, delta.dense.size)
        self.entries.append(Entry(held.spec, held.sha256, start, delta.num_bytes, lengths, delta.num_changed))
