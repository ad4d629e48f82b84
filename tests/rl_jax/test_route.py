"""The router against float64 NumPy, one token at a time: scores, bias, groups, scaling, forced experts, and gradients."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_jax.axes import TOKENS
from rl_jax.mesh import MeshConfig, make_mesh, to_mesh
from rl_jax.models.architecture import Architecture
from rl_jax.models.route import route
from rl_jax.trainer.balance import LAYERS_OF_TOKENS, moved_bias, z_sum

T, D, E, A = 17, 7, 12, 3
ARCH = Architecture(
    vocab_size=9,
    width=D,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_width=2,
    num_experts=E,
    num_active_experts=A,
    expert_width=2,
)
VARIANTS = {
    "softmax": {},
    "softmax, not normalised": {"normalise_routing": False, "routed_scaling": 1.7},
    "sigmoid": {"router_scores": "sigmoid"},
    "sigmoid, bias, groups": {
        "router_scores": "sigmoid",
        "router_bias": True,
        "num_expert_groups": 4,
        "num_active_groups": 2,
        "routed_scaling": 2.5,
    },
    "softmax, groups of one": {"num_expert_groups": 12, "num_active_groups": 5},
}


def by_token(arch: Architecture, x: np.ndarray, router: np.ndarray, bias: np.ndarray, forced: np.ndarray) -> tuple:
    logits = x @ router
    scores = 1 / (1 + np.exp(-logits)) if arch.router_scores == "sigmoid" else np.exp(logits) / np.exp(logits).sum()
    choice = scores + (bias if arch.router_bias else 0)
    groups = np.split(np.arange(E), arch.num_expert_groups)
    best = sorted(groups, key=lambda ids: -np.sort(choice[ids])[-2:].sum())[: arch.num_active_groups]
    is_open = np.isin(np.arange(E), np.concatenate(best))
    experts = np.argsort(np.where(is_open, -choice, np.inf), kind="stable")[:A]
    experts = forced if forced[0] >= 0 else experts
    weights = scores[experts] / (scores[experts].sum() if arch.normalise_routing else 1)
    return experts, weights * arch.routed_scaling, scores / scores.sum(), np.log(np.exp(logits).sum())


@pytest.mark.parametrize("variant", VARIANTS)
def test_route_is_that_of_each_token(variant: str) -> None:
    arch = dataclasses.replace(ARCH, **VARIANTS[variant])
    rng = np.random.default_rng(5)
    x_TD, router_DE, bias_E = rng.normal(size=(T, D)), rng.normal(size=(D, E)), rng.normal(size=E)
    forced_TA = np.where(rng.random((T, 1)) < 0.3, np.array([[4, 0, 11]]), -1)
    args = [jnp.float32(x) for x in (x_TD, router_DE, bias_E)]
    bias = args[2] if arch.router_bias else None
    routing, probs_TE, log_sums_T = route(arch, args[0], args[1], bias, jnp.int32(forced_TA))
    expected = [by_token(arch, x_TD[t], router_DE, bias_E, forced_TA[t]) for t in range(T)]
    np.testing.assert_array_equal(routing.experts_TA, [e[0] for e in expected])
    # float32 sums of 7 products and 12 exponentials of order 10
    for found, i in ((routing.weights_TA, 1), (probs_TE, 2), (log_sums_T, 3)):
        np.testing.assert_allclose(found, [e[i] for e in expected], rtol=1e-5)


def test_bias_gets_no_gradient_and_the_router_does() -> None:
    arch = dataclasses.replace(ARCH, **VARIANTS["sigmoid, bias, groups"])
    rng = np.random.default_rng(6)
    x_TD, router_DE, bias_E = (jnp.float32(rng.normal(size=shape)) for shape in ((T, D), (D, E), (E,)))
    dweights_TA = jnp.float32(rng.normal(size=(T, A)))

    experts_TA = route(arch, x_TD, router_DE, bias_E)[0].experts_TA

    def total(router_DE: jax.Array, bias_E: jax.Array, forced_TA: jax.Array | None = None) -> jax.Array:
        return jnp.sum(route(arch, x_TD, router_DE, bias_E, forced_TA)[0].weights_TA * dweights_TA)

    drouter_DE, dbias_E = jax.grad(total, argnums=(0, 1))(router_DE, bias_E)
    np.testing.assert_array_equal(dbias_E, 0)
    step = 1e-2 * rng.normal(size=(D, E)).astype(np.float32)
    difference = (total(router_DE + step, bias_E, experts_TA) - total(router_DE - step, bias_E, experts_TA)) / 2
    np.testing.assert_allclose(np.sum(drouter_DE * step), difference, rtol=2e-3)  # third order in a step of 1e-2


def test_bias_moves_towards_an_even_load() -> None:
    mesh = make_mesh(MeshConfig(expert=2))
    bias_LE, load_LE = np.array([[0.5, 0, -1, 2], [0, 0, 0, 0]], np.float32), np.array([[4, 0, 9, 3], [5, 5, 5, 5]])
    with jax.set_mesh(mesh):
        on_mesh = to_mesh(bias_LE, mesh, jax.sharding.PartitionSpec(None, ("expert", "context")))
        moved_LE = jax.device_get(jax.jit(lambda b, n: moved_bias(b, n, 0.25))(on_mesh, jnp.int32(load_LE)))
    np.testing.assert_array_equal(moved_LE, [[0.5, 0.25, -1.25, 2.25], [0, 0, 0, 0]])


def test_z_loss_counts_real_tokens() -> None:
    mesh = make_mesh(MeshConfig(context=3))
    log_sums_LBT = np.arange(12, dtype=np.float32).reshape(2, 1, 6)
    segments_BT = np.array([[1, 1, 2, 2, 0, 0]], np.int32)
    with jax.set_mesh(mesh):
        found = z_sum(to_mesh(log_sums_LBT, mesh, LAYERS_OF_TOKENS), to_mesh(segments_BT, mesh, TOKENS))
    assert float(found) == (0 + 1 + 4 + 9 + 36 + 49 + 64 + 81) / 2
