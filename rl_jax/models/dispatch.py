"""Dispatch of a mixture-of-experts layer: token rows to the devices of their experts, and the sums back (step 11).

Every backend runs inside a shard_map over the whole mesh; experts are sharded over EXPERT_AXES, C devices together. T
tokens of a device go to A experts each; what comes back is their share of the weighted sum. all_gather and
ragged_all_to_all send a token once to each device that has experts of it, with the ids and weights of all its experts.
So do all_to_all and capacity if devices are few, C < A; else they send a row for each expert: in buffers of fixed size
that is no more, and the grouped matmul, which has no bound on how many of A ids are its own, works on A times fewer.

    backend             rows held at a time   rows sent, there and back   drops
    all_gather          C * T                 2 * T * (C - 1)             never
    all_to_all          buffer * T * W        2 * buffer * T * W a round  never: as many rounds as the routing needs
    capacity            buffer * T * W        2 * buffer * T * W          what is beyond the buffer, counted
    ragged_all_to_all   C * T                 2 * the pairs that exist    never

with W = min(A, C).
"""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax

from rl_jax.axes import EXPERT_AXES, MESH_AXES
from rl_jax.models.permute import collect_rows, copy_rows
from rl_jax.models.ragged import ragged_all_to_all
from rl_jax.models.route import Routing

Dispatch = Literal["all_gather", "all_to_all", "capacity", "ragged_all_to_all"]

Experts = Callable[..., jax.Array]
"""(x_RD, Routing with local ids, *weights of the local experts) -> y_RD, rows of no expert zero"""

_send = partial(lax.all_to_all, axis_name=EXPERT_AXES, split_axis=0, concat_axis=0, tiled=True)
"""Exchange equal pieces of dimension 0 with every device; its own inverse."""


class Plan(NamedTuple):
    """Which device each choice of a token goes to."""

    experts_TA: jax.Array
    """int32, global ids"""
    device_TA: jax.Array
    """int32, index over EXPERT_AXES"""
    rank_TA: jax.Array
    """int32, earlier tokens that go to the same device"""
    is_first_TA: jax.Array
    """bool, no earlier choice of the token goes to the same device: this one carries the row"""
    counts_C: jax.Array
    """int32, tokens for each device"""


