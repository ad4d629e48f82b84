"""Router of a mixture-of-experts layer: a float32 island (step 11 of docs/walk.md). Knows no mesh."""

from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Float, Int

from rl_jax.models.architecture import Architecture

Gate: TypeAlias = Callable[[jax.Array, jax.Array | None], tuple[jax.Array, jax.Array]]
"""(logits_TE, bias_E or None) -> weights_TA and experts_TA of the router's choice, differentiable in the logits"""


@struct.dataclass
class Routing:
    """Where each token goes. Rows are the tokens of one device."""

    experts_TA: jax.Array
    """int32"""
    weights_TA: jax.Array
    """float32"""


def route(
    arch: Architecture,
    x_TD: Float[Array, "T D"],
    router_DE: Float[Array, "D E"],
    bias_E: Float[Array, " E"] | None = None,
    forced_TA: Int[Array, "T A"] | None = None,
    gate: Gate | None = None,
) -> tuple[Routing, Float[Array, "T E"], Float[Array, " T"]]:
    """Choose the experts with the highest scores, ties going to the lower id.

    The weight of a forced expert is its own score, so the router keeps its gradient under replay. A bias and the limit
    to groups move the choice, never the weights. Source: arXiv 2412.19437, equations 12 to 16.

    Args:
        gate: who chooses and weighs in place of this function's own lines; forced experts are weighed here.

    Returns:
        The routing, the scores divided by their sum, and log(sum(exp(logits))).
    """
    logits_TE = jnp.einsum("TD,DE->TE", x_TD.astype(jnp.float32), router_DE)
    is_softmax = arch.router_scores == "softmax"
    scores_TE = jax.nn.softmax(logits_TE, axis=-1) if is_softmax else jax.nn.sigmoid(logits_TE)
    probs_TE = scores_TE if is_softmax else scores_TE / jnp.sum(scores_TE, axis=-1, keepdims=True)
    weights_TA, experts_TA = gate(logits_TE, bias_E) if gate else (None, _choose(arch, scores_TE, bias_E))
    if forced_TA is not None:
        experts_TA, weights_TA = jnp.where(forced_TA >= 0, forced_TA, experts_TA), None
    weights_TA = _weigh(arch, scores_TE, experts_TA) if weights_TA is None else weights_TA
    routing = Routing(experts_TA=experts_TA, weights_TA=weights_TA)
    return routing, probs_TE, jax.nn.logsumexp(logits_TE, axis=-1)


def _weigh(arch: Architecture, scores_TE: jax.Array, experts_TA: jax.Array) -> jax.Array:
    chosen_TAE = jax.nn.one_hot(experts_TA, arch.num_experts, dtype=jnp.float32)
    weights_TA = jnp.einsum("TAE,TE->TA", chosen_TAE, scores_TE)
    if arch.normalise_routing:
        weights_TA = weights_TA / jnp.sum(weights_TA, axis=-1, keepdims=True)
    return weights_TA * arch.routed_scaling


def _choose(arch: Architecture, scores_TE: jax.Array, bias_E: jax.Array | None) -> jax.Array:
    scores_TE = lax.stop_gradient(scores_TE)
    if bias_E is not None:
        scores_TE = scores_TE + lax.stop_gradient(bias_E)[None, :]
    if arch.num_active_groups < arch.num_expert_groups:
        num_tokens, size = scores_TE.shape[0], arch.num_experts // arch.num_expert_groups
        scores_TGE = scores_TE.reshape(num_tokens, arch.num_expert_groups, size)
        best_TG2, _ = lax.top_k(scores_TGE, min(2, size))
        _, groups_TG = lax.top_k(jnp.sum(best_TG2, axis=-1), arch.num_active_groups)
        is_open_TG = jnp.any(jax.nn.one_hot(groups_TG, arch.num_expert_groups, dtype=jnp.bool_), axis=1)
        scores_TE = jnp.where(is_open_TG[..., None], scores_TGE, -jnp.inf).reshape(scores_TE.shape)
    return lax.top_k(scores_TE, arch.num_active_experts)[1]
