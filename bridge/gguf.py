"""Reads a GGUF v3 file (metadata, tensors) into NumPy; beside the walk: it serves the model converters.

GGUF is llama.cpp's file format, little endian: header, metadata, tensor infos, padding, then the tensors' bytes.
Quantised types store blocks of 32 weights along the fastest dim. Knows no model family and no tensor name.
"""

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np

MetaValue: TypeAlias = int | float | bool | str | list[object]

_NUMBERS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?"}
_NUMBERS |= {10: "<u8", 11: "<i8", 12: "<f8"}
_STRING, _ARRAY = 8, 9
_UNSUPPORTED = {
    6: "Q5_0", 7: "Q5_1", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K",
    16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS",
    24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """How a tensor type stores `block_weights` weights in one record, and how records become float32 weights."""

    name: str
    record: np.dtype
    block_weights: int
    decode: Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """Where a tensor lies. `shape` is row-major: the file's dims reversed, so a projection is [out, in].

    Example: TensorInfo(name="blk.0.attn_k.weight", shape=(192, 576), type_id=3, offset=31744512) is Q4_1, 69,120 bytes.
    """

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int
    """First byte of its data, counted from the start of the data section."""


class GgufFile:
    """One GGUF file: `metadata` and `tensors` are read at once, weights only when asked for.

    Args:
        data_N: uint8, the bytes of the whole file (a memory map will do).
        source: name of the file for messages.
    """

    def __init__(self, data_N: np.ndarray, source: str):
        self._data_N = data_N
        self._source = source
        cursor = _Cursor(data_N, source)
        num_tensors, num_keys = _read_counts(cursor)
        self.metadata: dict[str, MetaValue] = dict(_read_pair(cursor) for _ in range(num_keys))
        infos = [_read_info(cursor) for _ in range(num_tensors)]
        self.tensors = {info.name: info for info in infos}
        alignment = self.metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1:
            raise ValueError(f"{source}: general.alignment={alignment!r}; expected a positive integer")
        self._data_start = -(-cursor.position // alignment) * alignment

    @classmethod
    def open(cls, path: str | Path) -> "GgufFile":
        """Map the file at `path` into memory and read its header."""
        if not Path(path).is_file() or Path(path).stat().st_size == 0:
            raise ValueError(f"{path}: no such file, or empty; expected a GGUF file")
        return cls(np.memmap(path, dtype=np.uint8, mode="r"), str(path))

    def read(self, name: str) -> np.ndarray:
        """Return tensor `name` as float32 in its row-major shape.

        Raises:
            ValueError: unknown name, a type this reader does not decode, or data outside the file.
        """
        info = self.tensors.get(name)
        if info is None:
            raise ValueError(f"{self._source}: no tensor {name!r} among its {len(self.tensors)} tensors")
        encoding = self._encoding(info)
        num_blocks = math.prod(info.shape) // encoding.block_weights
        if info.shape[:1] and info.shape[-1] % encoding.block_weights:
            raise ValueError(
                f"{self._source}: tensor {name} of type {encoding.name} has rows of {info.shape[-1]} weights; "
                f"expected a multiple of its block size {encoding.block_weights}"
            )
        start = self._data_start + info.offset
        stop = start + num_blocks * encoding.record.itemsize
        if stop > len(self._data_N):
            raise ValueError(
                f"{self._source}: tensor {name} ends at byte {stop} of a file of {len(self._data_N)} bytes; "
                "the file is cut short, fetch it again"
            )
        records_K = self._data_N[start:stop].view(encoding.record)
        return encoding.decode(records_K).reshape(info.shape)

    def _encoding(self, info: TensorInfo) -> Encoding:
        if info.type_id in ENCODINGS:
            return ENCODINGS[info.type_id]
        name = _UNSUPPORTED.get(info.type_id, "unknown")
        known = ", ".join(encoding.name for encoding in ENCODINGS.values())
        raise ValueError(
            f"{self._source}: tensor {info.name} has type {info.type_id} ({name}); this reader decodes {known}; "
            "use a file in one of those types"
        )


def _decode_plain(weights_N: np.ndarray) -> np.ndarray:
    return weights_N.astype(np.float32)


def _decode_bf16(bits_N: np.ndarray) -> np.ndarray:
    return (bits_N.astype(np.uint32) << 16).view(np.float32)


def _decode_q4_0(records_K: np.ndarray) -> np.ndarray:
    return _scales_K1(records_K["d"]) * (_nibbles_KW(records_K["q"]) - np.float32(8))


def _decode_q4_1(records_K: np.ndarray) -> np.ndarray:
    return _scales_K1(records_K["d"]) * _nibbles_KW(records_K["q"]) + _scales_K1(records_K["m"])


def _decode_q8_0(records_K: np.ndarray) -> np.ndarray:
    return _scales_K1(records_K["d"]) * records_K["q"].astype(np.float32)


def _scales_K1(scales_K: np.ndarray) -> np.ndarray:
    return scales_K.astype(np.float32)[:, None]


def _nibbles_KW(bytes_KH: np.ndarray) -> np.ndarray:
    """Unpack [K, 16] bytes to [K, 32]: the low nibbles are the first 16 weights of a block, the high ones the rest."""
    return np.concatenate([bytes_KH & 15, bytes_KH >> 4], axis=1).astype(np.float32)


_Q4_0 = np.dtype([("d", "<f2"), ("q", "u1", 16)])
_Q4_1 = np.dtype([("d", "<f2"), ("m", "<f2"), ("q", "u1", 16)])
_Q8_0 = np.dtype([("d", "<f2"), ("q", "i1", 32)])
ENCODINGS = {
    0: Encoding(name="F32", record=np.dtype("<f4"), block_weights=1, decode=_decode_plain),
    1: Encoding(name="F16", record=np.dtype("<f2"), block_weights=1, decode=_decode_plain),
    2: Encoding(name="Q4_0", record=_Q4_0, block_weights=32, decode=_decode_q4_0),
    3: Encoding(name="Q4_1", record=_Q4_1, block_weights=32, decode=_decode_q4_1),
    8: Encoding(name="Q8_0", record=_Q8_0, block_weights=32, decode=_decode_q8_0),
    30: Encoding(name="BF16", record=np.dtype("<u2"), block_weights=1, decode=_decode_bf16),
}


class _Cursor:
    """Reads values one after the other; a read past the end is an error that names the file."""

    def __init__(self, data_N: np.ndarray, source: str):
        self._data_N = data_N
        self.source = source
        self.position = 0

    def take(self, num_bytes: int) -> bytes:
        stop = self.position + num_bytes
        if stop > len(self._data_N):
            raise ValueError(
                f"{self.source}: its header needs {num_bytes} bytes at byte {self.position}, the file has "
                f"{len(self._data_N)}; the file is cut short or damaged, fetch it again"
            )
        taken = self._data_N[self.position : stop].tobytes()
        self.position = stop
        return taken

    def u32(self) -> int:
        return struct.unpack("<I", self.take(4))[0]

    def u64(self) -> int:
        return struct.unpack("<Q", self.take(8))[0]

    def string(self) -> str:
        raw = self.take(self.u64())
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"{self.source}: string {raw[:40]!r} before byte {self.position} is not UTF-8") from error


def _read_counts(cursor: _Cursor) -> tuple[int, int]:
    magic = cursor.take(4)
    if magic != b"GGUF":
        raise ValueError(f"{cursor.source}: starts with {magic!r}; expected b'GGUF'; this is no GGUF file")
    version = cursor.u32()
    if version != 3:
        raise ValueError(f"{cursor.source}: GGUF version {version}; expected 3, little endian")
    return cursor.u64(), cursor.u64()


def _read_pair(cursor: _Cursor) -> tuple[str, MetaValue]:
    key = cursor.string()
    return key, _read_value(cursor, cursor.u32(), key)


def _read_value(cursor: _Cursor, type_id: int, key: str) -> MetaValue:
    if type_id == _STRING:
        return cursor.string()
    if type_id in _NUMBERS:
        return _read_numbers(cursor, type_id, 1)[0]
    if type_id != _ARRAY:
        raise ValueError(f"{cursor.source}: key {key!r} has value type {type_id}; expected 0 to 12")
    item_type, num_items = cursor.u32(), cursor.u64()
    if item_type in _NUMBERS:
        return [*_read_numbers(cursor, item_type, num_items)]
    return [_read_value(cursor, item_type, key) for _ in range(num_items)]


def _read_numbers(cursor: _Cursor, type_id: int, num_items: int) -> list[int | float | bool]:
    dtype = np.dtype(_NUMBERS[type_id])
    return np.frombuffer(cursor.take(num_items * dtype.itemsize), dtype).tolist()


def _read_info(cursor: _Cursor) -> TensorInfo:
    name = cursor.string()
    dims = [cursor.u64() for _ in range(cursor.u32())]
    return TensorInfo(name=name, shape=tuple(reversed(dims)), type_id=cursor.u32(), offset=cursor.u64())
