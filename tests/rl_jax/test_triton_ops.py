"""The door to the Triton kernels: the same numbers and gradients as XLA's (interpreted), lowered for an H200, bad input.

Where jax-triton or jax's CUDA plugin is absent (they are layers of their own, requirements/triton.txt), what needs them is
skipped.
"""

import dataclasses
import importlib.util
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import triton_cases
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from triton_calls import Launch, launches
from triton_cases import ARCH, CASES, D, E

from rl_jax.axes import MESH_AXES, TOKENS
from rl_jax.cli import RunConfig
from rl_jax.config import ConfigError, load
from rl_jax.models.moe import MoeConfig, moe_layer
from rl_jax.models.moe_kernels import kernel_faults, platform_faults
from rl_jax.rooms import start_mesh

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
HAS_TRITON = importlib.util.find_spec("jax_triton") is not None
needs_triton = pytest.mark.skipif(
    not HAS_TRITON, reason="jax-triton is absent: requirements/triton.txt is not installed"
)
if HAS_TRITON:
    from kernels import aot
    from kernels.gate.cases import MODELS
    from kernels.gate.cases import VARIANTS as GATES
    from kernels.permute.cases import VARIANTS as PERMUTES
    from kernels.router import Router
    from rl_jax import triton_ops
H200 = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="cuda")


@pytest.fixture(scope="module")
def interpreted() -> dict[str, np.ndarray]:
    """What the kernels compute in every case, under Triton's interpreter."""
    environment = {
        **os.environ,
        "TRITON_CACHE_DIR": "/a/cache",
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
    }
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.npz"
        command = [sys.executable, str(HERE / "triton_interpreted.py"), str(file)]
        run = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr[-3000:]
        with np.load(file) as found:
            return dict(found)


@needs_triton
@pytest.mark.parametrize("name", CASES)
def test_the_kernels_compute_what_xla_does(name: str, interpreted: dict[str, np.ndarray]) -> None:
    """Tolerance: float32 sums of at most 24 products of order 1, in another order."""
    expected = jax.device_get(jax.tree.leaves(CASES[name]("xla")))
    assert len(expected) == sum(key.rsplit(" ", 1)[0] == name for key in interpreted)
    for i, want in enumerate(expected):
        got = interpreted[f"{name} {i}"]
        if want.dtype == np.int32:
            np.testing.assert_array_equal(got, want)
        else:
            np.testing.assert_allclose(got, want, rtol=0, atol=2e-6 * max(1, np.abs(want).max()))


def lowered(function, *shapes: jax.ShapeDtypeStruct) -> list[Launch]:
    return launches(jax.jit(function).trace(*shapes).lower(lowering_platforms=("cuda",)))


