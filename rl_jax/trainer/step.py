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
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from rl_jax.axes import ROWS
from rl_jax.losses import LossInputs
from rl_jax.mesh import to_mesh
from rl_jax.models.architecture import Architecture
from rl_jax.models.context import packed_attention
from rl_jax.models.head import head_weight, token_logprobs
from rl_jax.models.schema import Params
from rl_jax.models.transformer import Decoded, ForwardConfig, compute_params, decoder
from rl_jax.models.zigzag import gather, spread
from rl_jax.trainer.balance import balance_sum, moved_bias, z_sum
from rl_jax.trainer.state import TrainState
from rl_jax.types import Batch

LossSum = Callable[[LossInputs], tuple[jax.Array, dict[str, jax.Array]]]
"""A micro-batch -> loss summed over trained tokens, and metric sums, "tokens" among them."""


@struct.dataclass
class MicroBatch:
    """types.Batch on the mesh, whole rows split over the batch axes, and what optional features add to it."""

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
    load_LE: jax.Array | None = None
    """int32, tokens that each expert got; only where the correction bias of the router moves by it."""


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
    z: jax.Array | None
    """float32, z loss summed over tokens, None when it is off."""
    dropped_frac: jax.Array | None
    """float32, share of the choices of experts, padding included, that the capacity dispatch dropped; None without."""


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
        z_coef: float = 0.0,
        bias_rate: float = 0.0,
    ):
        self.zeros = jax.jit(partial(_zeros, arch if arch.router_bias and bias_rate else None))
        """params -> Gradient of zeros"""
        self.accumulate = {
            name: jax.jit(partial(_accumulate, arch, forward, loss, (balance_coef, z_coef)), donate_argnums=0)
            for name, loss in losses.items()
        }
        """loss name -> (Gradient (donated), params, MicroBatch, Counts) -> (Gradient, Told)"""
        self.apply = jax.jit(partial(_apply, optimizer, bias_rate), donate_argnums=0)
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
    put = partial(to_mesh, mesh=mesh, spec=ROWS)
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


def _zeros(moving: Architecture | None, params: Params) -> Gradient:
    """`moving` is the architecture if its correction bias moves."""
    load_LE = jnp.zeros((moving.num_layers, moving.num_experts), jnp.int32) if moving else None
    return Gradient(params=jax.tree.map(jnp.zeros_like, params), loss=jnp.zeros((), jnp.float32), load_LE=load_LE)


def _accumulate(
    arch: Architecture,
    forward: ForwardConfig,
    loss: LossSum,
    router_coefs: tuple[float, float],
    gradient: Gradient,
    params: Params,
    batch: MicroBatch,
    counts: Counts,
) -> tuple[Gradient, Told]:
    """Add the gradient of loss sum / num_trained + (balance_coef * balance sum + z_coef * z sum) / num_tokens."""
    balance_coef, z_coef = router_coefs

    def mean_loss(params: Params) -> tuple[jax.Array, Told]:
        decoded, logp_BT, entropy_BT = _forward(arch, forward, params, batch)
        segments_BT = spread(batch.segments_BT)
        total, sums = loss(_loss_inputs(batch, logp_BT, entropy_BT))
        load_LE = None if decoded.experts_LBTA is None else _load(arch, decoded.experts_LBTA, segments_BT)
        value, balance, z = total / counts.num_trained, None, None
        if balance_coef:
            assert decoded.experts_LBTA is not None and decoded.router_probs_LBTE is not None, "dense model"
            balance = balance_sum(decoded.experts_LBTA, decoded.router_probs_LBTE, segments_BT)
            value = value + balance_coef * balance / counts.num_tokens
        if z_coef:
            assert decoded.router_log_sums_LBT is not None, "dense model"
            z = z_sum(decoded.router_log_sums_LBT, segments_BT)
            value = value + z_coef * z / counts.num_tokens
        sums = sums | {"loss": total}
        dropped_frac = _dropped_frac(decoded) if forward.dispatch == "capacity" else None
        told = Told(
            sums=sums,
            logp_BT=logp_BT,
            entropy_BT=entropy_BT,
            load_LE=load_LE,
            balance=balance,
            z=z,
            dropped_frac=dropped_frac,
        )
        return value, told

    (value, told), grads = jax.value_and_grad(mean_loss, has_aux=True)(params)
    load_LE = None if gradient.load_LE is None else gradient.load_LE + told.load_LE
    params_sum = jax.tree.map(jnp.add, gradient.params, grads)
    return Gradient(params=params_sum, loss=gradient.loss + value, load_LE=load_LE), told


