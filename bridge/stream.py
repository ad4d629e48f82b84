"""Orbax slices -> Hugging Face tensors in shard files, through a bounded amount of memory.

    main thread     takes memory from the budget, starts a read, hands it on
    worker threads  wait for the read, quantise, write, give the memory back
    disk thread     waits until a file is on the disk, reads it back, compares checksums

Peak memory is the budget, or one unit of reading if a single slice is larger than it; of an embedding a unit is some
rows. Knows no config.json.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import tensorstore as ts

from bridge.export import ExportTensor
from bridge.fp8 import MIN_SCALE, NonFiniteWeight, dequantise
from bridge.host_tensors import HostTensor, hf_rows, host_tensor
from bridge.names import cut
from bridge.orbax_reader import Chain, Unit, WeightStore
from bridge.shard_writer import ShardFile, ShardPlan
from rl_jax.models.architecture import Architecture
from rl_jax.models.fp8_rule import Format, fp8_block
from rl_jax.models.schema import Param

UNIT_BYTES = 64 << 20
"""Small slices of one stored chunk are read together up to this size."""
_COPIES = 3
"""Times a unit is in memory at once: decoded chunk, slice, result."""
_SAMPLED_ROWS = 16
"""Rows of each matrix that the error of quantisation is measured on."""


@dataclass(kw_only=True)
class Kind:
    """What happened to all slices of one parameter."""

    tensors: int = 0
    nbytes: int = 0
    """Bytes written, scales included."""
    error_sq: float = 0.0
    """Sum of squared errors over the sampled rows."""
    weight_sq: float = 0.0
    """Sum of squares over the sampled rows."""
    dead: int = 0
    """Quantised matrices without a weight of at least 1e-12."""

    @property
    def relative_error(self) -> float:
        """Root of the squared error over that of the squares."""
        return (self.error_sq / self.weight_sq) ** 0.5 if self.weight_sq else 0.0


@dataclass(kw_only=True)
class Tally:
    """What a conversion did; threads add under the lock."""

    kinds: dict[str, Kind] = field(default_factory=dict)
    read_bytes: int = 0
    """Bytes of weights read, as stored."""
    decoded_bytes: int = 0
    """Bytes of the chunks that they were in; more than read_bytes where a chunk was decoded several times."""
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)


class MemoryBudget:
    """What may be under way at once, in bytes and in number; what needs more than all bytes waits to be alone."""

    def __init__(self, limit_bytes: int, max_num: int):
        self._limit = limit_bytes
        self._max_num = max_num
        self._used = self._num = 0
        self._changed = threading.Condition()

    def take(self, nbytes: int) -> None:
        """Wait until `nbytes` are free."""
        with self._changed:
            self._changed.wait_for(lambda: self._fits(nbytes))
            self._used += nbytes
            self._num += 1

    def give_back(self, nbytes: int) -> None:
        """Return what was taken."""
        with self._changed:
            self._used -= nbytes
            self._num -= 1
            self._changed.notify_all()

    def _fits(self, nbytes: int) -> bool:
        return self._num == 0 or (self._used + nbytes <= self._limit and self._num < self._max_num)


class ShardStream:
    """Writes the planned files of one host.

    Args:
        plans: files to write, in the order of the export table.
        folder: where they go; `marks` beside it says which are done.
        budget_bytes: memory for slices under way.
    """

    def __init__(
        self,
        store: WeightStore,
        arch: Architecture,
        fmt: Format,
        plans: Sequence[ShardPlan],
        folder: Path,
        marks: Path,
        budget_bytes: int,
    ):
        self.tally = Tally()
        self._store = store
        self._arch = arch
        self._fmt: Format = fmt
        self._folder, self._marks = folder, marks
        self._budget_bytes = budget_bytes
        self._budget = MemoryBudget(budget_bytes, 1)
        self._owner = {(t.param, t.index): plan for plan in plans for t in plan.tensors}
        self._rows = {(t.param, t.index, t.role): t for plan in plans for t in plan.tensors}
        self._blocks = {key: fp8_block(arch, fmt, key) for key in store.table}
        self._files: dict[str, ShardFile] = {}
        self._disk = ThreadPoolExecutor(1, "disk")
        self._failure: BaseException | None = None

    def run(self, threads: int, on_bytes: Callable[[int], None]) -> None:
        """Write all files; `on_bytes` gets the bytes read, from any thread.

        Raises:
            NonFiniteWeight, ConfigError, OSError: the first failure; files that are not done are removed.
        """
        wanted = list(self._owner)
        # As many reads wait for a thread as there are threads: more would only take memory.
        self._budget = MemoryBudget(self._budget_bytes, 2 * threads)
        pool = ThreadPoolExecutor(threads, "convert")
        try:
            for chain in self._store.chains(wanted, UNIT_BYTES):
                cost = self._cost(chain)
                self._budget.take(cost)
                if self._failure:
                    break
                pool.submit(self._work, chain, self._store.read(chain[0]), cost, on_bytes)
        finally:
            pool.shutdown(wait=True, cancel_futures=self._failure is not None)
            self._disk.shutdown(wait=True, cancel_futures=self._failure is not None)
            for file in self._files.values():
                file.close()
        if self._failure:
            raise self._failure

    def _cost(self, chain: Chain) -> int:
        """Return the memory that a chain takes: two units of it are under way at once."""
        itemsize = self._store.itemsize(chain[0].key)
        box = chain[0].nbytes(self._store.table[chain[0].key], itemsize)
        return len(chain[:2]) * (max(box, self._store.decoded_bytes(chain[0])) + (_COPIES - 1) * box)

    def _work(self, chain: Chain, reading: ts.Future, cost: int, on_bytes: Callable[[int], None]) -> None:
        try:
            if self._failure:
                return
            results = self._counted(self._store.results(chain, reading), on_bytes)
            if chain[0].rows is not None:
                self._convert_rows(chain[0].key, results)
                return
            for unit, values in results:
                origin = tuple(part.start for part in unit.box)
                for index in unit.indices:
                    self._convert(unit.key, index, values[tuple(np.subtract(index, origin))])
        except BaseException as error:  # noqa: BLE001 - handed to the main thread, which raises it
            self._failure = self._failure or error
        finally:
            self._budget.give_back(cost)

    def _counted(
        self, results: Iterable[tuple[Unit, np.ndarray]], on_bytes: Callable[[int], None]
    ) -> Iterator[tuple[Unit, np.ndarray]]:
        for unit, values in results:
            yield unit, values
            with self.tally.lock:
                self.tally.read_bytes += values.nbytes
                self.tally.decoded_bytes += self._store.decoded_bytes(unit)
            on_bytes(values.nbytes)

    def _convert(self, key: str, index: tuple[int, ...], piece: np.ndarray) -> None:
        param, block = self._store.table[key], self._blocks[key]
        weight = self._rows[key, index, "weight"]
        made = host_tensor(param, piece, block, self._fmt)
        if not made.is_finite:
            raise NonFiniteWeight(weight.name)
        self._count(param, key, piece, made)
        self._write(weight, (made.weight,))
        if made.scale is not None:
            self._write(self._rows[key, index, "scale"], (made.scale,))

    def _convert_rows(self, key: str, results: Iterable[tuple[Unit, np.ndarray]]) -> None:
        """Convert a matrix that comes in pieces."""
        weight = self._rows[key, (), "weight"]

        def pieces() -> Iterator[np.ndarray]:
            for unit, values in results:
                param = cut(self._store.table[key], len(values))
                made = host_tensor(param, values, None, self._fmt)
                if not made.is_finite:
                    raise NonFiniteWeight(weight.name)
                if unit.box[0].start == 0:
                    self._count(param, key, values, made)
                else:
                    self._add(key, Kind(nbytes=made.weight.nbytes))
                yield made.weight

        assert self._blocks[key] is None, f"{key}: is read in pieces, and is quantised"
        self._write(weight, pieces())

    def _write(self, tensor: ExportTensor, pieces: Iterable[np.ndarray]) -> None:
        plan = self._owner[tensor.param, tensor.index]
        with self.tally.lock:
            if plan.file not in self._files:
                self._files[plan.file] = ShardFile(self._folder, self._marks, plan, self._disk)
            file = self._files[plan.file]
        if file.write(tensor.name, pieces):
            self._disk.submit(self._finish, file)

    def _finish(self, file: ShardFile) -> None:
        try:
            file.finish()
        except BaseException as error:  # noqa: BLE001 - handed to the main thread, which raises it
            self._failure = self._failure or error

    def _count(self, param: Param, key: str, piece: np.ndarray, made: HostTensor) -> None:
        rows_NK = hf_rows(param, piece, _SAMPLED_ROWS).astype(np.float32)
        got_NK = made.weight[:_SAMPLED_ROWS]
        if made.scale is not None:
            got_NK = dequantise(got_NK, made.scale[: 1 if self._fmt == "fp8-block" else _SAMPLED_ROWS])
        one = Kind(
            tensors=1,
            nbytes=made.weight.nbytes + (made.scale.nbytes if made.scale is not None else 0),
            error_sq=float(np.square(rows_NK - got_NK.astype(np.float32), dtype=np.float64).sum()),
            weight_sq=float(np.square(rows_NK, dtype=np.float64).sum()),
            dead=made.scale is not None and bool((made.scale == MIN_SCALE).all()),
        )
        self._add(key, one)

    def _add(self, key: str, one: Kind) -> None:
        with self.tally.lock:
            kind = self.tally.kinds.setdefault(key, Kind())
            for name, value in vars(one).items():
                setattr(kind, name, getattr(kind, name) + value)


def read_totals(plans: Sequence[ShardPlan], itemsizes: Mapping[str, int]) -> int:
    """Return the bytes that files are read from, as stored."""
    weights = [tensor for plan in plans for tensor in plan.tensors if tensor.role == "weight"]
    return sum(int(np.prod(tensor.shape)) * itemsizes[tensor.param] for tensor in weights)
