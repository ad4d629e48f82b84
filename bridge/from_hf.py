"""Hugging Face directory -> Orbax checkpoint with weights only, tensor by tensor; the way back of to_hf.py.

Peak memory is a few tensors for each thread; an embedding is read and written some rows at a time.
"""

import json
import shutil
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

from bridge.host_tensors import is_finite, unstored
from bridge.names import can_be_cut, cut, hf_slices
from bridge.orbax_writer import Box, WeightWriter, piece_rows
from bridge.out_folder import PLAN, appear, aside_of, failed, held, refuse_full
from bridge.safetensors_reader import QUANTISED, TensorFiles
from bridge.shard_writer import write_whole
from bridge.sources import SOURCE_FOLDER, carried_files, read_config
from rl_jax.checksums import write_checksums
from rl_jax.config import ConfigError
from rl_jax.models.architecture import Architecture
from rl_jax.models.schema import Param, flat_table, num_params

_MADE = "made"
"""Part of the folder aside that becomes the directory."""
DTYPES = {"float32": np.dtype(np.float32), "bf16": np.dtype(ml_dtypes.bfloat16)}


@dataclass(frozen=True)
class Piece:
    """What is read at once: a tensor, or some rows of a large one.

    Example: Piece("embed_VD", (slice(8192, 16384),), "model.embed_tokens.weight", range(8192, 16384)).
    """

    key: str
    box: Box
    """Where it goes in the parameter."""
    name: str
    rows: range | None = None
    """Rows of the tensor; None = all."""


Waiting = tuple[Piece, Future[tuple[np.ndarray, bool]]]
"""A piece, and its values with whether they are exact."""


@dataclass(frozen=True, kw_only=True)
class FromHf:
    """What to convert, and how.

    `files` are those of the directory `source`, checked against `arch`; `checkpoint` is where the checkpoint goes
    inside `out`, for example checkpoints/step_000000; `meta` is the text of its metadata.
    """

    source: Path
    files: TensorFiles
    arch: Architecture
    out: Path
    checkpoint: Path
    meta: str
    dtype: np.dtype
    threads: int


@dataclass(kw_only=True)
class Stored:
    """What was written."""

    tensors: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    rounded: int = 0
    """Tensors that the dtype of the checkpoint does not hold exactly."""


def convert_from_hf(job: FromHf, on_bytes: Callable[[int], None]) -> Stored:
    """Write the checkpoint; the directory appears whole or not at all. What a killed attempt left is removed first.

    Raises:
        ConfigError: the output exists or cannot be made, another process makes it, the disk is too full, a weight is not
            finite, or a file was cut while it was read.
        OSError: the disk is full.
    """
    out = job.out.resolve()
    aside = aside_of(out)
    with held(out):
        _refuse_other(aside)
        made = aside / _MADE
        shutil.rmtree(made, ignore_errors=True)
        try:
            write_whole(aside / PLAN, json.dumps({"from_hf": str(job.source)}).encode())
            refuse_full(out, aside, num_params(job.arch) * job.dtype.itemsize)
            stored = _write(job, made, on_bytes)
            appear(made, out)
        except OSError as error:
            shutil.rmtree(aside, ignore_errors=True)
            raise failed(out, error) from error
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
    return stored


def _refuse_other(aside: Path) -> None:
    """Refuse a folder aside that holds what a conversion in the other direction can go on from."""
    plan = aside / PLAN
    if plan.is_file() and "from_hf" not in json.loads(plan.read_text()):
        raise ConfigError([f"{aside}: another conversion to this directory was begun; finish it, or remove it"])


def source_bytes(files: TensorFiles, arch: Architecture) -> int:
    """Return the bytes that will be read, without scales."""
    names = (name for param in flat_table(arch).values() for _, name in hf_slices(param))
    return sum(files.tensors[name].nbytes for name in names)


def _write(job: FromHf, made: Path, on_bytes: Callable[[int], None]) -> Stored:
    table = flat_table(job.arch)
    stored, names, rounded = Stored(), set[str](), set[str]()
    with WeightWriter(made / job.checkpoint / "params", table, dict.fromkeys(table, job.dtype)) as writer:
        for piece, (values, is_exact) in _pieces(job, table):
            writer.write(piece.key, piece.box, values)
            names.add(piece.name)
            rounded |= set() if is_exact else {piece.name}
            read_bytes = values.size * job.files.itemsize(piece.name)
            stored.read_bytes += read_bytes
            stored.written_bytes += values.nbytes
            on_bytes(read_bytes)
    stored.tensors, stored.rounded = len(names), len(rounded)
    (made / job.checkpoint / "meta").mkdir()
    (made / job.checkpoint / "meta" / "metadata").write_text(job.meta)
    write_checksums(made / job.checkpoint)
    (made / SOURCE_FOLDER).mkdir()
    (made / SOURCE_FOLDER / "config.json").write_text(json.dumps(read_config(job.source), indent=1) + "\n")
    (made / "tokenizer").mkdir()
    for path in carried_files(job.source):
        shutil.copyfile(path, made / "tokenizer" / path.name)
    return stored


def _pieces(job: FromHf, table: dict[str, Param]) -> Iterator[tuple[Piece, tuple[np.ndarray, bool]]]:
    """Yield the pieces in order; a few more are read meanwhile by threads."""
    waiting: deque[Waiting] = deque()
    with ThreadPoolExecutor(job.threads, "convert") as pool:
        for key, param in table.items():
            for piece in _cut_up(job, key, param):
                waiting.append((piece, pool.submit(_read, job, param, piece)))
                if len(waiting) > job.threads:
                    yield waiting[0][0], waiting.popleft()[1].result()
        while waiting:
            yield waiting[0][0], waiting.popleft()[1].result()


def _cut_up(job: FromHf, key: str, param: Param) -> Iterator[Piece]:
    for index, name in hf_slices(param):
        step = piece_rows(param, job.dtype.itemsize)
        if job.files.tensors[name].dtype == QUANTISED or not can_be_cut(param) or step >= param.sizes[0]:
            yield Piece(key, index, name)
            continue
        for start in range(0, param.sizes[0], step):
            rows = range(start, min(start + step, param.sizes[0]))
            yield Piece(key, (slice(rows.start, rows.stop),), name, rows)


def _read(job: FromHf, param: Param, piece: Piece) -> tuple[np.ndarray, bool]:
    value = job.files.read(piece.name, piece.rows)
    cast = value.astype(job.dtype)
    if not is_finite(cast):
        raise ConfigError([f"{job.files.tensors[piece.name].file}: {piece.name}: {_why_not_finite(value)}"])
    is_exact = cast.dtype.itemsize >= value.dtype.itemsize or bool((cast.astype(value.dtype) == value).all())
    return unstored(param if piece.rows is None else cut(param, len(value)), cast), is_exact


def _why_not_finite(value: np.ndarray) -> str:
    if np.isfinite(value).all():
        return "holds values beyond bfloat16; use --format float32"
    return "holds NaN or infinity; fetch the model again, or use another"
