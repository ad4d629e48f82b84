"""One launch of a Triton kernel from JAX: checks of arrays, the compute capability, the call (used by triton_ops.py).

Knows no kernel. Needs the extra `triton`.
"""

import os
from collections.abc import Sequence
from types import ModuleType

import jax
import jax.numpy as jnp
from jax import lax

CAPABILITIES = {"A100": 80, "H100": 90, "H200": 90, "GH200": 90, "B200": 100, "GB200": 100}
"""Compute capability by a word of the device kind, for a GPU that is compiled for but not there."""
MIN_CAPABILITY = 80
"""bfloat16, and reductions in one instruction."""


def _import_jax_triton() -> ModuleType:
    """Undo what its import does: an empty TRITON_CACHE_DIR, for this process and for servers that it starts."""
    before = os.environ.get("TRITON_CACHE_DIR")
    import jax_triton  # optional extra  # pyright: ignore[reportMissingImports]

    os.environ.pop("TRITON_CACHE_DIR", None)
    if before is not None:
        os.environ["TRITON_CACHE_DIR"] = before
    return jax_triton


jax_triton = _import_jax_triton()


def launch(
    kernel: object,
    inputs: Sequence[jax.Array],
    outputs: Sequence[jax.ShapeDtypeStruct],
    *,
    grid: tuple[int, ...],
    **settings: object,
) -> tuple[jax.Array, ...]:
    """Call a kernel whose array arguments are `inputs` and then `outputs`; every other argument is a constant by name.

    jax-triton tells the compiler of no integer argument that it is a multiple of 16, and makes a Python float a float64:
    constants have neither fault.

    Args:
        grid: programs; with a 0 in it nothing is launched, and the outputs are zeros.
        settings: of jax_triton.triton_call (num_warps, compute_capability, zeroed_outputs), and the constants.
    """
    varying = frozenset().union(*(jax.typeof(x).mat.varying for x in inputs))
    if 0 in grid:
        found = tuple(jnp.zeros(out.shape, out.dtype) for out in outputs)
    else:
        found = jax_triton.triton_call(*inputs, kernel=kernel, out_shape=tuple(outputs), grid=grid, **settings)
    # The call types its results as equal on all devices of a shard_map.
    return tuple(lax.pcast(x, tuple(varying - jax.typeof(x).mat.varying), to="varying") for x in found)


def check_array(name: str, x: jax.Array, shape: Sequence[int | None], dtypes: Sequence[jnp.dtype]) -> None:
    """Raise ValueError unless `x` has this shape (None = any size) and one of these dtypes."""
    if x.ndim != len(shape) or any(want is not None and want != got for want, got in zip(shape, x.shape, strict=True)):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name}: shape {x.shape}; must be ({wanted})")
    if x.dtype not in dtypes:
        raise ValueError(f"{name}: dtype {x.dtype}; must be {' or '.join(map(str, dtypes))}")


def capability_for(op: str, given: int | None) -> int:
    """Return `given`, or the compute capability of the devices that the mesh in scope names, or of the first device.

    Raises:
        NotImplementedError: they are no GPUs of NVIDIA, or of a kind that is too old or not known.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]
    capability = given or _capability_of(device.platform, device.device_kind)
    if not capability:
        raise NotImplementedError(
            f"{op}: Triton kernels run on NVIDIA GPUs, got {device.platform} ({device.device_kind}); use "
            "forward.moe_kernels='xla', or give compute_capability=90 to lower for an H200 that is not here"
        )
    if capability < MIN_CAPABILITY:
        raise NotImplementedError(f"{op}: compute_capability={capability}: must be at least {MIN_CAPABILITY}")
    return capability


def _capability_of(platform: str, kind: str) -> int:
    """Return the compute capability of a kind of device, 0 where it is not known to be a GPU of NVIDIA."""
    if platform not in ("gpu", "cuda"):
        return 0
    first = jax.devices()[0]
    if first.platform == "gpu" and first.device_kind == kind:
        digits = str(first.compute_capability).replace(".", "")  # of "9.0"; "gfx942" on a GPU of AMD
        return int(digits) if digits.isdigit() else 0
    return next((value for word, value in CAPABILITIES.items() if word in kind.replace("-", " ").split()), 0)
