"""Reads slices of the weights of an Orbax checkpoint by TensorStore, never a whole array; knows no Hugging Face name."""

import itertools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tensorstore as ts

from bridge.names import can_be_cut
from rl_jax.checksums import FILE, damaged_files, stated_checksums
from rl_jax.config import ConfigError, refuse
from rl_jax.models.architecture import Architecture
from rl_jax.models.schema import Param, flat_table

STORED = ("float32", "bfloat16")
"""Dtypes of weights that can be read."""
_PIECE_BYTES = 16 << 20
"""A large embedding is read in pieces of this size, or of one chunk if that is larger."""
PARTS = ("params", "meta")
"""Folders of a checkpoint that a conversion reads."""
Index = tuple[int, ...]


def array_name(key: str) -> str:
    """Return Orbax's name of a parameter: "layers/wq_LDKQH" is "layers.wq_LDKQH"."""
    return key.replace("/", ".")


@dataclass(frozen=True)
class Unit:
    """What is read at once: neighbouring slices of one parameter, or rows of one that is not stacked.

    Example: Unit(key="layers/up_LEDF", indices=((3, 8), (3, 9))) is experts 8 and 9 of layer 3;
    Unit(key="embed_VD", indices=((),), rows=range(8192, 16384)) is the second piece of the embedding.
    """

    key: str
    indices: tuple[Index, ...]
    """Positions in the stacked dimensions, ascending."""
    rows: range | None = None
    """Rows of a matrix that is read in pieces; None = all of the slices."""

    @property
    def box(self) -> tuple[slice, ...]:
        """The smallest box around the indices."""
        if self.rows is not None:
            return (slice(self.rows.start, self.rows.stop),)
        columns = list(zip(*self.indices, strict=True))
        return tuple(slice(min(column), max(column) + 1) for column in columns)

    def nbytes(self, param: Param, itemsize: int) -> int:
        """Bytes of the box in memory."""
        inner = math.prod(param.sizes[len(self.box) :])
        return inner * math.prod(part.stop - part.start for part in self.box) * itemsize


Chain = tuple[Unit, ...]
"""Units that are read one after the other: a single one, or all pieces of one matrix."""


