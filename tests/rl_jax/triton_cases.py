"""Cases that XLA and the Triton kernels must compute alike: each is a function of the name of who computes it.

test_triton_ops.py runs them with "xla", triton_interpreted.py with "triton".
"""

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from rl_jax.axes import TOKENS, spec
from rl_jax.mesh import MeshConfig, make_mesh, to_mesh
from rl_jax.models.architecture import Architecture
from rl_jax.models.moe import MoeConfig, moe_layer
from rl_jax.models.moe_kernels import MoeKernels, kernels_for
from rl_jax.models.route import route

Case = Callable[[MoeKernels], list]

D, E, A, F = 24, 16, 3, 6
ARCH = Architecture(
    vocab_size=9,
    width=D,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_width=2,
    num_experts=E,
    num_active_experts=A,
    expert_width=F,
)
ROUTERS = {
    "softmax": {},
    "softmax, not normalised": {"normalise_routing": False, "routed_scaling": 1.7, "num_experts": 11},
    "softmax, bias": {"router_bias": True, "num_active_experts": 1},
    "sigmoid": {"router_scores": "sigmoid", "num_experts": 13},
    "sigmoid, not normalised": {"router_scores": "sigmoid", "normalise_routing": False},
    "sigmoid, bias, groups": {
        "router_scores": "sigmoid",
        "router_bias": True,
        "num_expert_groups": 4,
        "num_active_groups": 2,
        "routed_scaling": 2.5,
    },
}


def choice(router: str, kernels: MoeKernels, num_tokens: int = 9) -> list[jax.Array]:
    """Experts, weights, and the gradient of the logits; tokens 0 and 1 have ties."""
    arch = dataclasses.replace(ARCH, **ROUTERS[router])
    rng = np.random.default_rng(3)
    logits_TE = rng.normal(size=(num_tokens, arch.num_experts)).astype(np.float32)
    logits_TE[:2] = [[0.5], [1.0]] * (np.arange(arch.num_experts) % 2)
    bias_E = jnp.float32(rng.normal(size=arch.num_experts)) if arch.router_bias else None
    dweights_TA = jnp.float32(rng.normal(size=(num_tokens, arch.num_active_experts)))
    gate, _ = kernels_for(kernels, arch)

    def weigh(logits_TE: jax.Array) -> tuple[jax.Array, jax.Array]:
        routing, _, _ = route(arch, logits_TE, jnp.eye(arch.num_experts), bias_E, gate=gate)
        return routing.weights_TA, routing.experts_TA

    @jax.jit
    def both_ways(logits_TE: jax.Array) -> list[jax.Array]:
        weights_TA, transpose, experts_TA = jax.vjp(weigh, logits_TE, has_aux=True)
        return [experts_TA, weights_TA, *transpose(dweights_TA)]

    return both_ways(jnp.asarray(logits_TE))


def rows(kernels: MoeKernels, num_tokens: int = 7, num_slots: int = 30) -> list[jax.Array]:
    """Spread, combine, and their gradients; some slots are empty and hold NaN, some choices nowhere, token 2 altogether."""
    rng = np.random.default_rng(4)
    slots_TA = rng.permutation(num_slots)[: num_tokens * A].astype(np.int32).reshape(num_tokens, A)
    slots_TA[[0, 2, 2, 2, 5], [1, 0, 1, 2, 0]] = num_slots
    rows_R = np.full(num_slots + 1, num_tokens * A, np.int32)
    rows_R[slots_TA.reshape(-1)] = np.arange(num_tokens * A)
    rows_R = rows_R[:-1]
    shapes = ((num_tokens, D), (num_slots, D), (num_tokens, A), (num_tokens, D), (num_slots, D))
    x_TD, y_RD, weights_TA, dout_TD, dx_RD = (jnp.float32(rng.normal(size=shape)) for shape in shapes)
    y_RD = jnp.where(rows_R[:, None] < num_tokens * A, y_RD, jnp.nan)
    _, move = kernels_for(kernels, ARCH)

    @jax.jit
    def both_ways(token_R: jax.Array, rows_R: jax.Array, slots_TA: jax.Array) -> list[jax.Array]:
        spread_RD, back = jax.vjp(lambda x_TD: move.spread(x_TD, token_R, slots_TA), x_TD)
        total_TD, transpose = jax.vjp(lambda y, w: move.combine(y, rows_R, slots_TA, w), y_RD, weights_TA)
        return [spread_RD, *back(dx_RD), total_TD, *transpose(dout_TD)]

    return both_ways(*map(jnp.asarray, (rows_R // A, rows_R, slots_TA)))


def layer(mesh_config: MeshConfig, backends: MoeConfig, is_forced: bool, kernels: MoeKernels) -> list[jax.Array]:
    """The layer's output, its experts and the gradients of input and weights; every other token may be forced."""
    rng = np.random.default_rng(5)
    mesh = make_mesh(mesh_config)
    shapes = {"router_DE": (D, E), "gate_EDF": (E, D, F), "up_EDF": (E, D, F), "down_EFD": (E, F, D)}
    weights = {
        name: to_mesh((rng.normal(size=shape) / shape[-2] ** 0.5).astype(np.float32), mesh, layout(name))
        for name, shape in shapes.items()
    }
    x_BTD, dy_BTD = (to_mesh(rng.normal(size=(4, 10, D)).astype(np.float32), mesh, TOKENS) for _ in range(2))
    is_free_BTA = np.broadcast_to(np.arange(10)[None, :, None] % 2, (4, 10, A))
    forced_BTA = to_mesh(np.where(is_free_BTA, -1, np.array([7, 2, 15])).astype(np.int32), mesh, TOKENS)
    config = dataclasses.replace(backends, kernels=kernels)

    @partial(jax.value_and_grad, argnums=(0, 1), has_aux=True)
    def loss(x_BTD: jax.Array, weights: dict[str, jax.Array]) -> tuple[jax.Array, list[jax.Array]]:
        y_BTD, routes = moe_layer(ARCH, x_BTD, weights, forced_BTA if is_forced else None, config)
        return jnp.sum(y_BTD * dy_BTD), [y_BTD, routes.experts_BTA]

    with jax.set_mesh(mesh):
        (_, found), grads = jax.jit(loss)(x_BTD, weights)
    return [*found, *jax.tree.leaves(grads)]


def layout(name: str) -> PartitionSpec:
    """Return the sharding of a weight of the layer, gathered over fsdp."""
    return PartitionSpec() if name == "router_DE" else spec(" ".join(name.split("_")[1]), ("fsdp",))


CASES: dict[str, Case] = {
    **{f"choice, {router}": partial(choice, router) for router in ROUTERS},
    "rows": rows,
    "layer, blocks, two shards of experts": partial(layer, MeshConfig(expert=2), MoeConfig(), False),
    "layer, ragged, forced, four devices": partial(
        layer, MeshConfig(data=2, context=2), MoeConfig(grouped_matmul="ragged", dispatch="all_to_all"), True
    ),
}
