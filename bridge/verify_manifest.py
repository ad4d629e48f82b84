"""Checks of an exported directory against the manifest of its conversion: every file and every tensor, by checksum."""

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from bridge.manifest import FILE, INDEX_FILE, FileEntry, Manifest
from bridge.sources import TOKENIZER_FILES
from bridge.verify_files import EXPORT_AGAIN, FETCH_AGAIN, Finding, Folder, check_index

OTHER_BYTES = ": other bytes"
_MEND_FIRST = f"bring {FILE} back first; it may be this entry that is wrong, and not the file"
_ANOTHER_FILE = 0.5  # of a file's bytes; scales seldom move, so files of two versions share some tensors
_TELLING_BYTES = 64  # smaller tensors, scales above all, are equal by chance


def check_manifest(folder: Folder) -> Iterator[Finding]:
    """Look whether the manifest is as it was written, and compare format, dtypes, shapes and files with it."""
    manifest = folder.manifest
    if manifest is None:
        yield Finding("manifest", FILE, "the manifest of the conversion", folder.manifest_fault, EXPORT_AGAIN)
        return
    if manifest.is_edited:
        got = "changed since: its own checksum does not fit"
        yield Finding("manifest", FILE, "as the conversion wrote it", got, FETCH_AGAIN)
    if manifest.format != folder.format:
        yield Finding("manifest", FILE, f"format {folder.format} of config.json", manifest.format, EXPORT_AGAIN)
    entries, table = {entry.name: entry for entry in manifest.tensors}, folder.table
    for name in sorted(entries.keys() ^ folder.tensors.keys()):
        got = "in the manifest alone" if name in entries else "in the files alone"
        yield Finding("manifest", name, "in the manifest and in the files", got, EXPORT_AGAIN)
    for name in entries.keys() & folder.tensors.keys():
        entry, stored = entries[name], folder.tensors[name]
        stated, found = (entry.dtype, entry.shape), (stored.dtype, stored.shape)
        is_odd = name in table and found != (table[name].dtype, table[name].shape)  # check_headers has it
        if entry.file != stored.file.name or (stated != found and not is_odd):
            expected = f"{entry.dtype} {list(entry.shape)} in {entry.file}"
            got = f"{stored.dtype} {list(stored.shape)} in {stored.file.name}"
            yield Finding("manifest", name, expected, got, _MEND_FIRST if manifest.is_edited else EXPORT_AGAIN)


def check_checksums(folder: Folder) -> Iterator[Finding]:
    """Compare the bytes of every tensor and of every other file with the manifest."""
    manifest = folder.manifest
    if manifest is None:
        return  # check_manifest has it
    stated = {entry.name: entry.checksum for entry in manifest.tensors}
    wrong = {
        name: actual for name in stated if name in folder.tensors and (actual := sha256(folder, name)) != stated[name]
    }
    yield from _explained(folder, manifest, wrong)
    odd = {folder.tensors[name].file.name for name in wrong} | _with_other_headers(folder, manifest)
    for entry in manifest.files:
        if not (entry.file in odd or _is_explained(folder, entry)):
            yield from _file_findings(folder, entry)
    for name in sorted({"config.json", *TOKENIZER_FILES} - folder.listed_files):
        if (folder.path / name).is_file():
            got = "there is one, and vLLM would use it"
            yield Finding("checksums", name, "no such file: the manifest names none", got, "remove it")


def _with_other_headers(folder: Folder, manifest: Manifest) -> set[str]:
    """Return the files whose headers state other tensors than the manifest: check_headers and check_manifest have them."""
    stated = {(e.name, e.dtype, e.shape, e.file) for e in manifest.tensors}
    found = {(name, s.dtype, s.shape, s.file.name) for name, s in folder.tensors.items()}
    return {file for *_, file in stated ^ found}


def _is_explained(folder: Folder, entry: FileEntry) -> bool:
    """Return whether other checks say what is wrong with a file, field by field."""
    if entry.file == INDEX_FILE:
        return not (folder.path / INDEX_FILE).is_file() or any(check_index(folder))
    return entry.file == "config.json" and folder.manifest is not None and folder.config != folder.manifest.config


def _file_findings(folder: Folder, entry: FileEntry) -> Iterator[Finding]:
    path = folder.path / entry.file
    remedy = _MEND_FIRST if folder.manifest and folder.manifest.is_edited else FETCH_AGAIN
    if not path.is_file():
        yield Finding("checksums", entry.file, f"a file of {entry.nbytes} bytes", "missing", remedy)
        return
    size, actual = path.stat().st_size, _file_sha256(path)
    if (size, actual) != (entry.nbytes, entry.checksum):
        expected, got = f"{entry.nbytes} bytes, {entry.checksum[:12]}", f"{size} bytes, {actual[:12]}"
        if path.suffix == ".safetensors":
            got += ": another header, or bytes behind the last tensor; the tensors are right"
        yield Finding("checksums", entry.file, expected, got + OTHER_BYTES, remedy)


def _file_sha256(path: Path) -> str:
    """Return the checksum as FileEntry.checksum defines it."""
    with path.open("rb") as file:
        if path.suffix != ".safetensors":
            return hashlib.file_digest(file, "sha256").hexdigest()
        length = file.read(8)
        return hashlib.sha256(length + file.read(int.from_bytes(length, "little"))).hexdigest()


def _explained(folder: Folder, manifest: Manifest, wrong: Mapping[str, str]) -> Iterator[Finding]:
    """Say of tensors with other bytes what they are, where that can be told; a file of mostly others is one finding."""
    stated = {entry.name: entry.checksum for entry in manifest.tensors}
    remedy = _MEND_FIRST if manifest.is_edited else FETCH_AGAIN
    what = {name: diagnose(folder, name, stated) for name in wrong}
    for file in sorted({stored.file.name for stored in folder.tensors.values()}):
        sizes = {name: stored.nbytes for name, stored in folder.tensors.items() if stored.file.name == file}
        bad = [name for name in sizes if name in wrong]
        unknown = [name for name in bad if what[name].endswith(OTHER_BYTES)]
        share = sum(sizes[name] for name in unknown) / max(1, sum(sizes.values()))
        if len(unknown) > 1 and share > _ANOTHER_FILE:
            got = f"{len(unknown)} of {len(sizes)} tensors, {share:.0%} of the bytes: a shard of another version?"
            yield Finding("checksums", file, f"policy step {manifest.policy_step}", got, remedy)
            bad = [name for name in bad if name not in unknown]
        for name in bad:
            yield Finding("checksums", name, stated[name][:12], what[name], remedy)


def diagnose(folder: Folder, name: str, expected: Mapping[str, str]) -> str:
    """Say what a tensor with the wrong bytes is: another tensor, the transpose, or simply something else.

    Args:
        expected: tensor name -> sha256 of what it should hold.
    """
    actual = sha256(folder, name)
    shape = folder.tensors[name].shape
    others = [other for other, checksum in expected.items() if checksum == actual and other != name]
    if others and folder.tensors[name].nbytes >= _TELLING_BYTES:
        return f"{actual[:12]}, the bytes of {others[0]}: swapped?"
    if len(shape) == 2 and _sha256(folder.bits(name).reshape(shape).T) == expected[name]:
        return f"{actual[:12]}, the transpose"
    return f"{actual[:12]}{OTHER_BYTES}"


def sha256(folder: Folder, name: str) -> str:
    """Return the checksum of a tensor's bytes."""
    return _sha256(folder.bits(name))


def _sha256(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data).hexdigest()
