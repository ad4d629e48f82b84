"""One slice of a parameter on the host -> its Hugging Face tensor; the same bytes as export_arrays makes on a device."""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from bridge.fp8 import quantise
from bridge.names import from_hf, to_hf
from rl_jax.models.fp8_rule import BLOCK, Format
from rl_jax.models.schema import Param

_STRIP_BYTES = 1 << 20
_FINITE_AT_ONCE = 1 << 16  # elements, so that the intermediate stays in the cache


@dataclass(frozen=True)
class HostTensor:
    """A tensor as stored, its scale if it is quantised, and whether all of it is finite."""

    weight: np.ndarray
    scale: np.ndarray | None
    is_finite: bool


def host_tensor(param: Param, piece: np.ndarray, block: tuple[int, int] | None, fmt: Format) -> HostTensor:
    """Convert one slice.

    Args:
        piece: float32 or bfloat16, in the order of the parameter's inner dimensions.
        block: see bridge.export.fp8_block.
    """
    if block is None:
        value = _cast(piece, fmt)  # may overflow: bfloat16 ends a little below float32
        return HostTensor(stored(param, value), None, is_finite(value))
    if _is_turned(param) and block == (BLOCK, BLOCK):
        # Square blocks may be found in the matrix as it lies, and codes are less to turn than weights.
        codes_KN, scale_KN = quantise_strips(piece.reshape(param.hf_shape[::-1]), block)
        return HostTensor(transposed(codes_KN), scale_KN.T.copy(), bool(np.isfinite(scale_KN).all()))
    codes_NK, scale_NK = quantise_strips(stored(param, piece), block)
    return HostTensor(codes_NK, scale_NK, bool(np.isfinite(scale_NK).all()))


def quantise_strips(matrix: np.ndarray, block: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Return quantise(matrix, block), made in strips of rows that stay in the cache: XLA passes over its input twice."""
    rows, columns = matrix.shape
    height = max(_STRIP_BYTES // (columns * matrix.itemsize * BLOCK), 1) * BLOCK
    strips = [_quantise(matrix[start : start + height], block) for start in range(0, rows, height)]
    codes, scale = zip(*strips, strict=True)
    return np.concatenate([np.asarray(c) for c in codes]), np.concatenate([np.asarray(s) for s in scale])


def stored(param: Param, piece: np.ndarray) -> np.ndarray:
    """Return to_hf(param, piece), contiguous."""
    if _is_turned(param) and len(param.hf_shape) == 2:
        return transposed(np.ascontiguousarray(piece).reshape(param.hf_shape[::-1]))
    return np.ascontiguousarray(to_hf(param, piece))


def hf_rows(param: Param, piece: np.ndarray, num_rows: int) -> np.ndarray:
    """Return the first rows of to_hf(param, piece) without making the rest of it."""
    if _is_turned(param) and len(param.hf_shape) == 2:
        return piece.reshape(param.hf_shape[::-1])[:, :num_rows].T
    return to_hf(param, piece)[:num_rows]


def transposed(matrix: np.ndarray) -> np.ndarray:
    """Return the transpose of a matrix, contiguous. JAX's copy to a device is several times faster at it than NumPy."""
    word = np.dtype(f"u{matrix.dtype.itemsize}")
    return np.asarray(jax.device_put(matrix.view(word).T)).view(matrix.dtype)


def _is_turned(param: Param) -> bool | None:
    """Return whether a slice is the transpose of its Hugging Face matrix, in memory; None if it is neither that nor it."""
    inner = param.axes.replace(" ", "")
    for letter in param.stacked:
        inner = inner.replace(letter, "")
    groups = param.hf_axes.split()
    if inner == "".join(groups):
        return False
    return True if inner == "".join(reversed(groups)) else None


@functools.partial(jax.jit, static_argnums=1)
def _quantise(matrix: jax.Array, block: tuple[int, int]) -> tuple[jax.Array, jax.Array]:
    return quantise(matrix, block)


def _cast(piece: np.ndarray, fmt: Format) -> np.ndarray:
    target = np.float32 if fmt == "float32" else ml_dtypes.bfloat16
    if piece.dtype == target:
        return piece
    return np.asarray(_cast_on_device(piece, jnp.dtype(target)))


@functools.partial(jax.jit, static_argnums=1)
def _cast_on_device(piece: jax.Array, dtype: jnp.dtype) -> jax.Array:
    return piece.astype(dtype)


def is_finite(array: np.ndarray) -> bool:
    """Return whether all elements are; float32 or bfloat16."""
    word, infinity = (np.uint32, 0x7F800000) if array.itemsize == 4 else (np.uint16, 0x7F80)
    bits = np.ascontiguousarray(array).reshape(-1).view(word)
    magnitude = word(np.iinfo(word).max >> 1)
    pieces = range(0, bits.size, _FINITE_AT_ONCE)
    return all(int((bits[i : i + _FINITE_AT_ONCE] & magnitude).max()) < infinity for i in pieces)


def unstored(param: Param, tensor: np.ndarray) -> np.ndarray:
    """Return from_hf(param, tensor), contiguous; the inverse of `stored`."""
    if _is_turned(param) and len(param.hf_shape) == 2:
        return transposed(np.ascontiguousarray(tensor)).reshape(param.sizes[len(param.stacked) :])
    return np.ascontiguousarray(from_hf(param, tensor))