def _apply(
    optimizer: optax.GradientTransformation, bias_rate: float, state: TrainState, gradient: Gradient
) -> tuple[TrainState, Applied]:
    """Take one optimizer step; with a non-finite loss or gradient, change nothing."""
    is_finite = jax.tree.map(lambda g: jnp.isfinite(jnp.sum(g * g)), gradient.params)
    is_loss_finite = jnp.isfinite(gradient.loss)
    is_good = jax.tree.reduce(jnp.logical_and, is_finite, is_loss_finite)
    grads, params, step = typing.cast(tuple[typing.Any, ...], (gradient.params, state.params, state.step))
    updates, opt_state = optimizer.update(grads, state.opt_state, params)
    new_params: typing.Any = optax.apply_updates(params, updates)
    if gradient.load_LE is not None:
        bias_LE = moved_bias(params["layers"]["router_bias_LE"], gradient.load_LE, bias_rate)
        new_params = new_params | {"layers": new_params["layers"] | {"router_bias_LE": bias_LE}}
    stepped = dataclasses.replace(state, params=new_params, opt_state=opt_state, step=step + 1)
    applied = Applied(
        grad_norm=optax.tree.norm(gradient.params),
        param_norm=optax.tree.norm(state.params),
        is_loss_finite=is_loss_finite,
        is_finite=is_finite,
    )
    return jax.tree.map(lambda new, old: jnp.where(is_good, new, old), stepped, state), applied


def _score(arch: Architecture, forward: ForwardConfig, params: Params, batch: MicroBatch) -> Float[Array, "B T"]:
    """Return log-probabilities of the targets; losses play no part."""
    return _forward(arch, forward, params, batch)[1]


def _forward(
    arch: Architecture, forward: ForwardConfig, params: Params, batch: MicroBatch
) -> tuple[Decoded, Float[Array, "B T"], Float[Array, "B T"]]:
    """Return what the decoder made of the tokens, in zigzag order, and log-probability and entropy of whole rows."""
    tokens_BT, positions_BT, segments_BT = (
        spread(batch.tokens_BT),
        spread(batch.positions_BT),
        spread(batch.segments_BT),
    )
    forced_LBTA = None if batch.forced_LBTA is None else spread(batch.forced_LBTA, dim=2)
    attend = packed_attention(segments_BT, positions_BT, forward.packed_attention)
    decoded = decoder(arch, forward, params, tokens_BT, positions_BT, attend, forced_LBTA=forced_LBTA)
    head_VD = head_weight(arch, params, forward.dtype)
    targets_BT, temperatures_BT = spread(batch.targets_BT), spread(batch.temperatures_BT)
    found = token_logprobs(decoded.hidden_BTD, head_VD, targets_BT, temperatures_BT, forward.head_chunk_tokens)
    logp_BT, entropy_BT = map(gather, found)
    return decoded, logp_BT, entropy_BT


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


def _dropped_frac(decoded: Decoded) -> Float[Array, ""] | None:
    if decoded.experts_LBTA is None or decoded.num_dropped_L is None:
        return None
    return jnp.sum(decoded.num_dropped_L).astype(jnp.float32) / decoded.experts_LBTA.size


def _load(arch: Architecture, experts_LBTA: jax.Array, segments_BT: jax.Array) -> Int[Array, "L E"]:
    """Count the tokens of each expert. XLA fuses the comparison into the sum: nothing of [L, B, T, A, E] exists."""
    ids_E = jnp.arange(arch.num_experts, dtype=jnp.int32)
    is_real_BT = segments_BT > 0
    hits_LBTAE = (experts_LBTA[..., None] == ids_E[None, None, None, None]) & is_real_BT[None, :, :, None, None]
    return jnp.sum(hits_LBTAE, axis=(1, 2, 3), dtype=jnp.int32)
