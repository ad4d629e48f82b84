"""Optional door to kernels/: gate, permute and unpermute on an NVIDIA GPU, each with its gradient (docs/triton_ops.md).

models/moe_kernels.py asks for this module where forward.moe_kernels is "triton"; nothing else imports it. The extra
`triton` installs jax-triton and triton; torch is not needed. It lowers for CUDA on any machine and runs on a GPU only.
Sizes are constants of a launch, since JAX knows them: a shape more is a compile more. Knows no model.
"""

from functools import partial
from typing import cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels.gate import cases as gate_table
from kernels.gate import kernel as gate_kernel
from kernels.permute import cases as permute_table
from kernels.permute import kernel as permute_kernel
from kernels.router import Router
from rl_jax.triton_launch import capability_for, check_array, launch

FLOATS = (jnp.dtype("float32"), jnp.dtype("bfloat16"), jnp.dtype("float16"))
FLOAT32 = FLOATS[:1]
INT32 = (jnp.dtype("int32"),)


def gate(
    logits_TE: Float[Array, "T E"],
    router: Router,
    bias_E: Float[Array, " E"] | None = None,
    *,
    compute_capability: int | None = None,
) -> tuple[Float[Array, "T A"], Int[Array, "T A"]]:
    """Choose the best experts of each token; see kernels/gate/op.py. The bias moves the choice only, without gradient.

    Args:
        logits_TE: float32, bfloat16 or float16; all arithmetic is float32.
        bias_E: float32.
        compute_capability: of the GPU, 90 for an H200; None = that of the mesh in scope, or of the first device.

    Returns:
        weights_TA float32 and ids_TA int32, best first.

    Raises:
        ValueError: an argument breaks its constraint.
        NotImplementedError: a router that the kernel does not do, or a device that is no NVIDIA GPU.
    """
    check_array("logits_TE", logits_TE, (None, None), FLOATS)
    num_experts = logits_TE.shape[1]
    if bias_E is not None:
        check_array("bias_E", bias_E, (num_experts,), FLOAT32)
    router.check(num_experts, bias_E is not None)
    fault = router_fault(router, num_experts)
    if fault:
        raise NotImplementedError(f"gate: {fault}")
    return _gate(logits_TE, bias_E, router, capability_for("gate", compute_capability))


def permute(
    x_TD: Float[Array, "T D"], slots_TA: Int[Array, "T A"], num_rows: int, *, compute_capability: int | None = None
) -> Float[Array, "R D"]:
    """Copy each token to its slots; a slot that no token has is a row of zeros. The transpose sums them back.

    Args:
        x_TD: float32, bfloat16 or float16; D a multiple of 8.
        slots_TA: int32, distinct; outside 0 .. num_rows - 1 = nowhere.
        num_rows: R, slots that there are.
        compute_capability: see gate.

    Raises:
        ValueError: an argument breaks its constraint.
        NotImplementedError: more than 32 choices of a token, or a device that is no NVIDIA GPU.
    """
    check_array("x_TD", x_TD, (None, None), FLOATS)
    check_array("slots_TA", slots_TA, (x_TD.shape[0], None), INT32)
    _check_rows("permute", "x_TD", x_TD.shape[1], slots_TA.shape[1])
    if not 0 <= num_rows < 2**31:
        raise ValueError(f"num_rows={num_rows}: must be from 0 to {2**31 - 1}")
    return _permute(x_TD, _positions(slots_TA, num_rows), num_rows, capability_for("permute", compute_capability))


def unpermute(
    y_RD: Float[Array, "R D"],
    rows_R: Int[Array, " R"],
    slots_TA: Int[Array, "T A"],
    weights_TA: Float[Array, "T A"],
    *,
    compute_capability: int | None = None,
) -> Float[Array, "T D"]:
    """Return sum over a of weights_TA[t, a] * y_RD[slots_TA[t, a]], added in float32 choice after choice.

    Args:
        y_RD: float32, bfloat16 or float16; D a multiple of 8; rows in no slot are not read.
        rows_R: int32, the choice t * A + a in each slot, T * A where there is none: the inverse of `slots_TA`.
        slots_TA: int32, distinct; outside 0 .. R - 1 = adds nothing.
        weights_TA: float32.
        compute_capability: see gate.

    Raises:
        ValueError: an argument breaks its constraint.
        NotImplementedError: more than 32 choices of a token, or a device that is no NVIDIA GPU.
    """
    check_array("y_RD", y_RD, (None, None), FLOATS)
    num_rows, width = y_RD.shape
    check_array("rows_R", rows_R, (num_rows,), INT32)
    check_array("slots_TA", slots_TA, (None, None), INT32)
    check_array("weights_TA", weights_TA, slots_TA.shape, FLOAT32)
    _check_rows("unpermute", "y_RD", width, slots_TA.shape[1])
    capability = capability_for("unpermute", compute_capability)
    return _unpermute(y_RD, rows_R, _positions(slots_TA, num_rows), weights_TA, capability)


