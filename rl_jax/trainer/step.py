"""The compiled programs of a training step: gradient of a micro-batch, optimizer step, scoring (walk: step 11).

A step is `zeros`, then `accumulate` for each micro-batch, then `apply`. All divide by counts of the whole step, given
as traced numbers, so neither the number of micro-batches nor the packing changes the gradient or recompiles anything.
Knows no rollout and reads nothing back to the host.
"""

import dataclasses
import typing
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from rl_jax.axes import BATCH_AXES
from rl_jax.losses import LossInputs
from rl_jax.mesh import to_mesh
from rl_jax.models.architecture import Architecture
from rl_jax.models.attention import packed_attention
from rl_jax.models.head import head_weight, token_logprobs
from rl_jax.models.schema import Params
from rl_jax.models.transformer import ForwardConfig, compute_params, decoder
from rl_jax.trainer.state import TrainState
from rl_jax.types import Batch

LossSum = Callable[[LossInputs], tuple[jax.Array, dict[str, jax.Array]]]
"""A micro-batch -> loss summed over trained tokens, and metric sums, "tokens" among them."""


@struct.dataclass
class MicroBatch:
    """types.Batch on the mesh, rows split over the batch axes, and what optional features add to it."""

    tokens_BT: jax.Array
    targets_BT: jax.Array
    positions_BT: jax.Array
    segments_BT: jax.Array
    mask_BT: jax.Array
    logprobs_BT: jax.Array
    advantages_BT: jax.Array
    temperatures_BT: jax.Array
    ref_logp_BT: jax.Array | None = None
    """float32, log-probability of the targets under the reference model."""
    forced_LBTA: jax.Array | None = None
    """int32, experts of the sampler (router replay), -1 = free."""


@struct.dataclass
class Counts:
    """Denominators of the whole step, over all micro-batches and devices, as float32 scalars."""

    num_trained: jax.Array
    """Trained tokens: of the loss."""
    num_tokens: jax.Array
    """Tokens that are no padding: of the load-balance loss."""


@struct.dataclass
class Gradient:
    """What is summed over the micro-batches of a step."""

    params: Params
    """float32, sharded like the parameters."""
    loss: jax.Array
    """float32 scalar."""


@struct.dataclass
class Told:
    """What a micro-batch tells the host."""

    sums: dict[str, jax.Array]
    """Metric sums over trained tokens, see losses.means; "loss" is the summed loss."""
    logp_BT: jax.Array
    """float32, trainer's log-probability of the targets."""
    entropy_BT: jax.Array
    """float32, nats."""
    load_LE: jax.Array | None
    """int32, tokens that each expert got, padding not counted; None in a dense model."""
    balance: jax.Array | None
    """float32, load-balance loss summed over tokens, None when it is off."""


@struct.dataclass
class Applied:
    """What an optimizer step tells the host."""

    grad_norm: jax.Array
    """float32, global norm before clipping."""
    param_norm: jax.Array
    """float32, global norm of the parameters before the step."""
    is_loss_finite: jax.Array
    """bool"""
    is_finite: Params
    """bool for each weight: the sum of squares of its gradient is finite."""


class Programs:
    """The jitted functions of one trainer; each compiles once for each shape of micro-batch."""

    def __init__(
        self,
        arch: Architecture,
        forward: ForwardConfig,
        optimizer: optax.GradientTransformation,
        losses: dict[str, LossSum],
        balance_coef: float = 0.0,
    ):
        self.zeros = jax.jit(_zeros)
        """params -> Gradient of zeros"""
        self.accumulate = {
            name: jax.jit(partial(_accumulate, arch, forward, loss, balance_coef), donate_argnums=0)
            for name, loss in losses.items()
        }
        """loss name -> (Gradient (donated), params, MicroBatch, Counts) -> (Gradient, Told)"""
        self.apply = jax.jit(partial(_apply, optimizer), donate_argnums=0)
        """(TrainState (donated), Gradient) -> (TrainState, Applied)"""
        self.score = jax.jit(partial(_score, arch, forward))
        """(params, MicroBatch) -> logp_BT"""
        self.copy = jax.jit(lambda params: jax.tree.map(jnp.copy, compute_params(arch, params, forward.dtype)))
        """params -> params in the compute dtype, in memory of their own"""

    @property
    def num_compilations(self) -> int:
        """Programs compiled so far: constant after the first step, or something changes shape that must not."""
        functions: list[typing.Any] = [self.zeros, *self.accumulate.values(), self.apply, self.score, self.copy]
        return sum(function._cache_size() for function in functions)


