"""Checksums of the files of a checkpoint: written once it is committed, compared before anything is read from it.

They lie beside its parts in checksums.json: {"params/manifest.ocdbt": "<sha256>", ...}. Knows no format.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

FILE = "checksums.json"
NUM_THREADS = 4


def write_checksums(checkpoint: Path) -> None:
    """Write the checksum of every file of a checkpoint; a kill leaves none or all."""
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file() and path.name != FILE)
    sums = dict(zip((path.relative_to(checkpoint).as_posix() for path in files), _checksums(files), strict=True))
    aside = checkpoint.with_name(f".{checkpoint.name}.{FILE}")
    aside.write_text(json.dumps(sums, indent=1) + "\n", encoding="utf-8")
    aside.replace(checkpoint / FILE)


def damaged_files(checkpoint: Path, parts: Sequence[str] = (), share: tuple[int, int] = (0, 1)) -> list[Path]:
    """Return the files that are gone or are not what was written, of all parts or of some; none without checksums.

    Checkpoints lack checksums that were made elsewhere, or whose writer was killed right after the commit.

    Args:
        share: (i, n) looks at every n-th file from the i-th on.
    """
    if not (checkpoint / FILE).is_file():
        return []
    try:
        sums = stated_checksums(checkpoint, parts)
    except (ValueError, AttributeError):
        return [checkpoint / FILE]
    files = list(sums)[share[0] :: share[1]]
    return [path for path, found in zip(files, _checksums(files), strict=True) if found != sums[path]]


def stated_checksums(checkpoint: Path, parts: Sequence[str] = ()) -> dict[Path, str]:
    """Return file -> checksum as written, of all parts or of some.

    Raises:
        OSError, ValueError, AttributeError: there are none, or they are not what write_checksums writes.
    """
    sums = json.loads((checkpoint / FILE).read_text("utf-8")).items()
    return {checkpoint / name: str(digest) for name, digest in sums if not parts or name.split("/")[0] in parts}


def _checksums(files: Iterable[Path]) -> list[str]:
    with ThreadPoolExecutor(NUM_THREADS) as threads:
        return list(threads.map(_checksum, files))


def _checksum(file: Path) -> str:
    """Return the checksum of a file, "" if it is gone."""
    try:
        with file.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except FileNotFoundError:
        return ""
