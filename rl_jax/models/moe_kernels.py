"""Who runs the inner steps of a mixture-of-experts layer, by name: XLA, or the Triton kernels of rl_jax/triton_ops.py.

The one place that asks for that optional door (step 11 of docs/walk.md). Knows no mesh.
"""

import importlib.util
from collections.abc import Iterator
from typing import Any, Literal

import jax

from rl_jax.models.architecture import Architecture
from rl_jax.models.permute import GATHERS, Rows
from rl_jax.models.route import Gate

MoeKernels = Literal["xla", "triton"]
"""xla: plain JAX, any platform; triton: one launch to choose and weigh experts, one each to move rows there and back."""


def kernels_for(kernels: MoeKernels, arch: Architecture) -> tuple[Gate | None, Rows]:
    """Return who chooses experts (None: models/route.py itself) and who moves rows.

    Raises:
        NotImplementedError: the kernel does not choose as this architecture does.
    """
    if kernels == "xla":
        return None, GATHERS
    from rl_jax import triton_ops  # optional extra

    faults = list(_router_faults(arch))
    if faults:
        raise NotImplementedError("; ".join(faults))
    router = triton_ops.Router(**_router(arch))

    def gate(logits_TE: jax.Array, bias_E: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        return triton_ops.gate(logits_TE, router, bias_E)

    def spread(x_TD: jax.Array, token_R: jax.Array, slots_TA: jax.Array) -> jax.Array:
        return triton_ops.permute(x_TD, slots_TA, token_R.shape[0])

    return gate, Rows(spread=spread, combine=triton_ops.unpermute)


def kernel_faults(kernels: MoeKernels, arch: Architecture) -> Iterator[str]:
    """Yield why forward.moe_kernels cannot be so with this architecture and these packages."""
    if kernels == "xla":
        return
    if not arch.num_experts:
        yield "forward.moe_kernels='triton': the model has no experts; leave it 'xla'"
    elif importlib.util.find_spec("jax_triton") is None:
        yield "forward.moe_kernels='triton': jax_triton is not installed; pip install 'rl-jax[triton]', or use 'xla'"
    else:
        yield from _router_faults(arch)
    if arch.width % 8:
        yield f"forward.moe_kernels='triton': model.width={arch.width} must be a multiple of 8; or use 'xla'"


def platform_faults(kernels: MoeKernels, platform: str) -> Iterator[str]:
    """Yield why forward.moe_kernels cannot be so on devices of this platform, as JAX names it."""
    if kernels == "triton" and platform != "gpu":
        yield f"forward.moe_kernels='triton': needs NVIDIA GPUs, and the devices here are {platform}; use 'xla'"


def _router_faults(arch: Architecture) -> Iterator[str]:
    from rl_jax import triton_ops  # optional extra

    router = triton_ops.Router(**_router(arch))
    fault = triton_ops.router_fault(router, arch.num_experts)
    if router.num_groups > 1 and not arch.router_bias:
        fault = "scores groups by their best expert where the router has no bias, models/route.py by their two best"
    elif router.num_groups == arch.num_experts > 1:
        fault = f"needs groups of more than one expert, got {router.num_groups} groups of {arch.num_experts} experts"
    if fault:
        yield f"forward.moe_kernels='triton': the gate {fault}; use 'xla'"


def _router(arch: Architecture) -> dict[str, Any]:
    is_grouped = arch.num_active_groups < arch.num_expert_groups
    return {
        "num_active": arch.num_active_experts,
        "scoring": arch.router_scores,
        "num_groups": arch.num_expert_groups if is_grouped else 1,
        "num_kept_groups": arch.num_active_groups if is_grouped else 1,
        "renormalize": arch.normalise_routing,
        "scale": arch.routed_scaling,
    }
