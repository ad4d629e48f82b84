"""The tensors of a Hugging Face directory, found by the headers of its files and read one at a time; FP8 is dequantised.

Knows no architecture: what names there must be is for the caller.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import ml_dtypes
import numpy as np

from bridge.fp8 import dequantise, scale_fault
from rl_jax.config import ConfigError

DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
}
"""Words of safetensors that can be read as weights."""
QUANTISED = "F8_E4M3"
"""The word among them of a weight that has a scale."""
SCALE_SUFFIXES = ("_scale_inv", "_scale")
"""A scale is named like its weight: X.weight_scale_inv of a block checkpoint, X.weight_scale of compressed-tensors."""
_MAX_HEADER_BYTES = 100_000_000
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Stored:
    """Where a tensor lies."""

    file: Path
    dtype: str
    """In the words of safetensors."""
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class TensorFiles:
    """All tensors of a directory by name. Only headers are read at first.

    Raises:
        ConfigError: no safetensors file, or one that an index names is missing, broken or too short.
    """

    def __init__(self, directory: str | Path):
        self.tensors: dict[str, Stored] = {}
        for path in _files(Path(directory)):
            self.tensors.update(_read_header(path))

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def weights(self) -> Iterator[str]:
        """Yield the names that are no scale of another tensor."""
        for name in self.tensors:
            base = next((name.removesuffix(s) for s in SCALE_SUFFIXES if name.endswith(s)), name)
            if base == name or base not in self.tensors:
                yield name

    def fault(self, name: str) -> str | None:
        """Return why a tensor cannot be read as a weight."""
        stored = self.tensors[name]
        if stored.dtype not in DTYPES:
            return f"{name} has dtype {stored.dtype}, expected one of {', '.join(DTYPES)}"
        if stored.dtype != QUANTISED:
            return None
        scale = self._scale(name)
        if scale is None:
            return f"{name} is FP8 without a scale; expected {' or '.join(name + s for s in SCALE_SUFFIXES)}"
        if len(stored.shape) != 2 or scale.dtype not in ("F32", "BF16", "F16"):
            return f"{name} is FP8 of shape {stored.shape} with a scale of dtype {scale.dtype}; expected a matrix, F32"
        fault = scale_fault(stored.shape, scale.shape)
        return f"{name}: {fault}" if fault else None

    def itemsize(self, name: str) -> int:
        """Return the bytes of an element as stored. `fault` must be None."""
        return DTYPES[self.tensors[name].dtype].itemsize

    def plain_itemsize(self, name: str) -> int:
        """Return the bytes of an element as `read` returns it. `fault` must be None."""
        return 4 if self.tensors[name].dtype == QUANTISED else self.itemsize(name)

    def pieces(self, name: str, max_bytes: int) -> Iterator[np.ndarray]:
        """Yield a weight some rows at a time, as `read` does; what is quantised is one piece. `fault` must be None."""
        stored = self.tensors[name]
        if stored.dtype == QUANTISED or not stored.shape or stored.nbytes <= max_bytes:
            yield self.read(name)
            return
        step = max(1, max_bytes * stored.shape[0] // stored.nbytes)
        for start in range(0, stored.shape[0], step):
            yield self.read(name, range(start, min(start + step, stored.shape[0])))

    def read(self, name: str, rows: range | None = None) -> np.ndarray:
        """Return a weight, or some rows of it, as stored, or in float32 if it is quantised. `fault` must be None."""
        codes = _read(self.tensors[name] if rows is None else _cut(self.tensors[name], rows))
        if self.tensors[name].dtype != QUANTISED:
            return codes
        assert rows is None, f"{name}: is quantised, blocks and not rows have scales"
        scale = self._scale(name)
        assert scale is not None, f"{name}: ask fault first"
        return dequantise(codes, _read(scale))

    def _scale(self, name: str) -> Stored | None:
        return next((self.tensors[name + s] for s in SCALE_SUFFIXES if name + s in self.tensors), None)


def _files(root: Path) -> list[Path]:
    index = root / _INDEX
    paths = sorted(root.glob("*.safetensors"))
    if index.is_file():
        try:
            paths = [root / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ConfigError([f"{index}: not a safetensors index ({error!r})"]) from error
    if not paths:
        raise ConfigError([f"{root}: has no *.safetensors file; is it a Hugging Face model directory?"])
    return paths


def _read_header(path: Path) -> Iterator[tuple[str, Stored]]:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(size - 8, _MAX_HEADER_BYTES):
                raise ValueError(f"its header claims {length} bytes, the file has {size}")
            header = json.loads(file.read(length))
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            start, end = entry["data_offsets"]
            stored = Stored(path, entry["dtype"], tuple(entry["shape"]), 8 + length + start, end - start)
            if 8 + length + end > size:
                raise ValueError(f"{name} ends at byte {8 + length + end}, the file has {size}")
            yield name, _checked(name, stored)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError([f"{path}: missing or broken ({error}); fetch the model again"]) from error


def _checked(name: str, stored: Stored) -> Stored:
    if stored.dtype in DTYPES:
        expected = int(np.prod(stored.shape, dtype=np.int64)) * DTYPES[stored.dtype].itemsize
        if stored.nbytes != expected:
            raise ValueError(f"{name} has {stored.nbytes} bytes, {stored.dtype} {stored.shape} needs {expected}")
    return stored


def _cut(stored: Stored, rows: range) -> Stored:
    row_bytes = stored.nbytes // stored.shape[0]
    return replace(
        stored,
        shape=(len(rows), *stored.shape[1:]),
        offset=stored.offset + rows.start * row_bytes,
        nbytes=len(rows) * row_bytes,
    )


def _read(stored: Stored) -> np.ndarray:
    dtype = DTYPES[stored.dtype]
    flat = np.fromfile(stored.file, dtype, stored.nbytes // dtype.itemsize, offset=stored.offset)
    if flat.nbytes != stored.nbytes:
        fault = f"{stored.file}: got {flat.nbytes} of {stored.nbytes} bytes; the file was cut while it was read"
        raise ConfigError([f"{fault}; fetch the model again"])
    return flat.reshape(stored.shape)