def router_fault(router: Router, num_experts: int) -> str | None:
    """Return why the kernel cannot choose as `router` does, None where it can."""
    if num_experts > gate_table.MAX_EXPERTS:
        return f"needs at most {gate_table.MAX_EXPERTS} experts, got {num_experts}"
    if router.num_active > gate_table.MAX_ACTIVE:
        return f"needs at most {gate_table.MAX_ACTIVE} active experts, got {router.num_active}"
    if router.num_groups > 1 and num_experts & (num_experts - 1):
        return f"needs a power of two of experts when they are grouped, got {num_experts}"
    return None


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _gate(
    logits_TE: jax.Array, bias_E: jax.Array | None, router: Router, capability: int
) -> tuple[jax.Array, jax.Array]:
    num_tokens, num_experts = logits_TE.shape
    constants = router.constants(num_experts, bias_E is not None)
    num_warps = gate_table.num_warps_for(num_tokens, int(constants["BLOCK_E"]), logits_TE.dtype.itemsize)
    shape_TA = (num_tokens, router.num_active)
    weights_TA, ids_TA = launch(
        gate_kernel.gate,
        (logits_TE, logits_TE if bias_E is None else bias_E),  # not read without a bias
        (jax.ShapeDtypeStruct(shape_TA, jnp.float32), jax.ShapeDtypeStruct(shape_TA, jnp.int32)),
        grid=(-(-num_tokens // num_warps),),
        num_warps=num_warps,
        compute_capability=capability,
        scale=float(router.scale),
        T=num_tokens,
        stride_T=num_experts,
        BLOCK_T=num_warps,
        **constants,
    )
    return weights_TA, ids_TA


def _gate_forward(
    logits_TE: jax.Array, bias_E: jax.Array | None, router: Router, capability: int
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
    weights_TA, ids_TA = cast(tuple[jax.Array, jax.Array], _gate(logits_TE, bias_E, router, capability))
    return (weights_TA, ids_TA), (logits_TE, ids_TA)


def _gate_backward(
    router: Router, capability: int, kept: tuple[jax.Array, jax.Array], cotangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, None]:
    """Derive the weights of the choice that was made, in float32.

    w = scale * s, or scale * s / sum(s) over the chosen: ds = scale * dw, or scale * (dw - sum(dw * s) / sum(s)) / sum(s).
    softmax: dx = s * (ds - sum(ds * s)) over all experts; sigmoid: dx = s * (1 - s) * ds.
    """
    logits_TE, ids_TA = kept
    dscores_TA = router.scale * cotangents[0]
    x_TE = logits_TE.astype(jnp.float32)
    scores_TE = jax.nn.softmax(x_TE, axis=1) if router.scoring == "softmax" else jax.nn.sigmoid(x_TE)
    scores_TA = jnp.take_along_axis(scores_TE, ids_TA, axis=1)
    if router.renormalize:
        total_T1 = jnp.sum(scores_TA, axis=1, keepdims=True)
        mean_T1 = jnp.sum(dscores_TA * scores_TA, axis=1, keepdims=True) / total_T1
        dscores_TA = (dscores_TA - mean_T1) / total_T1
    # No scatter: XLA fuses the comparison into the sum, so nothing of [T, A, E] exists.
    is_chosen_TAE = ids_TA[:, :, None] == jnp.arange(logits_TE.shape[1], dtype=jnp.int32)[None, None, :]
    dscores_TE = jnp.sum(jnp.where(is_chosen_TAE, dscores_TA[:, :, None], 0.0), axis=1)
    if router.scoring == "softmax":
        dx_TE = scores_TE * (dscores_TE - jnp.sum(dscores_TA * scores_TA, axis=1, keepdims=True))
    else:
        dx_TE = scores_TE * (1.0 - scores_TE) * dscores_TE
    return dx_TE.astype(logits_TE.dtype), None


_gate.defvjp(_gate_forward, _gate_backward)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _permute(x_TD: jax.Array, positions_TA: jax.Array, num_rows: int, capability: int) -> jax.Array:
    num_tokens, width = x_TD.shape
    block = permute_table.block_for(width)
    (y_RD,) = launch(
        permute_kernel.permute,
        (x_TD, positions_TA),
        (jax.ShapeDtypeStruct((num_rows, width), x_TD.dtype),),
        grid=(num_tokens, -(-width // block)),
        num_warps=permute_table.NUM_WARPS,
        compute_capability=capability,
        zeroed_outputs=(0,),  # the kernel writes no padding, and garbage there would reach the weights' gradient
        scale_pointer=None,
        stride_T=width,
        scale_stride_M=0,
        scale_stride_G=0,
        D=width,
        NUM_ACTIVE=positions_TA.shape[1],
        BLOCK_D=block,
        QUANTISE=False,
        POWER_OF_TWO=False,
    )
    return y_RD


def _permute_forward(
    x_TD: jax.Array, positions_TA: jax.Array, num_rows: int, capability: int
) -> tuple[jax.Array, jax.Array]:
    return _permute(x_TD, positions_TA, num_rows, capability), positions_TA


def _permute_backward(
    num_rows: int, capability: int, positions_TA: jax.Array, dy_RD: jax.Array
) -> tuple[jax.Array, None]:
    return _combine(dy_RD, positions_TA, jnp.ones_like(positions_TA, jnp.float32), capability), None


_permute.defvjp(_permute_forward, _permute_backward)


def _combine(y_RD: jax.Array, positions_TA: jax.Array, weights_TA: jax.Array, capability: int) -> jax.Array:
    (num_tokens, num_active), width = positions_TA.shape, y_RD.shape[1]
    block = permute_table.block_for(width)
    (out_TD,) = launch(
        permute_kernel.unpermute,
        (y_RD, positions_TA, weights_TA),
        (jax.ShapeDtypeStruct((num_tokens, width), y_RD.dtype),),
        grid=(num_tokens, -(-width // block)),
        num_warps=permute_table.NUM_WARPS,
        compute_capability=capability,
        D=width,
        NUM_ACTIVE=num_active,
        BLOCK_D=block,
    )
    return out_TD


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _unpermute(
    y_RD: jax.Array, rows_R: jax.Array, positions_TA: jax.Array, weights_TA: jax.Array, capability: int
) -> jax.Array:
    return _combine(y_RD, positions_TA, weights_TA, capability)


def _unpermute_forward(*args: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    return _unpermute(*args), args[:-1]


def _unpermute_backward(
    capability: int, kept: tuple[jax.Array, ...], dout_TD: jax.Array
) -> tuple[jax.Array, None, None, jax.Array]:
    """With g the gradient copied to the slots: dy = weight * g, and dweight = sum over D of y * g, in float32."""
    y_RD, rows_R, positions_TA, weights_TA = kept
    num_rows = y_RD.shape[0]
    g_RD = cast(jax.Array, _permute(dout_TD, positions_TA, num_rows, capability)).astype(jnp.float32)
    weights_R = jnp.take(weights_TA.reshape(-1), rows_R, mode="fill", fill_value=0)
    dweights_R = jnp.sum(y_RD.astype(jnp.float32) * g_RD, axis=1)
    places_TA = jnp.where(positions_TA < 0, num_rows, positions_TA)  # -1 would be the last row
    dweights_TA = jnp.take(dweights_R, places_TA, mode="fill", fill_value=0)
    return (weights_R[:, None] * g_RD).astype(y_RD.dtype), None, None, dweights_TA


_unpermute.defvjp(_unpermute_forward, _unpermute_backward)


def _positions(slots_TA: jax.Array, num_rows: int) -> jax.Array:
    """Return what the kernels take: -1 for nowhere. So no slot makes them reach outside of a buffer."""
    return jnp.where((slots_TA >= 0) & (slots_TA < num_rows), slots_TA, -1)


def _check_rows(op: str, name: str, width: int, num_active: int) -> None:
    if width % 8:
        raise ValueError(f"{name}: width {width}; must be a multiple of 8, rows of whole 16 bytes")
    if num_active > permute_table.MAX_ACTIVE:
        raise NotImplementedError(
            f"{op}: needs at most {permute_table.MAX_ACTIVE} choices of a token, got {num_active}"
        )
