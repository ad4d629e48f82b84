"""Safetensors files whose layout is known before a tensor is: many threads write into one, a kill loses one at most.

A file is written under a name of its own, read back, and renamed; then its mark, with a checksum for each tensor, says
that it is done. Knows neither where tensors come from nor what else is in the directory.
"""

import hashlib
import json
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bridge.export import DTYPES, ExportTensor

_ALIGNMENT = 64  # bytes of the header's end: a memory map of the tensors is aligned
_READ_BYTES = 8 << 20
_FLUSH_BYTES = 256 << 20
"""What is written of a file before it is sent to the disk: in good time, so that its end has little left to wait for."""


@dataclass(frozen=True)
class ShardPlan:
    """The layout of one file, as tensors and the byte where each begins."""

    file: str
    """For example model-00002-of-00005.safetensors."""
    header: bytes
    offsets: Mapping[str, int]
    """Tensor name -> first byte in the file."""
    tensors: tuple[ExportTensor, ...]
    """In the order of the export table."""

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        return len(self.header) + sum(tensor.nbytes for tensor in self.tensors)


def plan_shards(table: Sequence[ExportTensor], max_bytes: int) -> tuple[ShardPlan, ...]:
    """Cut a table into files of at most `max_bytes` of tensors; a weight and its scale never part.

    One weight that is larger gets a file of its own.
    """
    groups: list[list[ExportTensor]] = [[]]
    size = 0
    for pair in _pairs(table):
        pair_bytes = sum(tensor.nbytes for tensor in pair)
        if groups[-1] and size + pair_bytes > max_bytes:
            groups.append([])
            size = 0
        groups[-1].extend(pair)
        size += pair_bytes
    return tuple(_plan(f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors", group) for i, group in enumerate(groups))


def _pairs(table: Sequence[ExportTensor]) -> list[list[ExportTensor]]:
    pairs: list[list[ExportTensor]] = []
    for tensor in table:
        if tensor.role == "scale":
            pairs[-1].append(tensor)
        else:
            pairs.append([tensor])
    return pairs


def _plan(file: str, tensors: Sequence[ExportTensor]) -> ShardPlan:
    # Wide elements first, so that each tensor is aligned to its element.
    ordered = sorted(tensors, key=lambda tensor: -DTYPES[tensor.dtype].itemsize)
    header, offsets = layout([(t.name, t.dtype, t.shape, t.nbytes) for t in ordered])
    return ShardPlan(file, header, offsets, tuple(tensors))


def layout(tensors: Sequence[tuple[str, str, Sequence[int], int]]) -> tuple[bytes, dict[str, int]]:
    """Return the bytes before the first tensor of a safetensors file, and name -> byte of the file where each begins.

    Args:
        tensors: name, dtype in the words of safetensors, shape and bytes, in the order in which they lie.
    """
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    starts, at = {}, 0
    for name, dtype, shape, nbytes in tensors:
        starts[name] = at
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + nbytes]}
        at += nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    header = len(text).to_bytes(8, "little") + text
    return header, {name: len(header) + start for name, start in starts.items()}


