"""The changed blocks of one tensor: found, packed, applied; bytes are compared, so -0 and NaN count as they are stored.

A matrix (all dimensions but the last are rows) is cut into blocks of 128 x 128 elements, those of the FP8 scales;
anything else into runs of 16,384 elements. Only blocks with a change travel. Inside such a block either the changed
elements travel (`places`, 14 bits each, with their `values`) or, where that is no shorter, the block whole (`dense`).
One Adam step changes about one FP8 element in a thousand (facts measured with power-of-two scales), so nearly every
block has a change and nearly every block is sparse.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from bridge.wire.tensors import WireError

BLOCK = 128
RUN = BLOCK * BLOCK
_PLACE_BYTES = 2


@dataclass(frozen=True)
class Grid:
    """How a tensor is cut: rows x cols elements in blocks of high x wide, numbered row by row."""

    rows: int
    cols: int
    high: int
    wide: int

    @property
    def num_cols(self) -> int:
        """Blocks side by side."""
        return -(-self.cols // self.wide)

    @property
    def num_blocks(self) -> int:
        return -(-self.rows // self.high) * self.num_cols


def grid_of(shape: tuple[int, ...]) -> Grid:
    """Return how a tensor of this shape is cut."""
    num_elements = int(np.prod(shape, dtype=np.int64))
    if len(shape) < 2 or num_elements == 0:
        return Grid(min(num_elements, 1), num_elements, 1, RUN)
    return Grid(num_elements // shape[-1], shape[-1], BLOCK, BLOCK)


@dataclass(frozen=True)
class Delta:
    """What changed in one tensor.

    Attributes:
        blocks: [k] uint32, numbers of the changed blocks, ascending.
        counts: [k] uint16, changed elements that follow for the block; 0: the block is in `dense`.
        places: [s] uint16, row * wide + column inside the block, ascending.
        values: [s] elements as unsigned integers, as they are after the change.
        dense: [d] elements of the whole blocks, row by row, one block after the other.
        num_changed: elements that changed.

    Example: element 3 of a bias of 5 elements changed to 0x3F80 (bfloat16 1.0): blocks [0], counts [1], places [3],
    values [0x3F80], dense []. Five elements would cost 4 bytes each, so with three changes the run travels whole.
    """

    blocks: np.ndarray
    counts: np.ndarray
    places: np.ndarray
    values: np.ndarray
    dense: np.ndarray
    num_changed: int

    @property
    def parts(self) -> tuple[np.ndarray, ...]:
        """The arrays in the order in which they lie in the file."""
        return self.blocks, self.counts, self.places, self.values, self.dense

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


def find_delta(old: np.ndarray, new: np.ndarray, shape: tuple[int, ...]) -> Delta:
    """Compare the flat elements of two versions of a tensor, a row of blocks at a time."""
    grid = grid_of(shape)
    slabs = [slab for start in range(0, grid.rows, grid.high) if (slab := _slab(old, new, grid, start))]
    columns = list(zip(*slabs, strict=True)) or [()] * 6
    kinds = (np.dtype("<u4"), np.dtype("<u2"), np.dtype("<u2"), new.dtype, new.dtype)
    joined = [np.concatenate([np.empty(0, kind), *column]) for kind, column in zip(kinds, columns[:5], strict=True)]
    return Delta(*joined, num_changed=sum(columns[5]))


def _slab(old: np.ndarray, new: np.ndarray, grid: Grid, start: int) -> tuple | None:
    """Return blocks, counts, places, values, dense and the number of changes of one row of blocks."""
    stop = min(start + grid.high, grid.rows)
    part = slice(start * grid.cols, stop * grid.cols)
    flat = np.flatnonzero(old[part] != new[part])
    if flat.size == 0:
        return None
    row, col = np.divmod(flat, grid.cols)
    block, inner = np.divmod(col, grid.wide)
    counts = np.bincount(block, minlength=grid.num_cols)
    widths = np.minimum(grid.wide, grid.cols - grid.wide * np.arange(grid.num_cols))
    is_dense = counts * (_PLACE_BYTES + new.itemsize) >= (stop - start) * widths * new.itemsize
    kept = np.flatnonzero(~is_dense[block])
    kept = kept[np.argsort(block[kept], kind="stable")]
    changed = np.flatnonzero(counts)
    table = new[part].reshape(stop - start, grid.cols)
    whole = [_window(table, grid, number).reshape(-1) for number in changed[is_dense[changed]].tolist()]
    return (
        (changed + start // grid.high * grid.num_cols).astype("<u4"),
        np.where(is_dense, 0, counts)[changed].astype("<u2"),
        (row * grid.wide + inner)[kept].astype("<u2"),
        new[part][flat[kept]],
        np.concatenate([np.empty(0, new.dtype), *whole]),
        int(flat.size),
    )


def _window(table: np.ndarray, grid: Grid, number: int) -> np.ndarray:
    return table[:, number * grid.wide : (number + 1) * grid.wide]


def unpack(data: np.ndarray, bits: np.dtype, lengths: tuple[int, int, int], num_changed: int) -> Delta:
    """Read a delta from its bytes.

    Args:
        lengths: blocks, sparse elements, elements of whole blocks.
    Raises:
        WireError: the bytes are too few or too many.
    """
    num_blocks, num_sparse, num_dense = lengths
    kinds = [("<u4", num_blocks), ("<u2", num_blocks), ("<u2", num_sparse), (bits, num_sparse), (bits, num_dense)]
    expected = sum(np.dtype(kind).itemsize * count for kind, count in kinds)
    if min(lengths) < 0 or data.nbytes != expected:
        raise WireError(f"delta of {num_blocks} blocks takes {expected} bytes, got {data.nbytes}")
    parts, start = [], 0
    for kind, count in kinds:
        parts.append(np.frombuffer(data, kind, count, start))
        start += parts[-1].nbytes
    return Delta(*parts, num_changed=num_changed)


def apply_delta(target: np.ndarray, delta: Delta, shape: tuple[int, ...]) -> None:
    """Write a delta into the flat elements of the old version, which become those of the new one.

    Raises:
        WireError: a block or a place lies outside the tensor, or the counts do not add up; `target` is then spoilt.
    """
    grid = grid_of(shape)
    counts = delta.counts.astype(np.int64)
    if counts.sum() != delta.places.size or (delta.blocks >= grid.num_blocks).any():
        raise WireError("delta names blocks or elements that the tensor does not have")
    block_row, block_col = np.divmod(np.repeat(delta.blocks.astype(np.int64), counts), grid.num_cols)
    row, col = np.divmod(delta.places.astype(np.int64), grid.wide)
    row, col = row + block_row * grid.high, col + block_col * grid.wide
    if (row >= grid.rows).any() or (col >= grid.cols).any():
        raise WireError("delta names elements beyond the edge of the tensor")
    target[row * grid.cols + col] = delta.values
    table, used = target.reshape(grid.rows, grid.cols), 0
    for window in _dense_windows(table, delta.blocks[counts == 0], grid):
        values = delta.dense[used : used + window.size]
        if values.size != window.size:
            raise WireError("delta ends inside a block")
        window[...] = values.reshape(window.shape)
        used += window.size
    if used != delta.dense.size:
        raise WireError(f"delta has {delta.dense.size} elements of whole blocks, the blocks take {used}")


def _dense_windows(table: np.ndarray, blocks: np.ndarray, grid: Grid) -> Iterator[np.ndarray]:
    for number in blocks.tolist():
        row, col = divmod(number, grid.num_cols)
        yield _window(table[row * grid.high : (row + 1) * grid.high], grid, col)
