"""Every expert backend against a float64 loop over tokens in NumPy: values and gradients, for any routing, on two meshes.

Tolerance: sums of at most D * F = 77 products and T * A = 120 rows in float32, each term of order 1: 1e-5 of the largest.
"""

import functools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec, reshard

from rl_jax.axes import TOKENS, spec
from rl_jax.mesh import MeshConfig, make_mesh, to_mesh
from rl_jax.models.architecture import Architecture
from rl_jax.models.grouped_matmul import EXPERTS, GroupedMatmul, block_rows, ragged_fault
from rl_jax.models.moe import MoeConfig, moe_layer
from rl_jax.models.route import Routing

RTOL = 1e-5
E, D, F = 5, 7, 11
BACKENDS: list[GroupedMatmul] = ["blocks", "ragged", "dense"]
ARCH = Architecture(
    vocab_size=30,
    width=D,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_width=4,
    num_experts=8,
    num_active_experts=3,
    expert_width=6,
)


def make_inputs(experts_TA: np.ndarray, num_experts: int = E, width: int = F) -> tuple[list[np.ndarray], np.ndarray]:
    """Return x_TD, weights_TA, gate_EDF, up_EDF, down_EFD, and a gradient of the output, all float64."""
    rng = np.random.default_rng(experts_TA.size)
    num_tokens = len(experts_TA)
    shapes = [(num_tokens, D), experts_TA.shape, *[(num_experts, D, width)] * 2, (num_experts, width, D)]
    scales = [1, 1, D**-0.5, D**-0.5, width**-0.5]
    arrays = [scale * rng.normal(size=shape) for shape, scale in zip(shapes, scales, strict=True)]
    return arrays, rng.normal(size=(num_tokens, D))


