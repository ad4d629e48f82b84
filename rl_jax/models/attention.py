"""Attention: projections with rotary embedding and QK norm, and softmax attention under any mask.

What the queries attend to is passed in (`Attend`): the trainer's packed batch (models/context.py), or the engine's
paged cache.
"""

from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from rl_jax.axes import TOKENS
from rl_jax.models.architecture import Architecture
from rl_jax.models.norm import rms_norm
from rl_jax.models.rope import rotate


@runtime_checkable
class Attend(Protocol):
    """Attend to whatever the caller keeps; returns the output and the cache with this layer's keys and values in it."""

    def __call__(
        self, layer: jax.Array, q_BTKQH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, cache: object
    ) -> tuple[jax.Array, object]:
        """`layer` is the int32 index of the layer."""
        ...


def attention(
    arch: Architecture,
    x_BTD: Float[Array, "B T D"],
    w: dict[str, jax.Array],
    positions_BT: Int[Array, "B T"],
    layer: Int[Array, ""],
    attend: Attend,
    cache: object,
) -> tuple[Float[Array, "B T D"], object]:
    """Project, rotate, attend and project back; `w` is one layer, gathered over fsdp."""
    q_BTKQH = jnp.einsum("BTD,DKQH->BTKQH", x_BTD, w["wq_DKQH"])
    k_BTKH = jnp.einsum("BTD,DKH->BTKH", x_BTD, w["wk_DKH"])
    v_BTKH = jnp.einsum("BTD,DKH->BTKH", x_BTD, w["wv_DKH"])
    if arch.attention_bias:
        q_BTKQH = q_BTKQH + w["bq_KQH"][None, None]
        k_BTKH = k_BTKH + w["bk_KH"][None, None]
        v_BTKH = v_BTKH + w["bv_KH"][None, None]
    if arch.qk_norm:
        q_BTKQH = rms_norm(q_BTKQH, w["q_norm_H"], arch.norm_eps)
        k_BTKH = rms_norm(k_BTKH, w["k_norm_H"], arch.norm_eps)
    q_BTKQH = rotate(q_BTKQH, positions_BT, arch.rope)
    k_BTKH = rotate(k_BTKH, positions_BT, arch.rope)
    out_BTKQH, cache = attend(layer, q_BTKQH, k_BTKH, v_BTKH, cache)
    # Heads are sharded over tensor: the sum over them moves B*T*D of the compute dtype.
    y_BTD = jnp.einsum("BTKQH,KQHD->BTD", out_BTKQH, w["wo_KQHD"], out_sharding=TOKENS)
    if arch.attention_bias:
        y_BTD = y_BTD + w["bo_D"][None, None]
    return y_BTD, cache


def attend_masked(
    q_BTKQH: Float[Array, "B T K Q H"],
    k_BSKH: Float[Array, "B S K H"],
    v_BSKH: Float[Array, "B S K H"],
    mask_BTS: Bool[Array, "B T S"],
) -> Float[Array, "B T K Q H"]:
    """Softmax attention with float32 scores and statistics; every row of the mask must allow something."""
    scale = q_BTKQH.shape[-1] ** -0.5
    scores_BKQTS = jnp.einsum("BTKQH,BSKH->BKQTS", q_BTKQH, k_BSKH, preferred_element_type=jnp.float32) * scale
    bias_BTS = jnp.where(mask_BTS, 0.0, jnp.finfo(jnp.float32).min).astype(jnp.float32)
    probs_BKQTS = jax.nn.softmax(scores_BKQTS + bias_BTS[:, None, None], axis=-1).astype(v_BSKH.dtype)
    return jnp.einsum("BKQTS,BSKH->BTKQH", probs_BKQTS, v_BSKH)