def dispatch(
    backend: Dispatch,
    buffer: float,
    experts: Experts,
    x_TD: jax.Array,
    routing: Routing,
    weights: tuple[jax.Array, ...],
) -> tuple[jax.Array, jax.Array]:
    """Return the sum of the experts for each token in the dtype of the rows, and the number of choices that were dropped.

    Args:
        buffer: rows to a device in one exchange, relative to an even share, T * W / C.
        experts: of this device; a function of its arguments only.
        weights: of the experts of this device, first dimension E.
    """
    num_shards, num_local = lax.axis_size(EXPERT_AXES), weights[0].shape[0]
    none_dropped = _vary(jnp.zeros((), jnp.int32))
    if num_shards == 1:
        return experts(x_TD, routing, *weights), none_dropped
    if backend == "all_gather":
        return _all_gather(experts, x_TD, routing, weights), none_dropped
    exact = backend == "ragged_all_to_all"
    by_choice = not exact and routing.experts_TA.shape[1] <= num_shards
    plan = (_plan_by_choice if by_choice else _plan)(routing.experts_TA, num_local, num_shards)
    if backend == "ragged_all_to_all":
        return _ragged(experts, plan, x_TD, routing, weights), none_dropped
    num_rows = x_TD.shape[0] * min(routing.experts_TA.shape[1], num_shards)
    num_slots = min(num_rows if by_choice else x_TD.shape[0], math.ceil(buffer * num_rows / num_shards))
    exchange = partial(_exchange, experts, num_slots)
    if backend == "capacity":
        first = _vary(jnp.zeros((), jnp.int32))
        y_TD = exchange(first, plan, x_TD, routing.weights_TA, *weights)
        return y_TD.astype(x_TD.dtype), jnp.sum(plan.rank_TA >= num_slots, dtype=jnp.int32)
    # All devices take the same number of rounds: the exchange is one program that they run together.
    most = lax.pmax(jnp.max(plan.counts_C), MESH_AXES)
    num_rounds = -(-most // num_slots)
    sums_TD = cast(jax.Array, _rounds(exchange, num_rounds, plan, x_TD, routing.weights_TA, *weights))
    return sums_TD.astype(x_TD.dtype), none_dropped


def _plan(experts_TA: jax.Array, num_local: int, num_shards: int) -> Plan:
    device_TA = experts_TA // num_local
    ids_C = jnp.arange(num_shards, dtype=jnp.int32)
    goes_TC = jnp.any(device_TA[:, :, None] == ids_C[None, None, :], axis=1).astype(jnp.int32)
    upto_TC = jnp.cumsum(goes_TC, axis=0)
    is_same_TAA = device_TA[:, :, None] == device_TA[:, None, :]
    return Plan(
        experts_TA=experts_TA,
        device_TA=device_TA,
        rank_TA=jnp.take_along_axis(upto_TC - goes_TC, device_TA, axis=1),
        is_first_TA=jnp.sum(jnp.tril(is_same_TAA, -1), axis=2) == 0,
        counts_C=upto_TC[-1],
    )


def _plan_by_choice(experts_TA: jax.Array, num_local: int, num_shards: int) -> Plan:
    """As _plan, but each choice is a row: ranks and counts are those of choices."""
    device_TA = experts_TA // num_local
    ids_C = jnp.arange(num_shards, dtype=jnp.int32)
    goes_RC = (device_TA.reshape(-1, 1) == ids_C[None, :]).astype(jnp.int32)
    upto_RC = jnp.cumsum(goes_RC, axis=0)
    rank_R = jnp.sum(jnp.where(goes_RC > 0, upto_RC - 1, 0), axis=1)
    return Plan(
        experts_TA=experts_TA,
        device_TA=device_TA,
        rank_TA=rank_R.reshape(device_TA.shape),
        is_first_TA=jnp.ones_like(device_TA, jnp.bool_),
        counts_C=upto_RC[-1],
    )


def _all_gather(experts: Experts, x_TD: jax.Array, routing: Routing, weights: tuple[jax.Array, ...]) -> jax.Array:
    """Every device takes the rows of all, and the sums are scattered back ("ring of experts")."""
    gather = partial(lax.all_gather, axis_name=EXPERT_AXES, axis=0, tiled=True)
    x_RD, routing = gather(x_TD), jax.tree.map(gather, routing)
    y_RD = experts(x_RD, _local(routing, weights), *weights)
    return lax.psum_scatter(y_RD, EXPERT_AXES, scatter_dimension=0, tiled=True)


def _local(routing: Routing, weights: tuple[jax.Array, ...]) -> Routing:
    """Count ids from this device's first expert."""
    first = lax.axis_index(EXPERT_AXES) * weights[0].shape[0]
    return dataclasses.replace(routing, experts_TA=routing.experts_TA - first)


def _exchange(
    experts: Experts,
    num_slots: int,
    index: jax.Array,
    plan: Plan,
    x_TD: jax.Array,
    weights_TA: jax.Array,
    *weights: jax.Array,
) -> jax.Array:
    """Send the rows of ranks index * num_slots up to the next multiple, and return the sums of tokens, float32."""
    num_rows = lax.axis_size(EXPERT_AXES) * num_slots
    place_TA = plan.rank_TA - index * num_slots
    is_sent_TA = plan.is_first_TA & (place_TA >= 0) & (place_TA < num_slots)
    slots_TA = jnp.where(is_sent_TA, plan.device_TA * num_slots + place_TA, num_rows)
    choice_R, token_R = _invert(slots_TA, num_rows)
    experts_TA, source_R, carried_TA = plan.experts_TA, token_R, slots_TA
    if slots_TA.shape[1] <= lax.axis_size(EXPERT_AXES):  # by choice: a row has one expert, not all of its token
        experts_TA, weights_TA, carried_TA = (x.reshape(-1, 1) for x in (experts_TA, weights_TA, slots_TA))
        source_R = choice_R
    x_RD, weights_RA = copy_rows(x_TD, token_R, slots_TA), copy_rows(weights_TA, source_R, carried_TA)
    experts_RA = jnp.take(experts_TA, source_R, axis=0, mode="fill", fill_value=-1)
    x_RD, weights_RA, experts_RA = map(_send, (x_RD, weights_RA, experts_RA))
    routing = _local(Routing(experts_TA=experts_RA, weights_TA=weights_RA), weights)
    y_RD = _send(experts(x_RD, routing, *weights))
    return jnp.sum(collect_rows(y_RD, choice_R, slots_TA).astype(jnp.float32), axis=1)


def _invert(slots_TA: jax.Array, num_rows: int) -> tuple[jax.Array, jax.Array]:
    """Return of each slot the choice (token * A + place) and the token that is in it; T * A and T where there is none."""
    num_tokens, num_active = slots_TA.shape
    empty_R = jnp.full((num_rows,), num_tokens * num_active, jnp.int32)
    choice_R = empty_R.at[slots_TA.reshape(-1)].set(jnp.arange(slots_TA.size, dtype=jnp.int32), mode="drop")
    return choice_R, choice_R // num_active


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rounds(
    exchange: Callable[..., jax.Array], num_rounds: jax.Array, plan: Plan, x_TD: jax.Array, *floats: jax.Array
) -> jax.Array:
    """Sum the exchanges of all rounds; a loop of unknown length, so its gradient, another such loop, is written out."""

    def step(index: jax.Array, y_TD: jax.Array) -> jax.Array:
        return y_TD + exchange(index, plan, x_TD, *floats)

    with jax.named_scope("dispatch_round"):
        return lax.fori_loop(0, num_rounds, step, _vary(jnp.zeros(x_TD.shape, jnp.float32)))


def _rounds_forward(exchange: Callable[..., jax.Array], *args: Any) -> tuple[jax.Array, tuple]:
    return cast(jax.Array, _rounds(exchange, *args)), args


def _rounds_backward(exchange: Callable[..., jax.Array], args: tuple, dy_TD: jax.Array) -> tuple:
    num_rounds, plan, *floats = args

    def step(index: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        _, transpose = jax.vjp(partial(exchange, index, plan), *floats)
        return tuple(total + term.astype(jnp.float32) for total, term in zip(sums, transpose(dy_TD), strict=True))

    zeros = tuple(_vary(jnp.zeros(x.shape, jnp.float32)) for x in floats)
    with jax.named_scope("dispatch_round"):
        sums = lax.fori_loop(0, num_rounds, step, zeros)
    return None, None, *(total.astype(x.dtype) for total, x in zip(sums, floats, strict=True))


_rounds.defvjp(_rounds_forward, _rounds_backward)


def _ragged(
    experts: Experts, plan: Plan, x_TD: jax.Array, routing: Routing, weights: tuple[jax.Array, ...]
) -> jax.Array:
    """Send each token exactly where it goes: rows in order of devices, pieces of any length."""
    num_tokens, num_shards = x_TD.shape[0], plan.counts_C.shape[0]
    num_rows = num_tokens * min(routing.experts_TA.shape[1], num_shards)
    starts_C = jnp.cumsum(plan.counts_C) - plan.counts_C
    slots_TA = jnp.where(plan.is_first_TA, starts_C[plan.device_TA] + plan.rank_TA, num_rows)
    choice_R, token_R = _invert(slots_TA, num_rows)
    come_C = _send(plan.counts_C)
    come_starts_C = jnp.cumsum(come_C) - come_C
    there = (starts_C, plan.counts_C, _send(come_starts_C), come_C)
    back = (come_starts_C, come_C, _send(starts_C), plan.counts_C)

    def arrive(x_R: jax.Array, fill: int = 0) -> jax.Array:
        # Any routing fits: each device may send all its tokens here.
        room = _vary(jnp.full((num_shards * num_tokens, *x_R.shape[1:]), fill, x_R.dtype))
        return ragged_all_to_all(x_R, room, *there)

    experts_RA = arrive(jnp.take(plan.experts_TA, token_R, axis=0, mode="fill", fill_value=-1), -1)
    weights_RA = arrive(copy_rows(routing.weights_TA, token_R, slots_TA))
    local = _local(Routing(experts_TA=experts_RA, weights_TA=weights_RA), weights)
    y_RD = experts(arrive(copy_rows(x_TD, token_R, slots_TA)), local, *weights)
    y_RD = ragged_all_to_all(y_RD, _vary(jnp.zeros((num_rows, y_RD.shape[1]), y_RD.dtype)), *back)
    return jnp.sum(collect_rows(y_RD, choice_R, slots_TA).astype(jnp.float32), axis=1).astype(x_TD.dtype)


def _vary(x: jax.Array) -> jax.Array:
    """Type a constant as differing between devices, as everything is that is dispatched."""
    return lax.pcast(x, MESH_AXES, to="varying")
