"""Mixture-of-experts layer: route, dispatch, grouped matmul, combine, inside one shard_map over the whole mesh.

Each part is a file of its own with named backends: route.py, dispatch.py (which combines on the way back), and
grouped_matmul.py; moe_kernels.py says who runs their inner steps. Values and gradients are the same for all backends, but
for what `capacity` drops.
"""

from dataclasses import dataclass
from functools import partial

import jax
from flax import struct
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from rl_jax.axes import BATCH_AXES, TOKENS, spec
from rl_jax.models.architecture import Architecture
from rl_jax.models.dispatch import Dispatch, dispatch
from rl_jax.models.grouped_matmul import EXPERTS, GroupedMatmul
from rl_jax.models.moe_kernels import MoeKernels, kernels_for
from rl_jax.models.route import route


@dataclass(frozen=True, kw_only=True)
class MoeConfig:
    """Backends of the layer."""

    dispatch: Dispatch = "all_gather"
    grouped_matmul: GroupedMatmul = "blocks"
    buffer: float = 1.5
    """Rows to a device in one exchange, relative to an even share; for all_to_all and capacity."""
    block_rows: int = 64
    """Rows of a block at most, for grouped_matmul blocks."""
    kernels: MoeKernels = "xla"
    """Who chooses experts and moves rows to their order."""


@struct.dataclass
class Routes:
    """What the layer tells about its tokens."""

    experts_BTA: jax.Array
    """int32 ids"""
    probs_BTE: jax.Array
    """float32, the router's scores divided by their sum"""
    log_sums_BT: jax.Array
    """float32, log(sum(exp(router's logits)))"""
    num_dropped: jax.Array
    """int32 scalar: choices of experts, of all tokens and devices, that did not fit into the buffers of `capacity`."""


def moe_layer(
    arch: Architecture,
    x_BTD: Float[Array, "B T D"],
    w: dict[str, jax.Array],
    forced_BTA: Int[Array, "B T A"] | None,
    config: MoeConfig,
) -> tuple[Float[Array, "B T D"], Routes]:
    """Return the output of the experts, and where each token went.

    Args:
        w: weights of one layer, gathered over fsdp: router_DE and router_bias_E (float32, whole; the latter if the
            architecture has it), gate_EDF, up_EDF, down_EFD.
        forced_BTA: experts to use instead of the router's choice (router replay); a token with an id < 0 is free.
    """
    forced = () if forced_BTA is None else (forced_BTA,)
    router = {name: w[name] for name in ("router_DE", "router_bias_E") if name in w}
    weights = (router, w["gate_EDF"], w["up_EDF"], w["down_EFD"])
    specs = (TOKENS, PartitionSpec(), spec("E D F", ("fsdp",)), spec("E D F", ("fsdp",)), spec("E F D", ("fsdp",)))
    layer = jax.shard_map(
        partial(_moe_on_device, arch, config),
        in_specs=specs + (TOKENS,) * len(forced),
        out_specs=(TOKENS, TOKENS, PartitionSpec()),
    )
    y_BTD, (experts_BTA, probs_BTE, log_sums_BT), num_dropped = layer(x_BTD, *weights, *forced)
    routes = Routes(experts_BTA=experts_BTA, probs_BTE=probs_BTE, log_sums_BT=log_sums_BT, num_dropped=num_dropped)
    return y_BTD, routes


def _moe_on_device(
    arch: Architecture,
    config: MoeConfig,
    x_BTD: jax.Array,
    router: dict[str, jax.Array],
    gate_EDF: jax.Array,
    up_EDF: jax.Array,
    down_EFD: jax.Array,
    *forced: jax.Array,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array], jax.Array]:
    rows_BT = x_BTD.shape[:2]
    x_TD = x_BTD.reshape(-1, x_BTD.shape[-1])
    forced_TA = forced[0].reshape(x_TD.shape[0], -1) if forced else None
    gate, rows = kernels_for(config.kernels, arch)
    bias_E = router.get("router_bias_E")
    routing, probs_TE, log_sums_T = route(arch, x_TD, router["router_DE"], bias_E, forced_TA, gate)
    experts_BTA, probs_BTE = (x.reshape(*rows_BT, -1) for x in (routing.experts_TA, probs_TE))
    # In the backward pass these two lines sum the gradients of the weights over data and fsdp, of the rows over tensor.
    weights = lax.pcast((gate_EDF, up_EDF, down_EFD), ("data", "fsdp"), to="varying")
    x_TD, routing = lax.pcast((x_TD, routing), "tensor", to="varying")
    block = {"most": config.block_rows} if config.grouped_matmul == "blocks" else {}
    experts = partial(EXPERTS[config.grouped_matmul], rows=rows, **block)
    y_TD, num_dropped = dispatch(config.dispatch, config.buffer, experts, x_TD, routing, weights)
    # Each shard of F drops the same: one of them counts.
    num_dropped = lax.pmax(lax.psum(num_dropped, (*BATCH_AXES, "context")), "tensor")
    y_BTD = lax.psum(y_TD, "tensor").reshape(x_BTD.shape).astype(x_BTD.dtype)
    return y_BTD, (experts_BTA, probs_BTE, log_sums_T.reshape(rows_BT)), num_dropped
