"""Exported directories for the tests of bridge.verify, and ways to spoil them: tensors, config, manifest."""

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import ml_dtypes  # noqa: F401 - registers the names of its dtypes
import numpy as np
from references import MOE

from bridge import convert
from bridge.manifest import FILE, FileEntry, read_manifest
from bridge.verify import CHECKS
from bridge.verify_files import Finding, open_folder
from bridge.verify_source import check_against
from rl_jax.checkpoint import find_checkpoint, read_meta

# Matrices of the experts are square, so that a transposed one has the right shape.
SQUARE = dataclasses.replace(MOE, width=128)
EXPERT = "model.layers.1.mlp.experts.2."
WORDS = {"float32": "F32", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3"}
Tensors = dict[str, np.ndarray]


def convert_to(out: Path, run: Path, fmt: str = "fp8-block", max_shard_gb: float = 0.0001) -> Path:
    argv = ["--checkpoint", run, "--out", out, "--format", fmt, "--max-shard-gb", max_shard_gb]
    assert convert.main([str(arg) for arg in argv]) == 0
    return out


def from_safetensors(data: bytes) -> Tensors:
    """Return the tensors of a file, FP8 too."""
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header.pop("__metadata__")
    names = {word: name for name, word in WORDS.items()}
    return {
        name: np.frombuffer(data[start + span[0] : start + span[1]], names[word]).reshape(shape).copy()
        for name, (word, shape, span) in ((n, tuple(entry.values())) for n, entry in header.items())
    }


def as_safetensors(tensors: Tensors) -> bytes:
    """Return the bytes of a file, FP8 too: a length, a JSON header padded to 64, the tensors one after the other."""
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, array in tensors.items():
        span = [len(data), len(data) + array.nbytes]
        header[name] = {"dtype": WORDS[array.dtype.name], "shape": list(array.shape), "data_offsets": span}
        data += array.tobytes()
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 64)
    return len(text).to_bytes(8, "little") + text + data


def edit(folder: Path, change: Callable[[Tensors], Tensors], *, agreeing: bool = False) -> None:
    """Change the tensors of a directory, each in its file; `agreeing`: the manifest is made anew."""
    files = {file: from_safetensors(file.read_bytes()) for file in folder.glob("*.safetensors")}
    tensors = change({name: array for content in files.values() for name, array in content.items()})
    for file, content in files.items():
        file.write_bytes(as_safetensors({name: tensors[name] for name in content if name in tensors}))
    if agreeing:
        agree(folder)


def edit_config(folder: Path, change: Callable[[dict], object], *, agreeing: bool = False) -> None:
    """Change config.json; `agreeing`: the manifest is made anew."""
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    if agreeing:
        agree(folder)


def agree(folder: Path) -> None:
    """Make the manifest agree with config.json and the bytes of the tensors, as if it had been written so."""
    manifest = read_manifest(folder)
    tensors = {n: a for f in folder.glob("*.safetensors") for n, a in from_safetensors(f.read_bytes()).items()}
    entries = tuple(
        dataclasses.replace(entry, checksum=hashlib.sha256(tensors[entry.name].tobytes()).hexdigest())
        for entry in manifest.tensors
    )
    config = (folder / "config.json").read_bytes()
    stated = FileEntry(file="config.json", nbytes=len(config), checksum=hashlib.sha256(config).hexdigest())
    files = tuple(stated if entry.file == "config.json" else entry for entry in manifest.files)
    made = dataclasses.replace(manifest, config=json.loads(config), files=files, tensors=entries)
    (folder / FILE).write_text(made.to_json())


def findings(folder: Path) -> list[Finding]:
    opened = open_folder(folder)
    return [finding for check in CHECKS for finding in check(opened)]


def against(folder: Path, run: Path) -> list[Finding]:
    checkpoint = find_checkpoint(run)
    return list(check_against(open_folder(folder), checkpoint, read_meta(checkpoint).architecture))


def swapped(one: str, two: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {one: tensors[two], two: tensors[one]}


def without(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {key: value for key, value in tensors.items() if key != name}


def with_value(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {name: change(tensors[name].copy())}


def set_first(value: float) -> Callable[[np.ndarray], np.ndarray]:
    def change(array: np.ndarray) -> np.ndarray:
        array.reshape(-1)[0] = value
        return array

    return change
