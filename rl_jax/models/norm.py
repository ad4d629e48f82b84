"""RMS norm, a float32 island."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def rms_norm(x: Float[Array, "*rows D"], weight_D: Float[Array, " D"], eps: float) -> Float[Array, "*rows D"]:
    """Scale the last dimension to unit root mean square; statistics and product in float32 (arXiv 1910.07467)."""
    x32 = x.astype(jnp.float32)
    inverse = lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    weight: jax.Array = weight_D.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + weight_D.shape)
    return (x32 * inverse * weight).astype(x.dtype)