class ShardFile:
    """Writes one file; threads may call `write` at once, each tensor once. Then `finish` makes it appear.

    Args:
        folder: where the file goes.
        marks: where its mark goes; see read_mark.
        disk: where to wait for the disk now and then; None = only in `finish`.
    """

    def __init__(self, folder: Path, marks: Path, plan: ShardPlan, disk: Executor | None = None):
        self._plan = plan
        self._folder = folder
        self._mark = mark_path(marks, plan)
        self._part = folder / f"{plan.file}.part"
        self._disk = disk
        self._lock = threading.Lock()
        self._sums: dict[str, str] = {}
        self._unflushed_bytes = 0
        self._by_name = {tensor.name: tensor for tensor in plan.tensors}
        self._descriptor = os.open(self._part, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        # Takes the space now: a disk that is too full says so before the work is done.
        os.posix_fallocate(self._descriptor, 0, plan.nbytes)
        _write_all(self._descriptor, memoryview(plan.header), 0)

    def write(self, name: str, pieces: Iterable[np.ndarray]) -> bool:
        """Write a tensor, as pieces of whole rows one after the other; return whether the file has all it needs.

        Raises:
            OSError: the disk is full.
        """
        tensor = self._by_name[name]
        checksum, num_rows = hashlib.sha256(), 0
        offset = self._plan.offsets[name]
        for piece in pieces:
            is_fit = piece.shape[1:] == tensor.shape[1:] and piece.dtype == DTYPES[tensor.dtype]
            assert is_fit, f"{name}: got {piece.dtype} {piece.shape}, the table says {tensor.dtype} {tensor.shape}"
            data = np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data
            _write_all(self._descriptor, data, offset)
            checksum.update(data)
            offset, num_rows = offset + data.nbytes, num_rows + len(piece)
        assert num_rows == tensor.shape[0], f"{name}: got {num_rows} rows, the table says {tensor.shape}"
        with self._lock:
            self._sums[name] = checksum.hexdigest()
            self._unflushed_bytes += tensor.nbytes
            is_complete = len(self._sums) == len(self._plan.tensors)
            if self._disk and self._unflushed_bytes >= _FLUSH_BYTES and not is_complete:
                self._unflushed_bytes = 0
                self._disk.submit(self._flush)
        return is_complete

    def close(self) -> None:
        """Give up a file that is not done."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def finish(self) -> None:
        """Bring the file to the disk, read it back, and make it appear with its mark.

        Raises:
            OSError: the disk is full, or does not give back what was written.
        """
        os.fsync(self._descriptor)
        self.close()
        check_tensors(self._part, self._plan, self._sums)
        self._part.rename(self._folder / self._plan.file)
        write_whole(self._mark, json.dumps(self._sums).encode())

    def _flush(self) -> None:
        if self._descriptor >= 0:
            os.fdatasync(self._descriptor)  # an error comes again when the file is finished


def check_tensors(path: Path, plan: ShardPlan, sums: Mapping[str, str]) -> None:
    """Read a file and compare its header and every tensor's checksum.

    Raises:
        OSError: naming the first tensor that differs.
    """
    with path.open("rb") as file:
        if file.read(len(plan.header)) != plan.header:
            raise OSError(f"{path}: the header is not what was written; is the disk at fault?")
        for tensor in plan.tensors:
            if _sum_of(file.fileno(), plan.offsets[tensor.name], tensor.nbytes) != sums[tensor.name]:
                raise OSError(f"{path}: tensor {tensor.name} is not what was written; is the disk at fault?")


def mark_path(marks: Path, plan: ShardPlan) -> Path:
    """Return the mark that says that a file is done."""
    return marks / f"{plan.file}.json"


def read_mark(folder: Path, marks: Path, plan: ShardPlan) -> dict[str, str] | None:
    """Return tensor -> sha256 of a file that is done, whoever finished it; None if it is not."""
    try:
        sums = json.loads(mark_path(marks, plan).read_text())
        is_whole = (folder / plan.file).stat().st_size == plan.nbytes
    except (OSError, ValueError):
        return None
    return sums if is_whole and sums.keys() == plan.offsets.keys() else None


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that appears whole or not at all, and is on the disk afterwards."""
    aside = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}")
    with aside.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)


def _write_all(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


def _sum_of(descriptor: int, offset: int, nbytes: int) -> str:
    total = hashlib.sha256()
    buffer = bytearray(min(nbytes, _READ_BYTES) or 1)
    while nbytes > 0:
        part = memoryview(buffer)[: min(nbytes, len(buffer))]
        got = os.preadv(descriptor, [part], offset)
        if got == 0:
            return ""  # the file is too short
        total.update(part[:got])
        offset, nbytes = offset + got, nbytes - got
    return total.hexdigest()
