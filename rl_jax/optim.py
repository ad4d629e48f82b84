"""The optimizers: AdamW and Muon with a schedule and clipping by the true global norm, built from optax.

A float32 island. Knows no architecture: the trainer says of each weight what it is (`Role`). Step 11 of docs/walk.md.
"""

import math
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import jax
import optax
from jax.sharding import PartitionSpec, reshard
from optax.contrib import MuonDimensionNumbers, MuonState

from rl_jax.axes import spec
from rl_jax.config import refuse

MUON_RMS = 0.2
"""Root mean square of a Muon update, that of a typical AdamW update, so both share one learning rate.
Source: arXiv 2502.16982, section 2.2."""


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """Which optimizer, its numbers, and the learning rate over the steps."""

    type: Literal["adamw", "muon"] = "adamw"
    """muon orthogonalises the momentum of each layer's and expert's matrix; embeddings, head, router, norms and biases
    stay with AdamW."""
    lr: float = 1e-5
    """Highest learning rate; > 0."""
    beta1: float = 0.9
    """AdamW: decay of the first moment; 0..1."""
    beta2: float = 0.95
    """AdamW: decay of the second moment; 0..1. 0.95 is common for language models; 0.999 for small batches."""
    eps: float = 1e-8
    """AdamW: added to the square root of the second moment; > 0."""
    weight_decay: float = 0.01
    """Decoupled weight decay, multiplied with the learning rate; >= 0. Norms and biases do not decay."""
    max_grad_norm: float = 1.0
    """The gradient is scaled down to this global norm; 0 = no clipping. Default of Prime-RL 0.8."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate after the warm-up."""
    warmup_steps: int = 0
    """Steps of linear rise: step s has lr * (s + 1) / (warmup_steps + 1)."""
    decay_steps: int = 0
    """linear, cosine: steps after the warm-up until the learning rate is lr * min_lr_frac, where it stays."""
    min_lr_frac: float = 0.0
    """linear, cosine: last learning rate as a fraction of lr; 0..1."""
    muon_momentum: float = 0.95
    """muon: decay of the momentum (Nesterov); 0..1."""
    muon_iterations: int = 5
    """muon: Newton-Schulz iterations; 5 brings singular values to 0.7..1.2."""

    def __post_init__(self) -> None:
        unit = ("beta1", "beta2", "muon_momentum")
        counts = ("warmup_steps", "decay_steps")
        decays = self.schedule != "constant"
        refuse(
            [
                *(_outside(self, name, "a number >= 0 and < 1", 0 <= getattr(self, name) < 1) for name in unit),
                *(_outside(self, name, "a number > 0", 0 < getattr(self, name) < math.inf) for name in ("lr", "eps")),
                *(_outside(self, name, "an integer >= 0", getattr(self, name) >= 0) for name in counts),
                _outside(self, "weight_decay", "a number >= 0", 0 <= self.weight_decay < math.inf),
                _outside(self, "max_grad_norm", "a number >= 0", 0 <= self.max_grad_norm < math.inf),
                _outside(self, "min_lr_frac", "a number from 0 to 1", 0 <= self.min_lr_frac <= 1),
                _outside(self, "muon_iterations", "at least 1", self.muon_iterations >= 1),
                _outside(self, "decay_steps", f"at least 1 with schedule={self.schedule!r}", self.decay_steps > 0)
                if decays
                else _outside(self, "decay_steps", "0 with schedule='constant'", self.decay_steps == 0),
            ]
        )


@dataclass(frozen=True, kw_only=True)
class Role:
    """What the optimizer must know of one weight.

    Example: wq_LDKQH is decayed, and each layer of it is a matrix from D to K*Q*H:
    Role(axes="L D K Q H", is_decayed=True, inputs=(1,), outputs=(2, 3, 4)).
    """

    axes: str
    """Letters of the dimensions, separated by spaces."""
    is_decayed: bool
    """Weight decay applies."""
    inputs: tuple[int, ...] = ()
    """Dimensions that a matrix contracts with its input; the first dimension is that of the layers. () = no matrix."""
    outputs: tuple[int, ...] = ()
    """Dimensions of its output; the others number stacked matrices, each of which Muon orthogonalises."""


