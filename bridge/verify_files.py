"""Checks of an exported directory that need its files alone: headers, index, values.

Every check yields findings that say what, where, what was expected and found, and what to do. Knows no vLLM and no
checkpoint; verify_config.py and verify_manifest.py look at the rest of the files, verify_source.py compares with the
checkpoint, verify_vllm.py asks vLLM.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bridge.export import ExportTensor, export_table
from bridge.manifest import INDEX_FILE, Manifest, read_manifest
from bridge.safetensors_reader import Stored, TensorFiles
from rl_jax.config import ConfigError
from rl_jax.models.architecture import Architecture, read_architecture
from rl_jax.models.fp8_rule import Format

EXPORT_AGAIN = "convert the checkpoint again (python -m bridge.convert)"
FETCH_AGAIN = "copy the file again from where it was made, or convert again"
_ONE_FILE = "model.safetensors"
"""The name under which a file is found without an index."""
_CHUNK = 1 << 22  # elements looked at together
_INFINITE = {"F32": 0x7F800000, "BF16": 0x7F80, "F16": 0x7C00, "F8_E4M3": 0x7F}  # exponent bits; e4m3: its NaN
_BITS = {"F32": "<u4", "BF16": "<u2", "F16": "<u2", "F8_E4M3": "<u1"}


@dataclass(frozen=True)
class Finding:
    """One fault.

    Example: Finding("headers", "model.layers.0.mlp.experts.3.up_proj.weight", "F8_E4M3 [64, 32]", "missing",
    "convert the checkpoint again (python -m bridge.convert)").
    """

    check: str
    where: str
    expected: str
    got: str
    remedy: str


@dataclass(frozen=True)
class Folder:
    """A directory whose config and headers could be read."""

    path: Path
    arch: Architecture
    format: Format
    config: Mapping[str, object]
    tensors: Mapping[str, Stored]
    manifest: Manifest | None
    manifest_fault: str
    """Why there is no manifest, "" if there is."""

    @property
    def table(self) -> dict[str, ExportTensor]:
        """What the directory must hold, by name."""
        return {tensor.name: tensor for tensor in export_table(self.arch, self.format)}

    @property
    def listed_files(self) -> set[str]:
        """The files that the manifest names, none without a manifest."""
        return {entry.file for entry in self.manifest.files} if self.manifest else set()

    def bits(self, name: str) -> np.ndarray:
        """Map the elements of a tensor as unsigned integers, flat."""
        stored = self.tensors[name]
        kind = np.dtype(_BITS.get(stored.dtype, "<u1"))
        if not stored.nbytes:
            return np.empty(0, kind)
        return np.memmap(stored.file, kind, "r", stored.offset, (stored.nbytes // kind.itemsize,))


def open_folder(path: Path) -> Folder:
    """Read config.json, the manifest and all headers.

    Raises:
        ConfigError: config.json or a header is missing or broken, or the format is none of the bridge's.
    """
    arch = read_architecture(path)
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    try:
        manifest, fault = read_manifest(path), ""
    except ConfigError as error:
        manifest, fault = None, error.faults[0]
    return Folder(path, arch, _format(path, config), config, TensorFiles(path).tensors, manifest, fault)


def _format(path: Path, config: Mapping[str, object]) -> Format:
    quantised = config.get("quantization_config")
    if quantised is None:
        return "float32" if (config.get("dtype") or config.get("torch_dtype")) == "float32" else "bf16"
    assert isinstance(quantised, Mapping), "read_architecture refuses anything else"
    if quantised.get("quant_method") == "compressed-tensors":
        return "fp8-channel"
    if "weight_block_size" not in quantised:
        fault = (
            f"{path}/config.json: quantization_config has no weight_block_size; vLLM would expect one scale a matrix"
        )
        raise ConfigError([f"{fault}; {EXPORT_AGAIN}"])
    return "fp8-block"


def check_headers(folder: Folder) -> Iterator[Finding]:
    """Compare names, dtypes and shapes of all tensors with the export table."""
    table = folder.table
    for name, tensor in table.items():
        expected = f"{tensor.dtype} {list(tensor.shape)}"
        stored = folder.tensors.get(name)
        if stored is None:
            yield Finding("headers", name, expected, "missing", EXPORT_AGAIN)
        elif (stored.dtype, stored.shape) != (tensor.dtype, tensor.shape):
            got = f"{stored.dtype} {list(stored.shape)} in {stored.file.name}"
            if stored.shape == tensor.shape[::-1] != tensor.shape:
                got += ", transposed"
            yield Finding("headers", name, expected, got, EXPORT_AGAIN)
    for name, stored in folder.tensors.items():
        if name not in table:
            got = f"{stored.dtype} {list(stored.shape)} in {stored.file.name}"
            yield Finding("headers", name, f"no such tensor in {folder.format}", got, EXPORT_AGAIN)


def check_index(folder: Folder) -> Iterator[Finding]:
    """Compare the index with the files: is there one, which file holds which tensor, the total size in bytes."""
    path = folder.path / INDEX_FILE
    files = {stored.file.name for stored in folder.tensors.values()}
    if not path.is_file():
        if files != {_ONE_FILE} or INDEX_FILE in folder.listed_files:
            what = f"an index of {len(files)} file(s); only {_ONE_FILE} is found without one"
            yield Finding("index", path.name, what, "missing", EXPORT_AGAIN)
        return
    if folder.manifest and INDEX_FILE not in folder.listed_files:
        yield Finding("index", path.name, "no index: the manifest names none", "there is one", "remove it")
    index = json.loads(path.read_text(encoding="utf-8"))
    total = sum(stored.nbytes for stored in folder.tensors.values())
    metadata = index.get("metadata")
    stated = metadata.get("total_size") if isinstance(metadata, Mapping) else None
    if stated != total:
        yield Finding("index", f"{path.name}: metadata.total_size", f"{total} bytes", f"{stated}", EXPORT_AGAIN)
    where = {name: stored.file.name for name, stored in folder.tensors.items()}
    for name in sorted(where.keys() | index["weight_map"].keys()):
        if where.get(name) != index["weight_map"].get(name):
            got = f"{index['weight_map'].get(name)} in the index, {where.get(name)} on disk"
            yield Finding("index", name, "one file", got, EXPORT_AGAIN)
    on_disk = {file.name for file in folder.path.glob("*.safetensors")}
    for file in sorted(on_disk - set(index["weight_map"].values())):
        yield Finding("index", file, "in the index", "not in it; vLLM would not read it", "remove it, or convert again")


def check_values(folder: Folder) -> Iterator[Finding]:
    """Find NaN and infinity in any tensor, and scales that are no powers of two."""
    table = folder.table
    for name, stored in folder.tensors.items():
        if stored.dtype not in _INFINITE:
            continue
        bits, mask = folder.bits(name), _INFINITE[stored.dtype]
        bad = sum(int(((part & mask) == mask).sum()) for part in _chunks(bits))
        if bad:
            got = f"{bad} of {bits.size} are NaN or infinite"
            yield Finding("values", name, "finite numbers", got, "use an earlier checkpoint: this policy has diverged")
        if name in table and table[name].role == "scale" and stored.dtype == "F32":
            odd = sum(int(((part & 0x807FFFFF) != 0).sum() + (part == 0).sum()) for part in _chunks(bits))
            if odd:
                got = f"{odd} of {bits.size} are not"
                remedy = f"{EXPORT_AGAIN}; vLLM on Hopper would round them and lose precision"
                yield Finding("values", name, "positive powers of two", got, remedy)


def _chunks(bits: np.ndarray) -> Sequence[np.ndarray]:
    return [bits[start : start + _CHUNK] for start in range(0, bits.size, _CHUNK)]