def shape(*sizes: int, dtype=jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def broken_promises(launch: Launch, variant: "aot.Variant", folder: Path) -> list[str]:
    """Assemble the code of a launch for an H200; return what it breaks of the promises of the variant that ships."""
    (folder / "kernel.ptx").write_text(launch.ptx)
    aot.run_tool("ptxas", "--gpu-name=sm_90a", "-o", str(folder / "kernel.cubin"), str(folder / "kernel.ptx"))
    code, metadata = (folder / "kernel.cubin").read_bytes(), SimpleNamespace(shared=launch.shared_bytes)
    return aot.faults_of(variant, aot.nvidia_resources(SimpleNamespace(asm={"cubin": code}, metadata=metadata)))


@needs_triton
@pytest.mark.parametrize(
    ("name", "dtype", "num_tokens", "grid", "num_warps"),
    [
        ("qwen3 E128 k8 fp32 w4", jnp.float32, 37, 10, 4),
        ("qwen3 E128 k8 fp32 w1", jnp.float32, 1, 1, 1),
        ("deepseek-v3 E256 k8 bf16 w4", jnp.bfloat16, 4098, 1025, 4),
    ],
)
def test_gate_is_launched_as_the_one_that_ships(name, dtype, num_tokens, grid, num_warps, tmp_path) -> None:
    model = next(model for model in MODELS if model.name == name.split()[0])
    variant = next(variant for variant in GATES if variant.name == name)
    bias = [shape(model.num_experts)] if model.has_bias else []

    def choose(logits_TE, *bias):
        return triton_ops.gate(logits_TE, model.router, *bias, compute_capability=90)

    (launch,) = lowered(choose, shape(num_tokens, model.num_experts, dtype=dtype), *bias)
    assert (launch.kernel, launch.grid, launch.num_warps) == ("gate", (grid, 1, 1), num_warps)
    assert launch.compute_capability == 90 and ".target sm_90a" in launch.ptx
    assert broken_promises(launch, variant, tmp_path) == []


@needs_triton
def test_rows_are_moved_by_the_kernels_that_ship_there_and_back(tmp_path) -> None:
    """Width 2048 in bfloat16 is two blocks of 1,024 columns; each gradient is one launch of the other kernel."""
    T, A, R, width = 5, 8, 67, 2048
    x_TD, y_RD = shape(T, width, dtype=jnp.bfloat16), shape(R, width, dtype=jnp.bfloat16)
    slots_TA, rows_R = shape(T, A, dtype=jnp.int32), shape(R, dtype=jnp.int32)

    def spread(x_TD, slots_TA, dy_RD):
        y_RD, back = jax.vjp(partial(triton_ops.permute, slots_TA=slots_TA, num_rows=R, compute_capability=90), x_TD)
        return y_RD, back(dy_RD)

    def combine(y_RD, rows_R, slots_TA, weights_TA, dout_TD):
        def total(y_RD, weights_TA):
            return triton_ops.unpermute(y_RD, rows_R, slots_TA, weights_TA, compute_capability=90)

        out_TD, back = jax.vjp(total, y_RD, weights_TA)
        return out_TD, back(dout_TD)

    moved = lowered(spread, x_TD, slots_TA, y_RD) + lowered(combine, y_RD, rows_R, slots_TA, shape(T, A), x_TD)
    assert [launch.kernel for launch in moved] == ["permute", "unpermute", "unpermute", "permute"]
    ships = {
        "permute": ("permute D2048 bf16 -> bf16", (0, 0, R * width * 2)),
        "unpermute": ("unpermute D2048 bf16", (0, 0, 0, 0)),
    }
    for launch in moved:
        name, zeroed_bytes = ships[launch.kernel]
        variant = next(variant for variant in PERMUTES if variant.name == name)
        assert (launch.grid, launch.num_warps, launch.zeroed_bytes) == ((T, 2, 1), 4, zeroed_bytes)
        assert broken_promises(launch, variant, tmp_path) == []


@needs_triton
def test_the_whole_layer_and_its_gradient_lower_for_h200s() -> None:
    sizes = {"data": 2, "fsdp": 1, "expert": 2, "context": 1, "tensor": 2}
    mesh = AbstractMesh(tuple(sizes.values()), MESH_AXES, (AxisType.Explicit,) * 5, abstract_device=H200)
    config = MoeConfig(kernels="triton")
    shapes = {"router_DE": (D, E), "gate_EDF": (E, D, 6), "up_EDF": (E, D, 6), "down_EFD": (E, 6, D)}

    def loss(x_BTD, weights):
        return jnp.sum(moe_layer(ARCH, x_BTD, weights, None, config)[0].astype(jnp.float32))

    def struct(sizes, layout, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=jax.sharding.NamedSharding(mesh, layout))

    weights = {name: struct(sizes, triton_cases.layout(name)) for name, sizes in shapes.items()}
    weights["router_DE"] = struct((D, E), triton_cases.layout("router_DE"), jnp.float32)
    with jax.sharding.use_abstract_mesh(mesh):
        traced = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).trace(struct((4, 10, D), TOKENS), weights)
        found = launches(traced.lower())
    assert sorted(launch.kernel for launch in found) == ["gate", "permute", "permute", "unpermute", "unpermute"]
    assert {launch.compute_capability for launch in found} == {90}


def arguments(op: str) -> dict:
    """Arguments of an operation that only lack a GPU."""
    ids_TA = jnp.zeros((3, 2), jnp.int32)
    return {
        "gate": {"logits_TE": jnp.zeros((3, 8)), "router": Router(num_active=2), "bias_E": jnp.zeros(8)},
        "permute": {"x_TD": jnp.zeros((3, 8)), "slots_TA": ids_TA, "num_rows": 6},
        "unpermute": {
            "y_RD": jnp.zeros((6, 8)),
            "rows_R": jnp.zeros(6, jnp.int32),
            "slots_TA": ids_TA,
            "weights_TA": jnp.zeros((3, 2)),
        },
    }[op]


@needs_triton
@pytest.mark.parametrize(
    ("op", "name", "value", "error", "message"),
    [
        ("gate", "logits_TE", jnp.zeros((2, 3, 8)), ValueError, r"logits_TE: shape \(2, 3, 8\); must be \(any, any\)"),
        ("gate", "logits_TE", jnp.zeros((3, 8), jnp.int32), ValueError, "logits_TE: dtype int32; must be float32 or"),
        ("gate", "bias_E", jnp.zeros(7), ValueError, r"bias_E: shape \(7,\); must be \(8\)"),
        ("gate", "bias_E", jnp.zeros(8, jnp.bfloat16), ValueError, "bias_E: dtype bfloat16; must be float32"),
        ("gate", "logits_TE", jnp.zeros((3, 1)), ValueError, "bias_E: shape"),
        ("permute", "x_TD", jnp.zeros((3, 12)), ValueError, "x_TD: width 12; must be a multiple of 8"),
        ("permute", "x_TD", jnp.zeros((4, 8)), ValueError, r"slots_TA: shape \(3, 2\); must be \(4, any\)"),
        ("permute", "slots_TA", jnp.zeros((3, 2)), ValueError, "slots_TA: dtype float32; must be int32"),
        (
            "permute",
            "slots_TA",
            jnp.zeros((3, 33), jnp.int32),
            NotImplementedError,
            "at most 32 choices of a token, got 33",
        ),
        ("permute", "num_rows", -1, ValueError, "num_rows=-1: must be from 0 to"),
        ("unpermute", "rows_R", jnp.zeros(5, jnp.int32), ValueError, r"rows_R: shape \(5,\); must be \(6\)"),
        ("unpermute", "weights_TA", jnp.zeros((2, 3)), ValueError, r"weights_TA: shape \(2, 3\); must be \(3, 2\)"),
        ("unpermute", "weights_TA", jnp.zeros((3, 2), jnp.bfloat16), ValueError, "weights_TA: dtype bfloat16; must be"),
        ("gate", "compute_capability", 75, NotImplementedError, "gate: compute_capability=75: must be at least 80"),
        (
            "gate",
            "compute_capability",
            None,
            NotImplementedError,
            r"gate: Triton kernels run on NVIDIA GPUs, got cpu \(cpu\)",
        ),
        (
            "permute",
            "compute_capability",
            None,
            NotImplementedError,
            "permute: Triton kernels run on NVIDIA GPUs, got cpu",
        ),
        ("unpermute", "compute_capability", None, NotImplementedError, "unpermute: Triton kernels run on NVIDIA GPUs"),
    ],
)
def test_a_bad_argument_is_refused_by_name(op, name, value, error, message) -> None:
    with pytest.raises(error, match=message):
        getattr(triton_ops, op)(**{**arguments(op), name: value})


