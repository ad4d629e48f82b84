"""What an update folder says about itself: manifest.json beside data.bin; written aside, appears by a rename.

The manifest carries a checksum of itself, a checksum of every tensor as it must be after the update, and the digest of
the whole version, so a replica knows before it touches the model that it will hold exactly what the trainer has.
"""

import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from bridge.wire.tensors import Spec, WireError

FORMAT = "rl_jax-update-1"
MANIFEST = "manifest.json"
DATA = "data.bin"
Kind = Literal["full", "delta"]


@dataclass(frozen=True)
class Entry:
    """One tensor of an update.

    Attributes:
        sha256: of the tensor's bytes after the update.
        offset, num_bytes: where its part of data.bin lies.
        lengths: changed blocks, sparse elements, elements of whole blocks; None: the tensor travels whole.
        num_changed: elements that differ from the base; of a whole tensor, all.
    """

    spec: Spec
    sha256: str
    offset: int
    num_bytes: int
    lengths: tuple[int, int, int] | None
    num_changed: int


@dataclass(frozen=True)
class Manifest:
    """One update: full, or the difference between two versions.

    Attributes:
        base_version, base_digest: what a replica must hold for a delta; None: full.
        digest: identity of the resulting version, over every tensor of the model.
        entries: the tensors that travel; those of the base that are not named stay as they are.
        num_elements: of the whole model.

    Example: Manifest("delta", version=17, base_version=16, digest="9f3c..", base_digest="77ab..", entries=(..),
    num_elements=1_860_000, data_bytes=6_214).
    """

    kind: Kind
    version: int
    base_version: int | None
    digest: str
    base_digest: str | None
    entries: tuple[Entry, ...]
    num_elements: int
    data_bytes: int

    @property
    def num_changed(self) -> int:
        return sum(entry.num_changed for entry in self.entries)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write manifest.json, with its own checksum."""
    content = {"format": FORMAT, **asdict(manifest)}
    content["sha256"] = _checksum(content)
    (folder / MANIFEST).write_text(json.dumps(content))


def read_update(path: str | Path) -> Manifest:
    """Read the manifest of an update folder and check it: own checksum, order and bounds of the data, file size.

    Raises:
        WireError: the folder is not an update of this format, or it is damaged or incomplete.
    """
    file = Path(path) / MANIFEST
    try:
        content = json.loads(file.read_text())
        stated = content.pop("sha256")
        if content.get("format") != FORMAT:
            raise WireError(f"{file}: format is {content.get('format')!r}, expected {FORMAT!r}; update both sides")
        if stated != _checksum(content):
            raise WireError(f"{file}: the manifest does not have the checksum that it states; send the update again")
        manifest = _parse(content)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, WireError):
            raise
        raise WireError(f"{file}: not a readable update ({error!r}); is the path an update folder?") from error
    _check_data(Path(path) / DATA, manifest)
    return manifest


def _parse(content: dict) -> Manifest:
    fields = {key: value for key, value in content.items() if key != "format"}
    entries = tuple(
        Entry(
            **{key: value for key, value in entry.items() if key not in ("spec", "lengths")},
            spec=Spec(entry["spec"]["name"], entry["spec"]["dtype"], tuple(entry["spec"]["shape"])),
            lengths=None if entry["lengths"] is None else tuple(entry["lengths"]),
        )
        for entry in fields.pop("entries")
    )
    return Manifest(**fields, entries=entries)


def _check_data(file: Path, manifest: Manifest) -> None:
    size = file.stat().st_size if file.is_file() else -1
    if size != manifest.data_bytes:
        raise WireError(f"{file}: has {max(size, 0)} bytes, the manifest says {manifest.data_bytes}; it is incomplete")
    end = 0
    for entry in manifest.entries:
        if entry.offset != end or entry.num_bytes < 0:
            raise WireError(f"{file}: {entry.spec.name} starts at {entry.offset}, expected {end}")
        if entry.lengths is None and entry.num_bytes != entry.spec.num_bytes:
            raise WireError(f"{file}: {entry.spec} travels whole in {entry.num_bytes} bytes")
        end += entry.num_bytes
    if end != size:
        raise WireError(f"{file}: the tensors end at {end} of {size} bytes")


def _checksum(content: dict) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@contextmanager
def written_aside(target: Path) -> Iterator[Path]:
    """Give a folder to fill that becomes `target` at the end, or vanishes if filling it fails."""
    aside = target.with_name(f".writing-{target.name}")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        yield aside
        shutil.rmtree(target, ignore_errors=True)
        aside.rename(target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
