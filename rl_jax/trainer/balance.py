"""What keeps a router healthy, for packed rows shared out over the context axis (step 11 of docs/walk.md).

The load-balance loss, the z loss, and the update of the correction bias, which has no gradient.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec, reshard
from jaxtyping import Array, Float, Int

from rl_jax.axes import BATCH_AXES, TOKENS

LAYERS_OF_TOKENS = PartitionSpec(None, *TOKENS)


def balance_sum(
    experts_LBTA: Int[Array, "L B T A"], probs_LBTE: Float[Array, "L B T E"], segments_BT: Int[Array, "B T"]
) -> Float[Array, ""]:
    """Return the load-balance loss of each token, summed over tokens, mean over layers; 1 a token is balance.

    Sequence-wise, so that no packing or split changes it: E / (A * len) * sum over e of (times that the token's
    sequence chose e) * (probability of e at the token). Sharded as TOKENS; gathering the ids over context moves
    L * B * T * A * (C - 1) int32 of a device's rows.
    Source: arXiv 2412.19437, equations 17 to 20.
    """
    specs = (LAYERS_OF_TOKENS, LAYERS_OF_TOKENS, TOKENS)
    total = jax.shard_map(_balance_on_device, in_specs=specs, out_specs=PartitionSpec())
    return total(experts_LBTA, probs_LBTE, segments_BT) / probs_LBTE.shape[0]


def z_sum(log_sums_LBT: Float[Array, "L B T"], segments_BT: Int[Array, "B T"]) -> Float[Array, ""]:
    """Return log(sum(exp(router's logits)))^2 of each token, summed over tokens, mean over layers: it keeps logits small.

    Source: arXiv 2202.08906, equation 5.
    """
    return jnp.sum(jnp.where(segments_BT[None] > 0, jnp.square(log_sums_LBT), 0.0)) / log_sums_LBT.shape[0]


def moved_bias(bias_LE: Float[Array, "L E"], load_LE: Int[Array, "L E"], rate: float) -> Float[Array, "L E"]:
    """Return the correction bias, `rate` higher for experts with less than the mean load of their layer, lower for more.

    Source: arXiv 2408.15664, algorithm 1.
    """
    load_LE = load_LE.astype(jnp.float32)
    step_LE = rate * jnp.sign(jnp.mean(load_LE, axis=1, keepdims=True) - load_LE)
    return bias_LE + reshard(step_LE, jax.typeof(bias_LE).sharding.spec)


def _balance_on_device(experts_LBTA: jax.Array, probs_LBTE: jax.Array, segments_BT: jax.Array) -> jax.Array:
    """Count the experts of whole sequences, and weigh the probabilities of this device's tokens by them."""
    num_experts, num_active = probs_LBTE.shape[-1], experts_LBTA.shape[-1]
    gather = partial(lax.all_gather, axis_name="context", tiled=True)
    experts_LBSA, segments_BS = gather(experts_LBTA, axis=2), gather(segments_BT, axis=1)
    rows_B1 = jnp.arange(segments_BT.shape[0], dtype=jnp.int32)[:, None]
    shape_BU = (segments_BS.shape[0], segments_BS.shape[1] + 1)
    lengths_BU = jnp.zeros(shape_BU, jnp.float32).at[rows_B1, segments_BS].add(1.0)
    scale_BT = jnp.where(segments_BT > 0, num_experts / num_active / lengths_BU[rows_B1, segments_BT], 0.0)

    def of_layer(xs: tuple[jax.Array, jax.Array]) -> jax.Array:
        experts_BSA, probs_BTE = xs
        counts_BUE = jnp.zeros((*shape_BU, num_experts), jnp.float32)
        counts_BUE = counts_BUE.at[rows_B1[..., None], segments_BS[..., None], experts_BSA].add(1.0)
        return jnp.sum(counts_BUE[rows_B1, segments_BT] * scale_BT[..., None] * probs_BTE)

    return lax.psum(jnp.sum(lax.map(of_layer, (experts_LBSA, probs_LBTE))), (*BATCH_AXES, "context"))