@needs_triton
@pytest.mark.parametrize(
    ("router", "num_experts", "error", "message"),
    [
        ({"num_active": 9}, 8, ValueError, "router.num_active=9: must be from 1 to 8"),
        ({"num_active": 2}, 513, NotImplementedError, "gate: needs at most 512 experts, got 513"),
        ({"num_active": 17}, 64, NotImplementedError, "gate: needs at most 16 active experts, got 17"),
        ({"num_active": 2, "num_groups": 3}, 12, NotImplementedError, "gate: needs a power of two of experts"),
    ],
)
def test_a_router_that_the_kernel_lacks_is_refused(router, num_experts, error, message) -> None:
    with pytest.raises(error, match=message):
        triton_ops.gate(jnp.zeros((3, num_experts)), Router(**router))


@needs_triton
def test_the_import_leaves_the_environment_as_it_was(interpreted: dict[str, np.ndarray]) -> None:
    """jax-triton empties it, and vLLM servers that a run starts would inherit that."""
    assert str(interpreted["TRITON_CACHE_DIR"]) == "/a/cache"


@needs_triton
def test_nothing_to_launch_is_no_launch() -> None:
    def all_three(logits_TE, x_TD, slots_TA):
        weights_TA, ids_TA = triton_ops.gate(logits_TE, Router(num_active=2), compute_capability=90)
        y_RD = triton_ops.permute(x_TD, slots_TA, 6, compute_capability=90)
        rows_R = jnp.zeros(6, jnp.int32)
        return ids_TA, triton_ops.unpermute(y_RD, rows_R, slots_TA, weights_TA, compute_capability=90)

    none = (jnp.zeros((0, 8)), jnp.zeros((0, 16)), jnp.zeros((0, 2), jnp.int32))
    ids_TA, out_TD = all_three(*none)
    assert (ids_TA.shape, ids_TA.dtype, out_TD.shape) == ((0, 2), jnp.int32, (0, 16))


WITHOUT = "jax_triton is not installed; pip install 'rl-jax[triton]', or use 'xla'"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, []),
        ({"width": 12}, ["model.width=12 must be a multiple of 8; or use 'xla'"]),
        ({"num_experts": 514}, ["the gate needs at most 512 experts, got 514; use 'xla'"]),
        (
            {"num_expert_groups": 4, "num_active_groups": 2},
            [
                "the gate scores groups by their best expert where the router has no bias, models/route.py by their two "
                "best; use 'xla'"
            ],
        ),
        (
            {"num_expert_groups": 16, "num_active_groups": 5, "router_bias": True},
            ["the gate needs groups of more than one expert, got 16 groups of 16 experts; use 'xla'"],
        ),
        ({"num_expert_groups": 4, "num_active_groups": 2, "router_bias": True}, []),
        ({"num_expert_groups": 4, "num_active_groups": 4}, []),
    ],
)
def test_the_config_is_told_why_not(changes: dict, expected: list[str]) -> None:
    if not HAS_TRITON:
        expected = [WITHOUT, *(fault for fault in expected if "the gate" not in fault)]
    arch = dataclasses.replace(ARCH, **changes)
    assert list(kernel_faults("triton", arch)) == [f"forward.moe_kernels='triton': {fault}" for fault in expected]
    assert list(kernel_faults("xla", arch)) == []


def test_devices_of_another_platform_are_refused_before_anything_starts() -> None:
    config = load(RunConfig, [ROOT / "configs" / "reverse_text.toml"], ["forward.moe_kernels=triton"])
    with pytest.raises(
        ConfigError, match=r"^forward\.moe_kernels='triton': needs NVIDIA GPUs, and the devices here are cpu"
    ):
        start_mesh(config)
    assert list(platform_faults("triton", "gpu")) == list(platform_faults("xla", "tpu")) == []
