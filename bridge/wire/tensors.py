"""What a tensor is on the wire: a name, a safetensors dtype word, a shape, and raw little-endian bytes.

bfloat16 and FP8 have no NumPy dtype without a further package, so elements travel as unsigned integers of their size.
"""

import hashlib
import json
import math
import mmap
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ITEM_BYTES = {
    **{"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4},
    **{"BF16": 2, "F16": 2, "I16": 2, "U16": 2},
    **{"F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1, "BOOL": 1},
}
BITS = {1: np.dtype("<u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<u8")}
_MAX_HEADER_BYTES = 100_000_000


class WireError(ValueError):
    """An update or a folder that must not reach the model; the message names the first differences."""


@dataclass(frozen=True)
class Spec:
    """Name, safetensors dtype word and shape of one checkpoint tensor.

    Example: Spec("model.layers.0.self_attn.q_proj.weight", "F8_E4M3", (4096, 2048)).
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise WireError(f"{self.name}: dtype {self.dtype!r} is unknown; expected one of {', '.join(ITEM_BYTES)}")

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * ITEM_BYTES[self.dtype]

    @property
    def bits(self) -> np.dtype:
        """The unsigned integer that holds one element."""
        return BITS[ITEM_BYTES[self.dtype]]

    def __str__(self) -> str:
        return f"{self.name} {self.dtype} {list(self.shape)}"


def bits_of(spec: Spec, array: np.ndarray) -> np.ndarray:
    """Return the elements of `array`, any dtype of the right total size, as a flat array of unsigned integers.

    Raises:
        WireError: the array does not hold the bytes that the spec asks for.
    """
    if array.nbytes != spec.num_bytes:
        raise WireError(f"{spec} takes {spec.num_bytes} bytes; the array given for it has {array.nbytes}")
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).view(spec.bits)


def room_for(spec: Spec, directory: Path | None) -> np.ndarray:
    """Return flat elements to fill: in memory, or mapped from a nameless file that vanishes with the array."""
    if directory is None or spec.num_elements == 0:
        return np.empty(spec.num_elements, spec.bits)
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=directory) as file:
        return np.memmap(file, spec.bits, "w+", shape=(spec.num_elements,))


def sha256_of(array: np.ndarray) -> str:
    """Return the SHA-256 of the raw bytes of a contiguous array, as 64 hexadecimal digits."""
    return hashlib.sha256(array.reshape(-1).view(np.uint8).data).hexdigest()


def digest_of(tensors: Iterable[tuple[Spec, str]]) -> str:
    """Return the identity of a whole version: SHA-256 over the sorted lines `name dtype shape checksum`."""
    lines = sorted(f"{spec} {checksum}\n" for spec, checksum in tensors)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def open_folder(folder: str | Path) -> dict[str, tuple[Spec, np.ndarray]]:
    """Map the tensors of a Hugging Face folder: name -> (spec, flat elements).

    The maps are private: nothing written to an array reaches the file.

    Raises:
        WireError: no safetensors file, one that is broken, or a name in two files.
    """
    root = Path(folder)
    index = root / "model.safetensors.index.json"
    paths = sorted(root.glob("*.safetensors"))
    if index.is_file():
        paths = [root / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    if not paths:
        raise WireError(f"{root}: holds no *.safetensors file")
    tensors: dict[str, tuple[Spec, np.ndarray]] = {}
    for path in paths:
        for spec, bits in _open_file(path):
            if spec.name in tensors:
                raise WireError(f"{path}: {spec.name} is in another file of the folder too")
            tensors[spec.name] = spec, bits
    return tensors


def _open_file(path: Path) -> Iterable[tuple[Spec, np.ndarray]]:
    try:
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:
        raise WireError(f"{path}: cannot be mapped ({error})") from error
    header_bytes = int.from_bytes(data[:8], "little")
    if len(data) < 8 or header_bytes > min(len(data) - 8, _MAX_HEADER_BYTES):
        raise WireError(f"{path}: header of {header_bytes} bytes in a file of {len(data)}; it is truncated")
    header = json.loads(data[8 : 8 + header_bytes])
    header.pop("__metadata__", None)
    for name, entry in header.items():
        spec = Spec(name, entry["dtype"], tuple(entry["shape"]))
        start, end = (8 + header_bytes + offset for offset in entry["data_offsets"])
        if end - start != spec.num_bytes or end > len(data):
            raise WireError(f"{path}: {spec} lies at bytes {start} to {end} of {len(data)}; the file is damaged")
        yield spec, np.frombuffer(data, spec.bits, spec.num_elements, start)