def make_optimizer(config: OptimConfig, roles: object) -> optax.GradientTransformation:
    """Return the optimizer: clip, direction, weight decay, learning rate. Its state counts steps from 0.

    Args:
        roles: tree of the parameters with a Role at each leaf.
    """
    clip = optax.clip_by_global_norm(config.max_grad_norm) if config.max_grad_norm else optax.identity()
    direction = optax.scale_by_adam(config.beta1, config.beta2, config.eps)
    if config.type == "muon":
        labels = _map_roles(lambda role: "muon" if role.inputs else "adam", roles)
        direction = optax.partition({"adam": direction, "muon": _muon(config, roles)}, labels)
    decay = optax.add_decayed_weights(config.weight_decay, _map_roles(lambda role: role.is_decayed, roles))
    chained = optax.chain(clip, direction, decay, optax.scale_by_learning_rate(learning_rate(config)))

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.OptState]:
        # optax raises Python floats to int32 counts: no promotion of arrays is loosened, but strict refuses that.
        with jax.numpy_dtype_promotion("standard"):
            return chained.update(updates, state, params)

    return optax.GradientTransformation(chained.init, update)


def learning_rate(config: OptimConfig) -> optax.Schedule:
    """Return the function from a step, counted from 0, to its learning rate."""
    decay = {
        "constant": lambda: optax.constant_schedule(config.lr),
        "linear": lambda: optax.linear_schedule(config.lr, config.lr * config.min_lr_frac, config.decay_steps),
        "cosine": lambda: optax.cosine_decay_schedule(config.lr, config.decay_steps, config.min_lr_frac),
    }[config.schedule]()
    first = config.lr / (config.warmup_steps + 1)  # not 0: the first step must train
    warmup = optax.linear_schedule(first, config.lr, config.warmup_steps)
    joined = optax.join_schedules([warmup, decay], [config.warmup_steps]) if config.warmup_steps else decay

    def rate(step: jax.typing.ArrayLike) -> jax.typing.ArrayLike:
        with jax.numpy_dtype_promotion("standard"):
            return joined(step)

    return rate


def _muon(config: OptimConfig, roles: object) -> optax.GradientTransformation:
    """Return Muon whose matrices are whole on a device, its momentum too, the layers being split over fsdp.

    A gradient goes there, and an update back, in two hops: an all-to-all over fsdp, and over tensor an all-gather
    there and a slice back. XLA would replicate everything if asked for both at once.
    """
    matrices = _map_roles(lambda role: role if role.inputs else optax.MaskedNode(), roles)
    local = optax.contrib.scale_by_muon(
        ns_steps=config.muon_iterations,
        beta=config.muon_momentum,
        weight_dimension_numbers=_map_roles(lambda role: MuonDimensionNumbers(role.inputs, role.outputs), matrices),
    )

    def whole(x: jax.Array, role: Role) -> jax.Array:
        return reshard(reshard(x, _by_layer(x, role, ("fsdp",))), _by_layer(x, role, ("fsdp", "tensor")))

    def back(x: jax.Array, role: Role) -> jax.Array:
        scaled = x * (MUON_RMS * math.sqrt(_longest_side(x, role)))
        return reshard(reshard(scaled, _by_layer(x, role, ("fsdp",))), spec(role.axes))

    def init(params: optax.Params) -> optax.OptState:
        state = typing.cast(MuonState, local.init(jax.tree.map(whole, params, matrices)))
        # P() and P(None) are one layout but two types: the update returns the second, and must not compile again.
        return state._replace(ns_coeffs=reshard(state.ns_coeffs, PartitionSpec(None)))

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.OptState]:
        specs = jax.tree.map(lambda x, role: _by_layer(x, role, ("fsdp", "tensor")), updates, matrices)
        state_specs = jax.tree.map(lambda x: PartitionSpec(*(None,) * x.ndim), state)._replace(mu=specs)
        on_device = jax.shard_map(local.update, in_specs=(specs, state_specs), out_specs=(specs, state_specs))
        orthogonal, state = on_device(jax.tree.map(whole, updates, matrices), state)
        return jax.tree.map(back, orthogonal, matrices), state

    return optax.GradientTransformation(init, update)


def _by_layer(x: jax.Array, role: Role, without: tuple[str, ...]) -> PartitionSpec:
    """Return the weight's sharding without these mesh axes, but the layers split over fsdp if it divides them."""
    num_shards = jax.typeof(x).sharding.mesh.shape["fsdp"]
    return PartitionSpec("fsdp" if x.shape[0] % num_shards == 0 else None, *spec(role.axes, without)[1:])


def _longest_side(x: jax.Array, role: Role) -> int:
    return max(math.prod(x.shape[i] for i in role.inputs), math.prod(x.shape[i] for i in role.outputs))


def _map_roles(function: Callable[[Role], object], roles: object) -> typing.Any:
    return jax.tree.map(function, roles, is_leaf=lambda node: isinstance(node, Role))


def _outside(config: OptimConfig, name: str, expected: str, is_inside: bool) -> str | None:
    return None if is_inside else f"{name}={getattr(config, name)}: expected {expected}"