def put_batch(
    batch: Batch, mesh: Mesh, ref_logp_BT: jax.Array | None = None, forced_LBTA: Int[Array, "L B T A"] | None = None
) -> MicroBatch:
    """Copy a micro-batch to the mesh; each process copies its own rows only."""
    put = partial(to_mesh, mesh=mesh, spec=PartitionSpec(BATCH_AXES, None))
    return MicroBatch(
        tokens_BT=put(batch.tokens_BT),
        targets_BT=put(batch.targets_BT),
        positions_BT=put(batch.positions_BT),
        segments_BT=put(batch.segments_BT),
        mask_BT=put(batch.mask_BT),
        logprobs_BT=put(batch.logprobs_BT),
        advantages_BT=put(batch.advantages_BT),
        temperatures_BT=put(batch.temperatures_BT),
        ref_logp_BT=ref_logp_BT,
        forced_LBTA=forced_LBTA,
    )


def cross_entropy_sum(inputs: LossInputs) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """Return the supervised loss: -log p of the trained targets, summed."""

    def total(x_BT: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(inputs.mask_BT, x_BT, 0.0))

    loss = total(-inputs.logp_BT)
    sums = {
        "tokens": total(jnp.ones_like(inputs.logp_BT)),
        "loss/cross_entropy": loss,
        "is_masked": jnp.zeros_like(loss),
    }
    return loss, sums


def balance_sum(
    experts_LBTA: Int[Array, "L B T A"], probs_LBTE: Float[Array, "L B T E"], segments_BT: Int[Array, "B T"]
) -> Float[Array, ""]:
    """Return the load-balance loss of each token, summed over tokens, mean over layers; 1 a token is balance.

    Sequence-wise, so that no packing or split changes it: E / (A * len) * sum over e of (times that the token's
    sequence chose e) * (probability of e at the token). Compares all tokens of a row: T * T * E multiplications.
    Source: arXiv 2412.19437, equations 17 to 20.
    """
    num_layers, num_experts, num_active = probs_LBTE.shape[0], probs_LBTE.shape[-1], experts_LBTA.shape[-1]
    chosen_LBSE = jnp.sum(jax.nn.one_hot(experts_LBTA, num_experts, dtype=jnp.float32), axis=3)
    is_same_BTS = (segments_BT[:, :, None] == segments_BT[:, None, :]) & (segments_BT > 0)[:, :, None]
    same_BTS = is_same_BTS.astype(jnp.float32)
    mean_BTS = same_BTS / jnp.maximum(jnp.sum(same_BTS, axis=2, keepdims=True), 1.0)
    frac_LBTE = jnp.einsum("BTS,LBSE->LBTE", mean_BTS, chosen_LBSE) * (num_experts / num_active)
    return jnp.sum(jax.lax.stop_gradient(frac_LBTE) * probs_LBTE) / num_layers


def _zeros(params: Params) -> Gradient:
    return Gradient(params=jax.tree.map(jnp.zeros_like, params), loss=jnp.zeros((), jnp.float32))


