"""Rotary position embedding with the scalings of the Hugging Face families.

Frequencies are float64 on the host, so that every backend starts from the same float32 table.
"""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from rl_jax.models.architecture import Rope


def inverse_frequencies(rope: Rope, head_width: int) -> tuple[np.ndarray, float]:
    """Return float64 [H/2] inverse frequencies and the factor that multiplies cos and sin.

    Source: Su et al. 2021 (arXiv 2104.09864); linear: Chen et al. 2023; llama3: the Llama 3.1 release; yarn: Peng et
    al. 2023 (arXiv 2309.00071). dynamic uses the base of the longest sequence for every length, as vLLM does: a base
    that moves with the sequence would make keys in the cache disagree with each other.
    """
    base, factor = rope.theta, rope.factor
    if rope.type == "dynamic":
        base *= (factor * factor - (factor - 1)) ** (head_width / (head_width - 2))
    inverse = base ** -(np.arange(0, head_width, 2, dtype=np.float64) / head_width)
    if rope.type == "linear":
        return inverse / factor, 1.0
    if rope.type == "llama3":
        return _llama3(rope, inverse), 1.0
    if rope.type == "yarn":
        return _yarn(rope, inverse, head_width), _yarn_scale(rope)
    return inverse, 1.0


def rotate(
    x: Float[Array, "B T *heads H"], positions_BT: Int[Array, "B T"], rope: Rope
) -> Float[Array, "B T *heads H"]:
    """Rotate the halves of each head by its position; angles and products are float32."""
    inverse, scale = inverse_frequencies(rope, x.shape[-1])
    angles_BTH = positions_BT[..., None].astype(jnp.float32) * jnp.asarray(inverse, jnp.float32)[None, None, :]
    per_head = (slice(None), slice(None), *(None,) * (x.ndim - 3))
    cos, sin = ((f(angles_BTH) * scale)[per_head] for f in (jnp.cos, jnp.sin))
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def _llama3(rope: Rope, inverse: np.ndarray) -> np.ndarray:
    wavelengths = 2 * np.pi / inverse
    turns = rope.original_max_position / wavelengths
    smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    smooth = np.clip(smooth, 0.0, 1.0)
    return inverse * ((1 - smooth) / rope.factor + smooth)


def _yarn(rope: Rope, inverse: np.ndarray, head_width: int) -> np.ndarray:
    def dimension(turns: float) -> float:
        return head_width * math.log(rope.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_width - 1)
    ramp = np.clip((np.arange(head_width // 2) - low) / max(high - low, 0.001), 0, 1)
    return inverse / rope.factor * ramp + inverse * (1 - ramp)


def _yarn_scale(rope: Rope) -> float:
    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.attention_factor:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)
