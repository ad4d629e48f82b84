"""FP8 weights: e4m3 codes and float32 scales that are powers of two, one scale a block; inside jit and on the host.

A scale is the smallest power of two that brings the largest element of its block to at most 448. Dividing by it is
exact, so a weight is rounded once, and a block whose largest element stays in its binade keeps its scale: an update
changes few codes. Integer arithmetic on the bits of a float, because XLA's own cast to e4m3 is several times slower.
"""

import jax
import jax.numpy as jnp
import numpy as np

from rl_jax.models.fp8_rule import BLOCK

MAX_CODE = 448.0
"""Largest finite e4m3 number, 1.75 * 2**8."""
MIN_AMAX = 1e-12
"""A block whose elements are all smaller is scaled as if its largest were this: scales stay at 2**-48 or above. Zero
scales divide 0 by 0, and below 2**-60 kernels flush to zero."""
MIN_SCALE = 2.0**-48
"""Scale of a block without a weight of at least MIN_AMAX."""
_BIAS = 7  # of e4m3; that of float32 and bfloat16 is 127


class NonFiniteWeight(ValueError):
    """A weight holds NaN or infinity; no file of weights may."""

    def __init__(self, name: str):
        self.name = name
        super().__init__(f"{name}: holds NaN or infinity; the training run diverged, use an earlier checkpoint")


def quantise(w_NK: jax.Array, block: tuple[int, int]) -> tuple[jax.Array, jax.Array]:
    """Return codes [N, K] in float8_e4m3fn and scales [ceil(N / rows), ceil(K / columns)] in float32.

    An element is code * scale, rounded to nearest even. A block that holds NaN or infinity has scale NaN.

    Args:
        w_NK: float32 or bfloat16; values are not widened, both give the codes of their own value.
        block: rows and columns that share a scale; N and K may be ragged.
    """
    integer, mantissa_bits = (jnp.int16, 7) if w_NK.dtype == jnp.bfloat16 else (jnp.int32, 23)
    assert w_NK.dtype in (jnp.bfloat16, jnp.float32), w_NK.dtype
    bits = _to_blocks(jax.lax.bitcast_convert_type(w_NK, integer), block)
    magnitude = bits & jnp.iinfo(integer).max
    exponent, scale = _scale(magnitude.max((1, 3)), mantissa_bits)
    # Bits of |w| / scale with the bias of e4m3 instead of 127: dividing by a power of two moves the exponent only.
    shift = ((exponent - _BIAS) << mantissa_bits).astype(integer)
    codes = _round(magnitude - shift[:, None, :, None], mantissa_bits)
    sign = (bits >> (jnp.iinfo(integer).bits - 8)) & 0x80
    codes = _from_blocks((codes | sign).astype(jnp.uint8), w_NK.shape)
    return jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn), scale


def _scale(top: jax.Array, mantissa_bits: int) -> tuple[jax.Array, jax.Array]:
    """Return biased exponents (int32) and values (float32) of the scales of blocks whose largest |w| has bits `top`."""
    top = top.astype(jnp.int32) << (23 - mantissa_bits)
    infinity = 0x7F800000
    floor = int(np.float32(MIN_AMAX).view(np.int32))
    # 448 = 1.75 * 2**8: the exponent of amax less 8, one more if its mantissa is beyond 1.75.
    exponent = ((jnp.maximum(top, floor) + 0x1FFFFF) >> 23) - 8
    exponent = jnp.where(top < infinity, exponent, 127)
    scale = jax.lax.bitcast_convert_type(exponent << 23, jnp.float32)
    return exponent, jnp.where(top < infinity, scale, jnp.nan)


def _round(t: jax.Array, mantissa_bits: int) -> jax.Array:
    """Return the e4m3 codes of magnitudes: `t` has the exponent of e4m3, but the mantissa of the source; may be < 0."""
    dropped = mantissa_bits - 3
    normal = (t + ((1 << (dropped - 1)) - 1) + ((t >> dropped) & 1)) >> dropped
    # Below 2**-6 codes count steps of 2**-9: one compare for each midpoint, of which the odd ones round up.
    subnormal = jnp.zeros_like(t)
    for step in range(8):
        midpoint = (step + 0.5) * 2.0**-9
        bits = (int(np.float32(midpoint).view(np.int32)) >> (23 - mantissa_bits)) - ((127 - _BIAS) << mantissa_bits)
        subnormal += (t >= bits + (step + 1) % 2).astype(t.dtype)
    return jnp.where(t >= 1 << mantissa_bits, normal, subnormal)


def dequantise(codes_NK: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Return float32 code * scale; the block of a scale follows from the shapes.

    Args:
        codes_NK: float8_e4m3fn [N, K].
        scale: [ceil(N / 128), ceil(K / 128)], a row's [N, 1], or one for all (one element).
    """
    rows, columns = codes_NK.shape
    scale = scale.astype(np.float32)
    if scale.size == 1 or scale.shape == (rows, 1):
        return codes_NK.astype(np.float32) * scale.reshape(-1, 1)
    wide = np.repeat(np.repeat(scale, BLOCK, 0)[:rows], BLOCK, 1)[:, :columns]
    return codes_NK.astype(np.float32) * wide


def scale_fault(shape: tuple[int, ...], scale_shape: tuple[int, ...]) -> str | None:
    """Return why a scale does not belong to a matrix; see dequantise for what does."""
    rows, columns = shape
    allowed = [(-(-rows // BLOCK), -(-columns // BLOCK)), (rows, 1), (1,), ()]
    return None if scale_shape in allowed else f"scale has shape {scale_shape}, expected one of {allowed}"


def _to_blocks(w_NK: jax.Array, block: tuple[int, int]) -> jax.Array:
    """Return [N blocks, rows, K blocks, columns], padded with zeros."""
    (rows, columns), (high, wide) = w_NK.shape, block
    padded = jnp.pad(w_NK, ((0, -rows % high), (0, -columns % wide)))
    return padded.reshape(-(-rows // high), high, -(-columns // wide), wide)


def _from_blocks(blocks: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    high, rows, wide, columns = blocks.shape
    return blocks.reshape(high * rows, wide * columns)[: shape[0], : shape[1]]