def _accumulate(
    arch: Architecture,
    forward: ForwardConfig,
    loss: LossSum,
    balance_coef: float,
    gradient: Gradient,
    params: Params,
    batch: MicroBatch,
    counts: Counts,
) -> tuple[Gradient, Told]:
    """Add the gradient of loss sum / num_trained + balance_coef * balance sum / num_tokens."""

    def mean_loss(params: Params) -> tuple[jax.Array, Told]:
        decoded = decoder(
            arch,
            forward,
            params,
            batch.tokens_BT,
            batch.positions_BT,
            packed_attention(batch.segments_BT, batch.positions_BT),
            forced_LBTA=batch.forced_LBTA,
        )
        logp_BT, entropy_BT = _logprobs(arch, forward, params, decoded.hidden_BTD, batch)
        total, sums = loss(_loss_inputs(batch, logp_BT, entropy_BT))
        load_LE = None if decoded.experts_LBTA is None else _load(arch, decoded.experts_LBTA, batch.segments_BT)
        value, balance = total / counts.num_trained, None
        if balance_coef:
            assert decoded.experts_LBTA is not None and decoded.router_probs_LBTE is not None, "dense model"
            balance = balance_sum(decoded.experts_LBTA, decoded.router_probs_LBTE, batch.segments_BT)
            value = value + balance_coef * balance / counts.num_tokens
        sums = sums | {"loss": total}
        return value, Told(sums=sums, logp_BT=logp_BT, entropy_BT=entropy_BT, load_LE=load_LE, balance=balance)

    (value, told), grads = jax.value_and_grad(mean_loss, has_aux=True)(params)
    return Gradient(params=jax.tree.map(jnp.add, gradient.params, grads), loss=gradient.loss + value), told


def _apply(
    optimizer: optax.GradientTransformation, state: TrainState, gradient: Gradient
) -> tuple[TrainState, Applied]:
    """Take one optimizer step; with a non-finite loss or gradient, change nothing."""
    is_finite = jax.tree.map(lambda g: jnp.isfinite(jnp.sum(g * g)), gradient.params)
    is_loss_finite = jnp.isfinite(gradient.loss)
    is_good = jax.tree.reduce(jnp.logical_and, is_finite, is_loss_finite)
    grads, params, step = typing.cast(tuple[typing.Any, ...], (gradient.params, state.params, state.step))
    updates, opt_state = optimizer.update(grads, state.opt_state, params)
    stepped = dataclasses.replace(
        state, params=optax.apply_updates(params, updates), opt_state=opt_state, step=step + 1
    )
    applied = Applied(
        grad_norm=optax.tree.norm(gradient.params),
        param_norm=optax.tree.norm(state.params),
        is_loss_finite=is_loss_finite,
        is_finite=is_finite,
    )
    return jax.tree.map(lambda new, old: jnp.where(is_good, new, old), stepped, state), applied


def _score(arch: Architecture, forward: ForwardConfig, params: Params, batch: MicroBatch) -> Float[Array, "B T"]:
    """Return log-probabilities of the targets; losses play no part."""
    attend = packed_attention(batch.segments_BT, batch.positions_BT)
    decoded = decoder(arch, forward, params, batch.tokens_BT, batch.positions_BT, attend, forced_LBTA=batch.forced_LBTA)
    return _logprobs(arch, forward, params, decoded.hidden_BTD, batch)[0]


def _logprobs(
    arch: Architecture, forward: ForwardConfig, params: Params, hidden_BTD: jax.Array, batch: MicroBatch
) -> tuple[jax.Array, jax.Array]:
    head_VD = head_weight(arch, params, forward.dtype)
    return token_logprobs(hidden_BTD, head_VD, batch.targets_BT, batch.temperatures_BT, forward.head_chunk_tokens)


def _loss_inputs(batch: MicroBatch, logp_BT: jax.Array, entropy_BT: jax.Array) -> LossInputs:
    return LossInputs(
        logp_BT=logp_BT,
        entropy_BT=entropy_BT,
        sampler_logp_BT=batch.logprobs_BT,
        ref_logp_BT=batch.ref_logp_BT,
        advantages_BT=batch.advantages_BT,
        mask_BT=batch.mask_BT,
        segments_BT=batch.segments_BT,
    )


def _load(arch: Architecture, experts_LBTA: jax.Array, segments_BT: jax.Array) -> Int[Array, "L E"]:
    """Count the tokens of each expert. XLA fuses the comparison into the sum: nothing of [L, B, T, A, E] exists."""
    ids_E = jnp.arange(arch.num_experts, dtype=jnp.int32)
    is_real_BT = segments_BT > 0
    hits_LBTAE = (experts_LBTA[..., None] == ids_E[None, None, None, None]) & is_real_BT[None, :, :, None, None]
    return jnp.sum(hits_LBTAE, axis=(1, 2, 3), dtype=jnp.int32)
