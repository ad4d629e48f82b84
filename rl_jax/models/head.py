"""The output head: log-probabilities and entropy in chunks of tokens, a float32 island.

[tokens, vocabulary] is never held whole: a chunk's logits are made, reduced, and made again in the backward pass.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec, reshard
from jaxtyping import Array, Float, Int

from rl_jax.axes import TOKENS, spec
from rl_jax.models.architecture import Architecture
from rl_jax.models.schema import Params


def head_weight(arch: Architecture, params: Params, dtype: jnp.dtype) -> Float[Array, "V D"]:
    """Return the head, which is the embedding when tied, gathered over fsdp and in the compute dtype."""
    weight_VD = params["embed_VD" if arch.tie_embeddings else "unembed_VD"]
    assert isinstance(weight_VD, jax.Array)
    return reshard(weight_VD.astype(dtype), spec("V D", ("fsdp",)))


def token_logprobs(
    hidden_BTD: Float[Array, "B T D"],
    head_VD: Float[Array, "V D"],
    targets_BT: Int[Array, "B T"],
    temperatures_BT: Float[Array, "B T"],
    chunk_tokens: int,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Return float32 log-probability of each target and entropy (nats) of softmax(logits / temperature).

    Args:
        head_VD: sharded over tensor on V, whole on D.
        temperatures_BT: positive.
        chunk_tokens: tokens of one device whose logits exist at a time.
    """
    return jax.shard_map(
        partial(_on_device, chunk_tokens),
        in_specs=(TOKENS, spec("V D", ("fsdp",)), TOKENS, TOKENS),
        out_specs=(TOKENS, TOKENS),
    )(hidden_BTD, head_VD, targets_BT, temperatures_BT)


def all_logits(hidden_BTD: Float[Array, "B T D"], head_VD: Float[Array, "V D"]) -> Float[Array, "B T V"]:
    """Return float32 logits, whole: for the few tokens that a sampler decodes at a time."""
    replicated_VD = reshard(head_VD, PartitionSpec(None, None))
    return jnp.einsum("BTD,VD->BTV", hidden_BTD, replicated_VD, preferred_element_type=jnp.float32, out_sharding=TOKENS)


def _on_device(
    chunk_tokens: int, hidden_BTD: jax.Array, head_VD: jax.Array, targets_BT: jax.Array, temperatures_BT: jax.Array
) -> tuple[jax.Array, jax.Array]:
    shape = targets_BT.shape
    num_tokens = targets_BT.size
    chunk = min(chunk_tokens, num_tokens)
    padding = -num_tokens % chunk

    def chunks(x: jax.Array) -> jax.Array:
        flat = x.reshape(num_tokens, *x.shape[2:])
        return jnp.pad(flat, ((0, padding), *((0, 0),) * (flat.ndim - 1))).reshape(-1, chunk, *flat.shape[1:])

    inputs = (chunks(hidden_BTD), chunks(targets_BT), chunks(temperatures_BT - 1) + 1)
    one = jax.checkpoint(partial(_chunk, head_VD), prevent_cse=False)
    logp, entropy = lax.map(lambda xs: one(*xs), inputs)
    return logp.reshape(-1)[:num_tokens].reshape(shape), entropy.reshape(-1)[:num_tokens].reshape(shape)


def _chunk(
    head_VD: jax.Array, hidden_TD: jax.Array, targets_T: jax.Array, temperatures_T: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Softmax statistics over a vocabulary sharded over tensor: three sums of one number a token."""
    logits_TV = jnp.einsum("TD,VD->TV", hidden_TD, head_VD, preferred_element_type=jnp.float32)
    logits_TV = logits_TV / temperatures_T[:, None]
    peak_T = lax.pmax(lax.stop_gradient(jnp.max(logits_TV, axis=1)), "tensor")
    shifted_TV = logits_TV - peak_T[:, None]
    weight_TV = jnp.exp(shifted_TV)
    total_T = lax.psum(jnp.sum(weight_TV, axis=1), "tensor")
    mean_T = lax.psum(jnp.sum(weight_TV * shifted_TV, axis=1), "tensor") / total_T
    ids_V = lax.axis_index("tensor") * head_VD.shape[0] + jnp.arange(head_VD.shape[0], dtype=jnp.int32)
    is_target_TV = targets_T[:, None] == ids_V[None, :]
    target_T = lax.psum(jnp.sum(jnp.where(is_target_TV, shifted_TV, 0.0), axis=1), "tensor")
    return target_T - jnp.log(total_T), jnp.log(total_T) - mean_T
