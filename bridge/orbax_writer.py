"""Writes the weights of an Orbax checkpoint slice by slice, without ever holding an array; rl_jax restores it as its own.

Layout: as rl_jax/checkpoint.py describes, with weights only. One stored chunk a slice of a layer or an expert.
"""

import contextlib
import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import numpy as np
import tensorstore as ts

from bridge.names import can_be_cut
from bridge.orbax_reader import array_name
from rl_jax.models.schema import Param

_CHUNK_BYTES = 64 << 20  # slices of a layer that is smaller share a chunk, experts do not
_PIECE_BYTES = 16 << 20  # of an embedding
_COMMIT_BYTES = 64 << 20
"""Slices are committed together up to this size: they wait in memory, and each commit writes an index of all."""
_SYSTEM_ERROR = re.compile(r"os_error_code='(\d+)'")
Box = tuple[int | slice, ...]
"""A place in the first dimensions of a parameter."""


class WeightWriter:
    """Writes slices into the arrays of one params folder. A context: leaving it commits what is left.

    Args:
        folder: the params folder to make.
        table: parameters by key.
        dtypes: float32 or bfloat16 for each key.
        compress: by zstd, as Orbax does unless it is told otherwise; costs more than it saves, see rl_jax/checkpoint.py.
    """

    def __init__(
        self, folder: Path, table: Mapping[str, Param], dtypes: Mapping[str, np.dtype], *, compress: bool = False
    ):
        folder.mkdir(parents=True)
        self._folder = folder.resolve()
        self._table = table
        self._waiting_bytes = 0
        self._transaction = ts.Transaction()
        context = ts.Context({"cache_pool#ocdbt": {"total_bytes_limit": 100_000_000}})

        def opened(key: str, param: Param) -> ts.TensorStore:
            spec = self._spec(key, param, dtypes[key], compress)
            opening = ts.open(spec, create=True, open=True, context=context)
            _wait(opening, f"array {key}")
            return opening.result()

        self._arrays = {key: opened(key, param) for key, param in table.items()}
        (folder / "_METADATA").write_text(json.dumps(_tree_metadata(table)))

    def __enter__(self) -> "WeightWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._commit()
        else:
            self._transaction.abort()

    def write(self, key: str, box: Box, piece: np.ndarray) -> None:
        """Write one slice, `box` is its place in the stacked dimensions; or rows of a matrix. For one thread only.

        Raises:
            OSError: the disk does not take it.
        """
        _wait(self._arrays[key].with_transaction(self._transaction)[box].write(piece), f"{key}{list(box)}")
        self._waiting_bytes += piece.nbytes
        if self._waiting_bytes >= _COMMIT_BYTES:
            self._commit()

    def _commit(self) -> None:
        _wait(self._transaction.commit_async(), "weights")
        self._transaction = ts.Transaction()
        self._waiting_bytes = 0

    def _spec(self, key: str, param: Param, dtype: np.dtype, compress: bool) -> dict[str, object]:
        base = {"driver": "file", "path": f"{self._folder}/"}
        return {
            "driver": "zarr",
            "kvstore": {"driver": "ocdbt", "base": base, "path": f"{array_name(key)}/"},
            "dtype": dtype.name,
            "metadata": {
                "shape": list(param.sizes),
                "chunks": chunk_shape(param, dtype.itemsize),
                "compressor": {"id": "zstd", "level": 1} if compress else None,
            },
            "store_data_equal_to_fill_value": True,
        }


def _wait(future: ts.Future | ts.WriteFutures, what: str) -> None:
    """Wait for TensorStore.

    Raises:
        OSError: with the number and the words of the system, where TensorStore tells them.
    """
    try:
        future.result()
    except KeyboardInterrupt:
        with contextlib.suppress(ValueError):
            future.result()  # else it would go on to write into a folder that is being removed
        raise
    except ValueError as error:
        found = _SYSTEM_ERROR.search(str(error))
        if found:
            raise OSError(int(found[1]), os.strerror(int(found[1]))) from error
        raise OSError(f"{what}: {str(error)[:300]}") from error


def chunk_shape(param: Param, itemsize: int) -> list[int]:
    """Return what is stored together: one slice, some rows of an embedding, or the whole of a small array."""
    if math.prod(param.sizes) * itemsize <= _CHUNK_BYTES:
        return list(param.sizes)
    if can_be_cut(param):
        return [piece_rows(param, itemsize), param.sizes[1]]
    num_stacked = len(param.stacked)
    return [1] * num_stacked + list(param.sizes[num_stacked:])


def piece_rows(param: Param, itemsize: int) -> int:
    """Return how many rows of a matrix that is not stacked are stored, and best written, together."""
    if math.prod(param.sizes) * itemsize <= _CHUNK_BYTES:
        return param.sizes[0]
    return min(param.sizes[0], max(1, _PIECE_BYTES // (math.prod(param.sizes[1:]) * itemsize)))


def _tree_metadata(table: Mapping[str, Param]) -> dict[str, object]:
    """Return what Orbax keeps about a tree of arrays."""
    tree = {}
    for key, param in table.items():
        path = key.split("/")
        tree[str(tuple(path))] = {
            "key_metadata": [{"key": part, "key_type": 2} for part in path],
            "value_metadata": {
                "value_type": "jax.Array",
                "skip_deserialize": False,
                "write_shape": list(param.sizes),
            },
        }
    return {
        "tree_metadata": tree,
        "use_ocdbt": True,
        "use_zarr3": False,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    }