class WeightStore:
    """The weights of one checkpoint, opened for reading by slices.

    Args:
        folder: the params folder of a checkpoint.
    Raises:
        ConfigError: naming every array that is missing, has another shape or a dtype that is no float.
    """

    def __init__(self, folder: Path, arch: Architecture):
        self.table = flat_table(arch)
        self._folder = folder.resolve()
        self._context = ts.Context({"cache_pool#ocdbt": {"total_bytes_limit": 100_000_000}})
        meta = self._metadata()
        opened = {
            key: ts.open(self._spec(key, meta), read=True, open=True, context=self._context) for key in self.table
        }
        self._arrays: dict[str, ts.TensorStore] = {}
        faults = [self._opened(key, future) for key, future in opened.items()]
        extra = _stored_names(meta) - {array_name(key) for key in self.table}
        faults += [f"{folder}: extra array {name}" for name in sorted(extra)]
        refuse(faults)

    def itemsize(self, key: str) -> int:
        """Bytes of an element as stored."""
        return self._arrays[key].dtype.numpy_dtype.itemsize

    def dtype(self, key: str) -> np.dtype:
        """Dtype as stored."""
        return self._arrays[key].dtype.numpy_dtype

    def chains(self, wanted: Sequence[tuple[str, Index]], limit_bytes: int) -> Iterator[Chain]:
        """Group slices into reads: those of one stored chunk together, as long as they fit into `limit_bytes`.

        A matrix beyond the limit that is not stacked, an embedding, is read in pieces of whole chunks. A chunk is decoded
        whole whatever is asked of it, so one that is larger than the limit is decoded several times.
        """
        for key, slices in itertools.groupby(wanted, key=lambda pair: pair[0]):
            pieces = self._pieces(key, limit_bytes)
            if pieces:
                yield pieces
            else:
                yield from ((unit,) for unit in self._units(key, [index for _, index in slices], limit_bytes))

    def _units(self, key: str, indices: Sequence[Index], limit_bytes: int) -> Iterator[Unit]:
        group: list[Index] = []
        for index in indices:
            grown = Unit(key, (*group, index))
            is_full = grown.nbytes(self.table[key], self.itemsize(key)) > limit_bytes
            if group and (is_full or self._cell(key, index) != self._cell(key, group[-1])):
                yield Unit(key, tuple(group))
                group = []
            group.append(index)
        yield Unit(key, tuple(group))

    def _pieces(self, key: str, limit_bytes: int) -> Chain:
        """Return the pieces of a large matrix, none if it is small or stored as one chunk."""
        param = self.table[key]
        whole = Unit(key, ((),))
        if not can_be_cut(param) or whole.nbytes(param, self.itemsize(key)) <= limit_bytes:
            return ()
        num_rows, chunk_rows = param.sizes[0], self._chunk(key)[0]
        row_bytes = param.sizes[1] * self.itemsize(key)
        step = max(1, _PIECE_BYTES // (row_bytes * chunk_rows)) * chunk_rows
        starts = range(0, num_rows, step)
        return tuple(Unit(key, ((),), range(at, min(at + step, num_rows))) for at in starts) if len(starts) > 1 else ()

    def decoded_bytes(self, unit: Unit) -> int:
        """Bytes of all chunks that a unit touches: what the reader must decode."""
        array = self._arrays[unit.key]
        chunk = self._chunk(unit.key)
        box = (*unit.box, *(slice(0, size) for size in array.shape[len(unit.box) :]))
        cells = [-(-part.stop // n) - part.start // n for part, n in zip(box, chunk, strict=True)]
        return math.prod(cells) * math.prod(chunk) * self.itemsize(unit.key)

    def read(self, unit: Unit) -> ts.Future:
        """Start to read the box of a unit; the result is an array in the order of the stored dimensions."""
        return self._arrays[unit.key][unit.box].read()

    def results(self, chain: Chain, first: ts.Future) -> Iterator[tuple[Unit, np.ndarray]]:
        """Yield the units of a chain with their values, the next one is read meanwhile; `first` is the first one's read.

        Raises:
            ConfigError: the checkpoint is damaged there.
        """
        reading = first
        for unit, following in itertools.zip_longest(chain, chain[1:]):
            values = self._result(unit, reading)
            if following is not None:
                reading = self.read(following)
            yield unit, values

    def _result(self, unit: Unit, future: ts.Future) -> np.ndarray:
        try:
            return future.result()
        except ValueError as error:
            which = f"slices {unit.indices[0]} to {unit.indices[-1]}" if unit.rows is None else f"rows {unit.rows}"
            where = f"{self._folder}: array {array_name(unit.key)}, {which}"
            raise ConfigError([f"{where}: cannot be read, the checkpoint is damaged ({str(error)[:300]})"]) from error

    def _cell(self, key: str, index: Index) -> Index:
        return tuple(at // n for at, n in zip(index, self._chunk(key), strict=False))

    def _chunk(self, key: str) -> tuple[int, ...]:
        """Return the shape that is stored, and decoded, as one."""
        shape = self._arrays[key].chunk_layout.read_chunk.shape or ()
        sizes = [size for size in shape if size is not None]
        assert len(sizes) == len(self._arrays[key].shape), (
            f"{array_name(key)}: chunks {shape} are not known in all dims"
        )
        return tuple(sizes)

    def _metadata(self) -> dict:
        try:
            return json.loads((self._folder / "_METADATA").read_text())
        except (OSError, ValueError) as error:
            raise ConfigError([f"{self._folder}: has no readable Orbax metadata ({error})"]) from error

    def _spec(self, key: str, meta: dict) -> dict[str, object]:
        base = {"driver": "file", "path": f"{self._folder}/"}
        path = f"{array_name(key)}/"
        is_ocdbt = meta.get("use_ocdbt", True)
        kvstore = {"driver": "ocdbt", "base": base, "path": path, "cache_pool": "cache_pool#ocdbt"}
        plain = {"driver": "file", "path": f"{self._folder}/{path}"}
        return {
            "driver": "zarr3" if meta.get("use_zarr3") else "zarr",
            "kvstore": kvstore if is_ocdbt else plain,
            "recheck_cached_data": False,
            "recheck_cached_metadata": False,
            "fill_missing_data_reads": False,  # a lost chunk is an error, not zeros
        }

    def _opened(self, key: str, future: ts.Future) -> str | None:
        """Keep an opened array; return what is wrong with it."""
        where = f"{self._folder}: array {array_name(key)}"
        try:
            array = future.result()
        except ValueError as error:
            return f"{where}: missing or damaged ({str(error)[:200]})"
        expected = self.table[key].sizes
        if tuple(array.shape) != expected:
            return f"{where}: has shape {tuple(array.shape)}, the architecture says {expected}"
        if array.dtype.name not in STORED:
            return f"{where}: has dtype {array.dtype.name}, expected one of {', '.join(STORED)}"
        self._arrays[key] = array
        return None


def refuse_damaged(checkpoint: Path, share: tuple[int, int] = (0, 1)) -> int:
    """Compare the files that a conversion reads with the checksums that the run wrote; return how many it compared.

    0: the checkpoint has no checksums, it was made elsewhere or its run was killed right after it wrote it.

    Args:
        share: (i, n) compares every n-th file from the i-th on.
    Raises:
        ConfigError: naming the first damaged file.
    """
    if not (checkpoint / FILE).is_file():
        return 0
    try:
        damaged = damaged_files(checkpoint, PARTS, share)
    except OSError as error:
        raise ConfigError([f"{error.filename}: cannot be read ({error.strerror}); is the disk at fault?"]) from error
    if damaged:
        more = f" and {len(damaged) - 1} more files" if len(damaged) > 1 else ""
        fault = f"{damaged[0]}{more}: damaged or gone since the run wrote it ({checkpoint / FILE})"
        raise ConfigError([f"{fault}; convert an older checkpoint, or bring the file back from a copy"])
    return len(list(stated_checksums(checkpoint, PARTS))[share[0] :: share[1]])


def _stored_names(meta: dict) -> set[str]:
    entries = meta.get("tree_metadata", {}).values()
    return {".".join(part["key"] for part in entry["key_metadata"]) for entry in entries}
