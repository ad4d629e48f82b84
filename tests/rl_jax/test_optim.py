"""AdamW, Muon, schedules and clipping against float64 NumPy, on one device and on eight."""

from collections.abc import Callable

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from rl_jax.axes import spec
from rl_jax.config import ConfigError
from rl_jax.mesh import MeshConfig, make_mesh
from rl_jax.models.architecture import Architecture
from rl_jax.optim import MUON_RMS, OptimConfig, Role, learning_rate, make_optimizer
from rl_jax.trainer.state import weight_roles

Arrays = dict[str, np.ndarray]
MESHES = [MeshConfig(), MeshConfig(fsdp=2, expert=2, tensor=2)]
ROLES = {
    "norm_D": Role(axes="D", is_decayed=False),
    "embed_VD": Role(axes="V D", is_decayed=True),
    "up_LEDF": Role(axes="L E D F", is_decayed=True, inputs=(2,), outputs=(3,)),
    "wo_LKQHD": Role(axes="L K Q H D", is_decayed=True, inputs=(1, 2, 3), outputs=(4,)),
}
SHAPES = {"norm_D": (6,), "embed_VD": (10, 6), "up_LEDF": (3, 2, 6, 4), "wo_LKQHD": (3, 2, 1, 5, 6)}


def draw(seed: int, scale: float) -> Arrays:
    rng = np.random.default_rng(seed)
    return {name: rng.normal(0, scale, shape).astype(np.float32) for name, shape in SHAPES.items()}


def run(config: OptimConfig, mesh_config: MeshConfig, params: Arrays, gradients: list[Arrays]) -> list[Arrays]:
    """Return the updates of each step."""
    mesh = make_mesh(mesh_config)
    optimizer = make_optimizer(config, ROLES)

    def put(arrays: Arrays) -> dict[str, jax.Array]:
        return {k: jax.device_put(v, NamedSharding(mesh, spec(ROLES[k].axes))) for k, v in arrays.items()}

    with jax.set_mesh(mesh):
        on_mesh = put(params)
        state = jax.jit(optimizer.init)(on_mesh)
        update = jax.jit(optimizer.update)
        found = []
        for gradient in gradients:
            updates, state = update(put(gradient), state, on_mesh)
            found.append(jax.device_get(updates))
        assert update._cache_size() == 1  # the state of a step has the very types of the first one
    return found


def reference(config: OptimConfig, params: Arrays, gradients: list[Arrays]) -> list[Arrays]:
    """The same in float64."""
    direction = {k: _adam(config) for k in SHAPES}
    if config.type == "muon":
        direction |= {"up_LEDF": _muon(config, 1, (6, 4)), "wo_LKQHD": _muon(config, 1, (10, 6))}
    found = []
    for step, gradient in enumerate(gradients):
        norm = np.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in gradient.values()))
        scale = min(1.0, config.max_grad_norm / norm)
        lr = config.lr * min(1.0, (step + 1) / (config.warmup_steps + 1))
        decay = {k: config.weight_decay * ROLES[k].is_decayed * params[k].astype(np.float64) for k in SHAPES}
        found.append({k: -lr * (direction[k](scale * g.astype(np.float64)) + decay[k]) for k, g in gradient.items()})
    return found


def _adam(config: OptimConfig) -> Callable[[np.ndarray], np.ndarray]:
    m, v, t = 0.0, 0.0, 0

    def step(g: np.ndarray) -> np.ndarray:
        nonlocal m, v, t
        t += 1
        m = config.beta1 * m + (1 - config.beta1) * g
        v = config.beta2 * v + (1 - config.beta2) * g**2
        return m / (1 - config.beta1**t) / (np.sqrt(v / (1 - config.beta2**t)) + config.eps)

    return step


def _muon(config: OptimConfig, num_stacked: int, matrix: tuple[int, int]) -> Callable[[np.ndarray], np.ndarray]:
    m, t, b = 0.0, 0, config.muon_momentum

    def step(g: np.ndarray) -> np.ndarray:
        nonlocal m, t
        t += 1
        m = b * m + (1 - b) * g
        nesterov = b * m / (1 - b ** (t + 1)) + (1 - b) * g / (1 - b**t)
        stacked = [_newton_schulz(x, config.muon_iterations) for x in nesterov.reshape(-1, *matrix)]
        return np.reshape(stacked, g.shape) * MUON_RMS * np.sqrt(max(matrix))

    return step


