"""What a training step tells: its metrics, its speed, and who is to blame when a number is not finite. Host only."""

import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from rl_jax.losses import MAX_LOG_RATIO, means
from rl_jax.metrics import quantiles
from rl_jax.models.architecture import Architecture
from rl_jax.models.schema import num_active_params
from rl_jax.trainer.step import Applied, Told
from rl_jax.types import Batch

PEAK_FLOPS = {
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5": 459e12,
    "TPU v6 lite": 918e12,
    "TPU7x": 1153.5e12,  # two JAX devices a chip
    "NVIDIA A100": 312e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA B200": 2250e12,
}
"""Start of jax.Device.device_kind -> peak dense bfloat16 FLOP/s of one JAX device, by the makers' data sheets. The
first that fits counts."""


def step_metrics(loss: str, batches: Sequence[Batch], told: Sequence[Told]) -> dict[str, float]:
    """Return the metrics of the step from sums and per-token values; names as in Prime-RL where they exist there."""
    sums = {name: math.fsum(float(one.sums[name]) for one in told) for name in told[0].sums}
    metrics = means(sums)
    metrics["loss/mean"] = metrics.pop("loss")
    entropy = np.concatenate([one.entropy_BT[batch.mask_BT] for one, batch in zip(told, batches, strict=True)])
    metrics |= quantiles("entropy/all", entropy)
    if loss == "rl":
        log_ratio = np.concatenate([_log_ratio(*pair) for pair in zip(batches, told, strict=True)])
        metrics |= quantiles("mismatch_kl/all", np.expm1(log_ratio) - log_ratio)
    else:
        del metrics["is_masked"]
    for replaced in ("entropy", "mismatch_kl"):
        metrics.pop(replaced, None)
    balances = [float(one.balance) for one in told if one.balance is not None]
    if balances:
        metrics["loss/balance"] = math.fsum(balances) / num_tokens(batches)
    zs = [float(one.z) for one in told if one.z is not None]
    if zs:
        metrics["loss/z"] = math.fsum(zs) / num_tokens(batches)
    dropped = [float(one.dropped_frac) for one in told if one.dropped_frac is not None]
    if dropped:
        metrics["moe/dropped_frac"] = math.fsum(dropped) / len(dropped)
    load_LE = total_load(told)
    if load_LE is not None:
        vio_L = load_LE.max(axis=1) / load_LE.mean(axis=1) - 1
        metrics |= {"max_vio": float(vio_L.mean()), "max_vio/worst_layer": float(vio_L.max())}
        metrics["unused_experts_frac"] = float((load_LE == 0).mean())
    return metrics


def _log_ratio(batch: Batch, told: Told) -> np.ndarray:
    """Trainer's minus sampler's log-probability of the trained tokens, in float64, limited as exp needs it."""
    log_ratio = told.logp_BT[batch.mask_BT].astype(np.float64) - batch.logprobs_BT[batch.mask_BT]
    return np.minimum(log_ratio, MAX_LOG_RATIO)


def total_load(told: Sequence[Told]) -> np.ndarray | None:
    """Return the tokens of each layer and expert, [L, E], over all micro-batches."""
    loads_LE = [one.load_LE for one in told if one.load_LE is not None]
    return np.stack(loads_LE).sum(axis=0, dtype=np.int64) if loads_LE else None


def faults(told: Sequence[Told], applied: Applied) -> list[str]:
    """Name what is not finite: losses of micro-batches, gradients of weights."""
    losses = [i for i, one in enumerate(told) if not np.isfinite(one.sums["loss"])]
    leaves = jax.tree.leaves_with_path(applied.is_finite)
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, is_finite in leaves if not is_finite]
    found = [f"the loss of micro-batches {losses} is not finite"] if losses else []
    if not applied.is_loss_finite and not losses:
        found.append("the summed loss is not finite")
    return found + ([f"the gradients of {', '.join(names)} are not finite"] if names else [])


def suspects(batches: Sequence[Batch], told: Sequence[Told], rollout_ids: Sequence[int] | None) -> str:
    """Name the rollouts with a value that is not finite, else those of the micro-batches with a non-finite loss."""
    found: set[int] = set()
    for batch, one in zip(batches, told, strict=True):
        is_good_BT = np.isfinite(one.logp_BT) & np.isfinite(one.entropy_BT) & np.isfinite(batch.logprobs_BT)
        found |= set(batch.rollouts_BT[batch.mask_BT & ~is_good_BT].tolist())
    if not found:
        losses = [np.isfinite(one.sums["loss"]) for one in told]
        bad = [b for b, is_finite in zip(batches, losses, strict=True) if not is_finite] or batches
        found = {index for batch in bad for index in batch.rollouts_BT[batch.mask_BT].tolist()}
    names = sorted(index if rollout_ids is None else rollout_ids[index] for index in found)
    shown = ", ".join(map(str, names[:20])) + (f" and {len(names) - 20} more" if len(names) > 20 else "")
    return f"{'rollouts' if rollout_ids is not None else 'rollout indices'} involved: {shown}"


def speed(arch: Architecture, mesh: Mesh, batches: Sequence[Batch], seconds: float) -> dict[str, float]:
    """Return tokens per second, and the share of the devices' peak where the peak is known."""
    values = {"time/forward_backward": seconds, "perf/throughput": num_tokens(batches) / seconds}
    kind = mesh.devices.flat[0].device_kind
    peak = next((flops for start, flops in PEAK_FLOPS.items() if kind.startswith(start)), None)
    if peak is not None:
        values["perf/mfu"] = step_flops(arch, batches) / (seconds * peak * mesh.size)
    return values


def step_flops(arch: Architecture, batches: Sequence[Batch]) -> float:
    """Return floating-point operations of one step: 6 a parameter and token, and 12 a layer, head dimension and pair.

    A pair is a token and one that it attends to; recomputation (remat) and padding do not count.
    """
    num_pairs = sum(float((batch.positions_BT + 1)[batch.segments_BT > 0].sum()) for batch in batches)
    attention = 12.0 * arch.num_layers * arch.num_heads * arch.head_width * num_pairs
    return 6.0 * num_active_params(arch) * num_tokens(batches) + attention


def num_tokens(batches: Sequence[Batch]) -> int:
    """Count the tokens that are no padding."""
    return sum(batch.num_tokens for batch in batches)
