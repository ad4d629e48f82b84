"""The replica's side of live updates: the checkpoint bytes of the version that it serves, and of the one to come.

Kernels keep weights in layouts of their own, so a delta cannot be applied to the model. It is applied here, to the
tensors as the checkpoint has them; layers with a change then go whole to vLLM's own weight loaders.

    held --stage(path): every check, new bytes beside the old--> staged --commit(): yields the layers--> held
      ^                        |                                    |
      +------- refused --------+                                    +--- consumer raised: broken, restart the replica
"""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bridge.wire.delta import apply_delta, unpack
from bridge.wire.manifest import DATA, Entry, Manifest, read_update
from bridge.wire.tensors import Spec, WireError, digest_of, open_folder, room_for, sha256_of

_MAX_LISTED = 5


@dataclass(frozen=True)
class Staged:
    """An update that passed every check.

    Attributes:
        num_bytes: of its data; num_changed: elements; num_tensors: that differ from those held.
        seconds: reading, applying, checking.
    """

    version: int
    kind: str
    digest: str
    num_bytes: int
    num_changed: int
    num_tensors: int
    seconds: float


class Shadow:
    """The checkpoint tensors of one replica's version; nothing here touches a model."""

    def __init__(self, base_dir: str | Path, store: str | Path | None = None) -> None:
        """Map the model folder that the replica started from.

        Args:
            base_dir: Hugging Face folder; maps are private, so nothing is ever written to it.
            store: directory on whose disk tensors that changed are kept, memory-mapped; None: in memory.
        """
        tensors = open_folder(base_dir)
        self._specs = {name: spec for name, (spec, _) in tensors.items()}
        self._bits = {name: bits for name, (_, bits) in tensors.items()}
        self._checksums = _checksums(self._bits)
        self._store = None if store is None else Path(store)
        self._pending: tuple[Manifest, dict[str, np.ndarray], dict[str, str]] | None = None
        self._broken = ""
        self.version: int | None = None

    @property
    def digest(self) -> str:
        """Identity of the version held: equal to Update.digest of the same version on the sender."""
        return digest_of((spec, self._checksums[name]) for name, spec in self._specs.items())

    @property
    def checksums(self) -> dict[str, str]:
        """Tensor name -> SHA-256 of its bytes in the version held."""
        return dict(self._checksums)

    def tensors(self) -> Iterator[tuple[Spec, np.ndarray]]:
        """Yield every tensor of the version held, as flat elements."""
        for name, spec in self._specs.items():
            yield spec, self._bits[name]

    def stage(self, path: str | Path) -> Staged:
        """Read an update, apply it beside the version held, check every byte of the result.

        Raises:
            WireError: names what differs; the version held stays as it is, and an update staged before is forgotten.
        """
        start = time.perf_counter()
        self._pending = None
        if self._broken:
            raise WireError(self._broken)
        manifest = read_update(path)
        self._check_base(path, manifest)
        self._check_specs(path, manifest)
        data = _mapped(Path(path) / DATA)
        bits = {entry.spec.name: self._after(entry, data) for entry in manifest.entries}
        checksums = _checksums(bits)
        wrong = [entry.spec.name for entry in manifest.entries if checksums[entry.spec.name] != entry.sha256]
        if wrong:
            raise WireError(f"{path}: refused, the bytes of {_listed(wrong)} do not have their checksum; send it again")
        after = {**self._checksums, **checksums}
        digest = digest_of((spec, after[name]) for name, spec in self._specs.items())
        if digest != manifest.digest:
            raise WireError(f"{path}: refused, it would give version {digest[:12]}, not {manifest.digest[:12]}")
        bits = {name: new for name, new in bits.items() if checksums[name] != self._checksums[name]}
        self._pending = manifest, bits, checksums
        num_changed, seconds = manifest.num_changed, time.perf_counter() - start
        return Staged(manifest.version, manifest.kind, digest, data.nbytes, num_changed, len(bits), seconds)

    def commit(self, path: str | Path | None = None) -> Iterator[tuple[Spec, np.ndarray]]:
        """Yield every tensor of each layer with a change, whole, and hold the new version once all are taken.

        Args:
            path: the update that must be the staged one; None: whichever is.
        Raises:
            WireError: nothing is staged, or another update.
        """
        if self._pending is None:
            raise WireError(f"{path or 'commit'}: no update is staged; stage it first")
        manifest, bits, checksums = self._pending
        if path is not None and (stated := read_update(path)) != manifest:
            raise WireError(f"{path}: version {stated.version} is not staged, version {manifest.version} is")
        self._pending = None
        return self._commit(manifest, bits, checksums)

    def _commit(
        self, manifest: Manifest, bits: dict[str, np.ndarray], checksums: dict[str, str]
    ) -> Iterator[tuple[Spec, np.ndarray]]:
        self._broken = f"the commit of version {manifest.version} did not end; the weights are mixed, restart"
        self._bits.update(bits)
        self._checksums.update(checksums)
        changed = {layer_of(name) for name in bits}
        for name, spec in self._specs.items():
            if layer_of(name) in changed:
                yield spec, self._bits[name]
        self.version = manifest.version
        self._broken = ""

    def _check_base(self, path: str | Path, manifest: Manifest) -> None:
        if manifest.kind == "delta" and manifest.base_digest != self.digest:
            raise WireError(
                f"{path}: refused, it starts from version {manifest.base_version} ({str(manifest.base_digest)[:12]}), "
                f"the replica holds version {self.version} ({self.digest[:12]}); send a full update"
            )

    def _check_specs(self, path: str | Path, manifest: Manifest) -> None:
        given = {entry.spec.name: entry.spec for entry in manifest.entries}
        faults = [f"{spec}: not in the model" for name, spec in given.items() if name not in self._specs]
        faults += [
            f"{given[name]}: the model has {spec}"
            for name, spec in self._specs.items()
            if name in given and given[name] != spec
        ]
        if manifest.kind == "full":
            faults += [f"{spec}: missing in the update" for name, spec in self._specs.items() if name not in given]
        if len(given) != len(manifest.entries):
            faults.append("a tensor is named twice")
        if faults:
            raise WireError(f"{path}: refused, {len(faults)} tensors differ: " + "; ".join(faults[:_MAX_LISTED]))

    def _after(self, entry: Entry, data: np.ndarray) -> np.ndarray:
        """Return the flat elements of one tensor after the update, in room of its own."""
        part = data[entry.offset : entry.offset + entry.num_bytes]
        new = room_for(entry.spec, self._store)
        if entry.lengths is None:
            new[...] = part.view(entry.spec.bits) if part.size else new
            return new
        new[...] = self._bits[entry.spec.name]
        delta = unpack(part, entry.spec.bits, entry.lengths, entry.num_changed)
        try:
            apply_delta(new, delta, entry.spec.shape)
        except WireError as error:
            raise WireError(f"{entry.spec}: refused, {error}") from error
        return new


def layer_of(name: str) -> str:
    """Return what is loaded together: the name up to its first number, or the whole name.

    Example: model.layers.3.mlp.experts.7.up_proj.weight -> model.layers.3; lm_head.weight -> lm_head.weight.
    """
    parts = name.split(".")
    first = next((at for at, part in enumerate(parts) if part.isdigit()), len(parts) - 1)
    return ".".join(parts[: first + 1])


def _mapped(file: Path) -> np.ndarray:
    return np.memmap(file, np.uint8, "r") if file.stat().st_size else np.empty(0, np.uint8)


def _checksums(bits: dict[str, np.ndarray]) -> dict[str, str]:
    with ThreadPoolExecutor() as hashers:
        return dict(zip(bits, hashers.map(sha256_of, bits.values()), strict=True))


def _listed(names: list[str]) -> str:
    more = len(names) - _MAX_LISTED
    return ", ".join(names[:_MAX_LISTED]) + (f" and {more} more" if more > 0 else "")