def _newton_schulz(x: np.ndarray, iterations: int) -> np.ndarray:
    x = x / np.linalg.norm(x)
    for _ in range(iterations):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x


@pytest.mark.parametrize("mesh_config", MESHES, ids=str)
@pytest.mark.parametrize("optimizer_type", ["adamw", "muon"])
def test_updates_are_those_of_numpy(optimizer_type: str, mesh_config: MeshConfig) -> None:
    config = OptimConfig(type=optimizer_type, lr=0.1, warmup_steps=1, weight_decay=0.3, max_grad_norm=2.0)
    params, gradients = draw(0, 1.0), [draw(1, 0.5), draw(2, 0.01), draw(3, 1.0)]  # clipped, not clipped, clipped
    found, expected = run(config, mesh_config, params, gradients), reference(config, params, gradients)
    for step, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        for name in SHAPES:
            # Newton-Schulz amplifies the smallest singular values up to 3.4 ** 5 times, roundings of float32 with them.
            is_muon = optimizer_type == "muon" and ROLES[name].inputs
            tolerance = (3.4445**5 if is_muon else 16) * 2**-24
            largest = np.abs(theirs[name]).max()
            np.testing.assert_allclose(
                ours[name], theirs[name], rtol=0, atol=tolerance * largest, err_msg=f"{name} at step {step}"
            )


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (OptimConfig(lr=2.0), [2, 2, 2, 2, 2, 2, 2, 2]),
        (OptimConfig(lr=2.0, warmup_steps=3), [0.5, 1, 1.5, 2, 2, 2, 2, 2]),
        (OptimConfig(lr=2.0, schedule="linear", decay_steps=4, min_lr_frac=0.5), [2, 1.75, 1.5, 1.25, 1, 1, 1, 1]),
        (OptimConfig(lr=2.0, schedule="cosine", decay_steps=2), [2, 1, 0, 0, 0, 0, 0, 0]),
        (OptimConfig(lr=2.0, schedule="linear", warmup_steps=1, decay_steps=2), [1, 2, 1, 0, 0, 0, 0, 0]),
    ],
)
def test_learning_rate(config: OptimConfig, expected: list[float]) -> None:
    rate = learning_rate(config)
    assert [float(rate(step)) for step in range(8)] == pytest.approx(expected, abs=1e-6)


def test_bad_values_are_refused_together() -> None:
    with pytest.raises(ConfigError) as caught:
        OptimConfig(lr=0.0, beta2=1.0, schedule="cosine", min_lr_frac=2.0, max_grad_norm=-1.0)
    assert [fault.split("=")[0] for fault in caught.value.faults] == [
        "beta2",
        "lr",
        "max_grad_norm",
        "min_lr_frac",
        "decay_steps",
    ]
    with pytest.raises(ConfigError, match="decay_steps=5: expected 0 with schedule='constant'"):
        OptimConfig(decay_steps=5)


def test_roles_come_from_the_parameter_table() -> None:
    arch = Architecture(
        vocab_size=7,
        width=4,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_width=2,
        num_experts=3,
        num_active_experts=1,
        expert_width=5,
        attention_bias=True,
        tie_embeddings=False,
    )
    roles = weight_roles(arch)
    assert isinstance(roles, dict)
    layers = roles["layers"]
    assert (layers["wq_LDKQH"].inputs, layers["wq_LDKQH"].outputs) == ((1,), (2, 3, 4))
    assert (layers["wo_LKQHD"].inputs, layers["wo_LKQHD"].outputs) == ((1, 2, 3), (4,))
    assert (layers["down_LEFD"].inputs, layers["down_LEFD"].outputs) == ((2,), (3,))
    for weight in (roles["embed_VD"], roles["unembed_VD"], layers["router_LDE"]):
        assert not weight.inputs and weight.is_decayed
    for weight in (roles["final_norm_D"], layers["q_norm_LH"], layers["bq_LKQH"]):
        assert not weight.inputs and not weight.is_decayed