def loop_over_tokens(
    experts_TA: np.ndarray, arrays: list[np.ndarray], dy_TD: np.ndarray
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return the output and the gradients of sum(output * dy), by the derivative of x * sigmoid(x) written out."""
    x_TD, weights_TA, gate_EDF, up_EDF, down_EFD = arrays
    y_TD, grads = np.zeros_like(x_TD), [np.zeros_like(array) for array in arrays]
    for t, a in np.ndindex(experts_TA.shape):
        e = experts_TA[t, a]
        if not 0 <= e < len(gate_EDF):
            continue
        gate_F, up_F = x_TD[t] @ gate_EDF[e], x_TD[t] @ up_EDF[e]
        sigmoid_F = 1 / (1 + np.exp(-gate_F))
        hidden_F = gate_F * sigmoid_F * up_F
        out_D = hidden_F @ down_EFD[e]
        y_TD[t] += weights_TA[t, a] * out_D
        dhidden_F = down_EFD[e] @ dy_TD[t] * weights_TA[t, a]
        dgate_F = dhidden_F * up_F * (sigmoid_F + gate_F * sigmoid_F * (1 - sigmoid_F))
        dup_F = dhidden_F * gate_F * sigmoid_F
        grads[0][t] += gate_EDF[e] @ dgate_F + up_EDF[e] @ dup_F
        grads[1][t, a] = out_D @ dy_TD[t]
        grads[2][e] += np.outer(x_TD[t], dgate_F)
        grads[3][e] += np.outer(x_TD[t], dup_F)
        grads[4][e] += np.outer(hidden_F, dy_TD[t]) * weights_TA[t, a]
    return y_TD, grads


def assert_close(actual: jax.Array | np.ndarray, expected: np.ndarray, rtol: float = RTOL) -> None:
    np.testing.assert_allclose(actual, expected, rtol=0, atol=rtol * max(1.0, np.abs(expected).max(initial=0)))


@partial(jax.jit, static_argnums=0)
def value_and_gradients(
    backend: GroupedMatmul, experts_TA: jax.Array, arrays: list[jax.Array], dy_TD: jax.Array
) -> tuple[jax.Array, list[jax.Array]]:
    def experts(x_TD: jax.Array, weights_TA: jax.Array, *weights: jax.Array) -> jax.Array:
        return EXPERTS[backend](x_TD, Routing(experts_TA=experts_TA, weights_TA=weights_TA), *weights)

    y_TD, transpose = jax.vjp(experts, *arrays)
    return y_TD, list(transpose(dy_TD))


def check(backend: GroupedMatmul, experts_TA: np.ndarray) -> None:
    arrays, dy_TD = make_inputs(experts_TA)
    y_TD, grads = loop_over_tokens(experts_TA, arrays, dy_TD)
    floats = jax.tree.map(jnp.float32, (arrays, dy_TD))
    actual_TD, actual = value_and_gradients(backend, jnp.int32(experts_TA), *floats)
    assert_close(actual_TD, y_TD)
    for got, want in zip(actual, grads, strict=True):
        assert_close(got, want)


def distinct(num_tokens: int, num_active: int, num_experts: int = E) -> np.ndarray:
    """Random experts, no two of a token the same."""
    rng = np.random.default_rng(num_tokens)
    return np.argsort(rng.random((num_tokens, num_experts)), axis=1)[:, :num_active].astype(np.int32)


ROUTINGS = {
    "1x1": distinct(1, 1),
    "1x3": distinct(1, 3),
    "4x2": distinct(4, 2),
    "23x1": distinct(23, 1),
    "19x2": distinct(19, 2),
    "37x3": distinct(37, 3),
    "empty experts": distinct(19, 2, 2) * 4,
    "one expert": np.full((19, 2), 3, np.int32),
    "none here": np.full((19, 2), E, np.int32),
    "none here, few": np.full((4, 2), -1, np.int32),
    "many of other shards": distinct(19, 2, 3 * E) - E,
    "some of other shards, few": distinct(4, 2, 2 * E) - 3,
}
"""Few rows, at most 2 * E, go without blocks."""


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ROUTINGS)
def test_values_and_gradients(backend: GroupedMatmul, name: str) -> None:
    check(backend, ROUTINGS[name])


@settings(max_examples=30)
@given(st.lists(st.sampled_from([-2, 0, 1, 2, 3, 4, 5, 9]), min_size=38, max_size=38))
@example([0] * 38)
@example([4] * 37 + [0])
@example([-2] * 19 + [9] * 19)
def test_blocks_drop_nothing_whatever_the_routing(ids: list[int]) -> None:
    check("blocks", np.array(ids, np.int32).reshape(19, 2))


@pytest.mark.parametrize("num_tokens", [4, 19])
def test_bfloat16_weight_gradients_add_up_in_float32(num_tokens: int) -> None:
    # One rounding to bfloat16 (2**-8) in each of input, hidden row, output and gradient, and the last of the sum.
    experts_TA = distinct(num_tokens, 2)
    arrays, dy_TD = make_inputs(experts_TA)
    halves = jax.tree.map(lambda array: jnp.asarray(array, jnp.bfloat16), (arrays, dy_TD))
    halves[0][1] = halves[0][1].astype(jnp.float32)  # routing weights stay float32
    exact = jax.tree.map(lambda array: np.asarray(array, np.float64), halves)
    y_TD, grads = loop_over_tokens(experts_TA, *exact)
    actual_TD, actual = value_and_gradients("blocks", jnp.int32(experts_TA), *halves)
    assert actual_TD.dtype == jnp.bfloat16
    for got, want in zip([actual_TD, *actual], [y_TD, *grads], strict=True):
        assert_close(got.astype(jnp.float32), want, 5 * 2**-8)


@pytest.mark.parametrize(
    ("num_rows", "num_experts", "expected"), [(1, 16, 1), (33, 16, 2), (128, 16, 8), (511, 16, 16), (5000, 16, 64)]
)
def test_block_rows(num_rows: int, num_experts: int, expected: int) -> None:
    assert block_rows(num_rows, num_experts) == expected


def test_ragged_is_refused_on_cuda_above_a_size() -> None:
    # Measured by compiling for an H200: 8192 rows of 2048 bfloat16 for 16 experts take 512 MiB.
    assert ragged_fault("gpu", 8192, 16, 2048, 2) is None
    assert ragged_fault("tpu", 32768, 16, 2048, 2) is None
    assert "each of the 16 experts of a device, 2.0 GiB" in (ragged_fault("gpu", 32768, 16, 2048, 2) or "")


def layer_on(
    config: MeshConfig, backends: MoeConfig, x_BTD: np.ndarray, forcings: list[np.ndarray]
) -> tuple[list[list[np.ndarray]], list[int]]:
    """For each forcing: output, experts, probabilities, and the gradients of a sum over output and probabilities.

    And for each the number of dropped choices.
    """
    rng = np.random.default_rng(0)
    mesh = make_mesh(config)
    shapes = {"router_DE": (D, 8), "gate_EDF": (8, D, 6), "up_EDF": (8, D, 6), "down_EFD": (8, 6, D)}
    layouts = {name: spec(" ".join(name.split("_")[1]), ("fsdp",)) for name in shapes} | {"router_DE": PartitionSpec()}
    weights = {
        name: to_mesh((rng.normal(size=shape) / shape[-2] ** 0.5).astype(np.float32), mesh, layouts[name])
        for name, shape in shapes.items()
    }
    dy_BTD = to_mesh(rng.normal(size=x_BTD.shape).astype(np.float32), mesh, TOKENS)
    dprobs_BTE = to_mesh(rng.normal(size=(*x_BTD.shape[:2], 8)).astype(np.float32), mesh, TOKENS)

    @partial(jax.value_and_grad, argnums=(0, 1), has_aux=True)
    def loss(
        x_BTD: jax.Array, weights: dict[str, jax.Array], forced_BTA: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        y_BTD, routes = moe_layer(ARCH, x_BTD, weights, forced_BTA, backends)
        total = jnp.sum(y_BTD * dy_BTD) + jnp.sum(routes.probs_BTE * dprobs_BTE)
        return total, (y_BTD, routes.experts_BTA, routes.probs_BTE, routes.num_dropped)

    found, dropped = [], []
    with jax.set_mesh(mesh):
        step, input_BTD = jax.jit(loss), to_mesh(x_BTD, mesh, TOKENS)
        for forced_BTA in forcings:
            (total, (*out, num_dropped)), grads = jax.device_get(
                step(input_BTD, weights, to_mesh(forced_BTA, mesh, TOKENS))
            )
            found.append([total, *out, *jax.tree.leaves(grads)])
            dropped.append(int(num_dropped))
    return found, dropped


@functools.cache
def cases(num_times: int) -> tuple[np.ndarray, list[np.ndarray]]:
    """Input, and forcings: free, all tokens to one device and empty experts, one expert only, half of the tokens."""
    rng = np.random.default_rng(1)
    x_BTD = rng.normal(size=(4, num_times, D)).astype(np.float32)
    free_BTA = np.full((4, num_times, 3), -1, np.int32)
    one_shard_BTA = free_BTA * 0 + np.array([1, 0, 3], np.int32)
    one_expert_BTA = free_BTA * 0 + 5
    half_BTA = np.where(np.arange(num_times)[None, :, None] % 2, free_BTA, np.array([7, 2, 6], np.int32))
    return x_BTD, [free_BTA, one_shard_BTA, one_expert_BTA, half_BTA]


@functools.cache
def dense_layer(num_times: int) -> list[list[np.ndarray]]:
    return layer_on(MeshConfig(), MoeConfig(grouped_matmul="dense"), *cases(num_times))[0]


@pytest.mark.parametrize(
    ("num_times", "config", "backends"),
    [
        (1, MeshConfig(expert=2), MoeConfig()),
        (9, MeshConfig(data=2, expert=2, tensor=2), MoeConfig()),
        (8, MeshConfig(context=8), MoeConfig(grouped_matmul="ragged")),
        (8, MeshConfig(context=8), MoeConfig(dispatch="all_to_all", buffer=1.0)),
        (9, MeshConfig(data=2, expert=2, tensor=2), MoeConfig(dispatch="all_to_all", grouped_matmul="ragged")),
        (8, MeshConfig(expert=2, context=2), MoeConfig(dispatch="all_to_all", grouped_matmul="dense", buffer=99.0)),
        (8, MeshConfig(expert=2, context=4), MoeConfig(dispatch="capacity", buffer=99.0)),
        (9, MeshConfig(expert=4, tensor=2), MoeConfig(dispatch="ragged_all_to_all")),
        (8, MeshConfig(fsdp=2, context=4), MoeConfig(dispatch="ragged_all_to_all", grouped_matmul="ragged")),
    ],
    ids=str,
)
def test_layer_is_the_same_on_every_mesh_and_backend(num_times: int, config: MeshConfig, backends: MoeConfig) -> None:
    found, dropped = layer_on(config, backends, *cases(num_times))
    assert dropped == [0] * len(found)
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(dense_layer(num_times)), strict=True):
        assert_close(got, want)


def test_capacity_counts_what_it_drops() -> None:
    """Four devices of 8 tokens, with room for 6 choices to each device; a dropped choice adds nothing to its token."""
    x_BTD, forcings = cases(8)
    (_, one_shard, one_expert, _), dropped = layer_on(
        MeshConfig(expert=4), MoeConfig(dispatch="capacity", buffer=1.0), x_BTD, forcings
    )
    # Experts 1 and 0 are on the first device, 3 is on the second: of each device 16 and 8 choices go there, 6 fit. One
    # expert: 24 choices, 6 fit. Half: 4 forced tokens go to two devices, the free ones wherever they like, so nothing
    # is certain.
    assert dropped[1:3] == [4 * (10 + 2), 4 * 18]
    expected, places_T = dense_layer(8), np.arange(8)[:, None]
    assert_close(one_expert[1], expected[2][1] * (places_T < 2))
    assert_close(one_shard[1][:, :3], expected[1][1][:, :3])
    assert_close(one_shard[1][:, 6:], np.zeros((4, 2, D)))


@pytest.mark.parametrize(("platform", "is_native"), [("tpu", True), ("cpu", False)])
def test_ragged_exchange_is_native_where_the_platform_has_it(platform: str, is_native: bool) -> None:
    mesh = make_mesh(MeshConfig(expert=2, context=2))
    shapes = {"router_DE": (D, 8), "gate_EDF": (8, D, 6), "up_EDF": (8, D, 6), "down_EFD": (8, 6, D)}
    x_BTD = to_mesh(np.zeros((2, 4, D), np.float32), mesh, TOKENS)

    def total(x_BTD: jax.Array) -> jax.Array:
        w = {name: jnp.zeros(shape) for name, shape in shapes.items()}
        w |= {name: reshard(w[name], spec(" ".join(name[-3:]), ("fsdp",))) for name in w if name != "router_DE"}
        return jnp.sum(moe_layer(ARCH, x_BTD, w, None, MoeConfig(dispatch="ragged_all_to_all"))[0])

    with jax.set_mesh(mesh):
        lowered = jax.jit(jax.grad(total)).trace(x_BTD).lower(lowering_platforms=(platform,))
    assert ("ragged_all_to_all" in lowered.as_text()) == is_native
