"""The policy losses: log-probabilities of a micro-batch -> summed loss and summed metrics (step 11 of docs/walk.md).

Pure float32 functions of [B, T] arrays that never mix rows before the last sum, so B may be sharded in any way. Nothing
here divides by a number of tokens: the caller divides by the trained tokens of the whole step, over all micro-batches
and devices, so that no split changes the gradient. Knows neither the model nor the optimiser.

Notation: pi trainer, mu sampler (as recorded, quantised if the sampler is), rho = pi / mu, A advantage, sg stop_gradient.
Losses per trained token, all means over tokens:

    dppo            -keep * adv_tau * A * rho + kl_tau * log(rho)^2    keep: pi - mu not too far in the direction of A
    ipo             the same                                           keep: abs(pi - mu) small
    aipo            -sg(min(rho, rho_max)) * A * log pi                a limited token still pushes, with rho_max
    aipo_surrogate  -min(rho, rho_max) * A                             a limited token has no gradient
    ppo_clip        -min(r * A, clip(r) * A)                           r = pi / old
    cispo           -sg(clip(r)) * A * log pi                          r = pi / old; without low clip equal to aipo
    gspo            as ppo_clip, r = sg(exp(mean of log(pi / old) over the sampled tokens of the sequence)) * pi / sg(pi)

`old` is the policy that r counts from. tis_max = 0: old = mu, so one ratio bounds staleness and the sampler's own
numerics together. tis_max > 0 decouples the two (as verl does): old = sg(pi), exact because one optimizer step is taken
for each batch, so r = 1 and its clip never binds; the whole correction is the truncated importance weight
sg(min(rho, tis_max)) on each token. dppo, ipo and both aipo carry rho already and refuse it.
"""

import dataclasses
import functools
import importlib
import importlib.util
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from rl_jax.config import refuse

MAX_LOG_RATIO = 20.0
"""exp sees log-ratios of at most 20 (cosmos-rl's guard): above, a float32 sum would be that one token."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossConfig:
    """Which policy loss, its bounds, and what is added to it. A field of another type is refused, not ignored."""

    type: Literal["dppo", "ipo", "aipo", "aipo_surrogate", "ppo_clip", "gspo", "cispo", "custom"] = "dppo"
    """See the module for the formulas. Sources: dppo arXiv 2602.04879 (Prime-RL's default); aipo arXiv 2505.24034,
    aipo_surrogate as in cosmos-rl; ppo_clip arXiv 1707.06347; gspo arXiv 2507.18071 section 4.3 (GSPO-token, but a mean
    over tokens: a sequence weighs by its length); cispo arXiv 2506.13585; custom needs import_path."""
    dppo_mask_low: float = 0.2
    """dppo: with A <= 0, a token with pi - mu < -dppo_mask_low has no policy gradient; 0..1. Default of Prime-RL 0.8."""
    dppo_mask_high: float = 0.2
    """dppo: with A > 0, a token with pi - mu > dppo_mask_high has no policy gradient; 0..1. Default of Prime-RL 0.8."""
    ipo_threshold: float = 0.1
    """ipo: a token with abs(pi - mu) above has no policy gradient; 0..1. Default of Prime-RL 0.8."""
    adv_tau: float = 1.0
    """dppo, ipo: factor of the advantage; >= 0. Default of Prime-RL 0.8."""
    kl_tau: float = 1e-3
    """dppo, ipo: factor of log(rho)^2, on all trained tokens, masked ones too; >= 0. Default of Prime-RL 0.8."""
    aipo_rho_max: float = 8.0
    """aipo, aipo_surrogate: upper limit of rho; >= 1, the paper suggests 2..10. 8 was Prime-RL's in September 2025."""
    ppo_clip_low: float = 0.2
    """ppo_clip: r is clipped from below at 1 - ppo_clip_low; 0..1. Default of the paper."""
    ppo_clip_high: float = 0.2
    """ppo_clip: r is clipped from above at 1 + ppo_clip_high; > 0. Default of the paper; DAPO uses 0.28."""
    gspo_clip_low: float = 3e-4
    """gspo: as ppo_clip_low for the ratio of a sequence. Default of the paper, where old is at most 4 steps away."""
    gspo_clip_high: float = 4e-4
    """gspo: as ppo_clip_high for the ratio of a sequence. Default of the paper."""
    cispo_clip_low: float = 1.0
    """cispo: the weight is at least 1 - cispo_clip_low; 0..1, 1 = no lower limit, as in the paper."""
    cispo_clip_high: float = 4.0
    """cispo: the weight is at most 1 + cispo_clip_high; > 0. 4 gives the limit 5 of ScaleRL (arXiv 2510.13786)."""
    tis_max: float = 0.0
    """ppo_clip, gspo, cispo: limit of the truncated importance weight, see the module; >= 1, 0 = off. verl uses 2."""
    ref_kl_coef: float = 0.0
    """Factor of the KL to the reference model, estimated as ref/pi - log(ref/pi) - 1 (arXiv 2402.03300); >= 0, 0 = off."""
    entropy_coef: float = 0.0
    """Factor of the entropy, which is subtracted from the loss: > 0 rewards entropy, < 0 punishes it, 0 = off."""
    import_path: str = ""
    """custom: "package.module:function" or "path/file.py:function", called as function(inputs: LossInputs, **kwargs) ->
    (loss of each token [B, T], {metric name: sum over trained tokens}). Untrained tokens reach it as 0."""
    kwargs: dict[str, object] = dataclasses.field(default_factory=dict, hash=False)
    """custom: keyword arguments of the function."""

    def __post_init__(self) -> None:
        refuse(
            [
                *_knob_faults(self),
                None if 0 <= self.ref_kl_coef < _INF else f"ref_kl_coef={self.ref_kl_coef}: expected a number >= 0",
                None if abs(self.entropy_coef) < _INF else f"entropy_coef={self.entropy_coef}: expected a number",
                _import_fault(self),
            ]
        )


@struct.dataclass
class LossInputs:
    """One micro-batch, all [B, T], index t describing the prediction of token t + 1 as in types.Batch.

    Untrained entries of the arrays may hold anything, NaN included.

    Example: one row, T=3, two trained tokens of one sequence: mask_BT = [[0, 1, 1]], segments_BT = [[1, 1, 1]],
    logp_BT = [[x, -0.7, -0.2]], sampler_logp_BT = [[x, -0.6, -0.2]], advantages_BT = [[x, 0.5, 0.5]].
    """

    logp_BT: jax.Array
    """float32, trainer's log-probability at the sampling temperature; the only input with entropy_BT that is
    differentiated."""
    entropy_BT: jax.Array
    """float32, entropy of the trainer's distribution, in nats."""
    sampler_logp_BT: jax.Array
    """float32, log-probability that the sampler recorded."""
    ref_logp_BT: jax.Array | None
    """float32, log-probability under the reference model, or None without one."""
    advantages_BT: jax.Array
    """float32"""
    mask_BT: jax.Array
    """bool, True where the token is trained."""
    segments_BT: jax.Array
    """int32, one run of equal numbers for each sequence of a row."""


CustomLoss = Callable[..., tuple[jax.Array, dict[str, jax.Array]]]
"""See LossConfig.import_path."""


@struct.dataclass
class PolicyLoss:
    """What a policy loss says of each token."""

    loss_BT: jax.Array
    is_masked_low_BT: jax.Array
    """bool, no policy gradient because pi is too far below."""
    is_masked_high_BT: jax.Array
    """bool, no policy gradient because pi is too far above."""
    is_clipped_BT: jax.Array
    """bool, the weight of the gradient is limited."""
    metrics: dict[str, jax.Array] = struct.field(default_factory=dict)


def loss_sum(config: LossConfig, inputs: LossInputs) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """Return the SUM of the loss over trained tokens, and metrics as sums, to be divided as `means` does.

    A trained token with a NaN or infinite log-probability makes the sum non-finite; an untrained one never does.

    Raises:
        ValueError: ref_kl_coef without ref_logp_BT, or a custom loss that returns the wrong shape or a taken name.
    """
    x = _trained_only(inputs)
    log_rho_BT = x.logp_BT - x.sampler_logp_BT
    policy = _POLICY_LOSSES[config.type](config, x)
    loss_BT = policy.loss_BT
    if config.tis_max > 0:
        rho_BT = jax.lax.stop_gradient(_ratio(log_rho_BT))
        loss_BT = loss_BT * jnp.minimum(rho_BT, config.tis_max)
        policy = dataclasses.replace(policy, is_clipped_BT=policy.is_clipped_BT | (rho_BT > config.tis_max))
    terms = {"loss/policy": loss_BT, "entropy": x.entropy_BT}
    loss_BT = loss_BT - config.entropy_coef * x.entropy_BT
    if config.type in ("dppo", "ipo"):
        terms["loss/kl"] = config.kl_tau * log_rho_BT**2
        loss_BT = loss_BT + terms["loss/kl"]
    if x.ref_logp_BT is not None:
        terms["ref_kl"] = k3(x.ref_logp_BT - x.logp_BT)
        loss_BT = loss_BT + config.ref_kl_coef * terms["ref_kl"]
    elif config.ref_kl_coef:
        raise ValueError(f"loss.ref_kl_coef={config.ref_kl_coef} needs ref_logp_BT, got None; give a reference model")
    metrics = {name: _total(x, term_BT) for name, term_BT in terms.items()} | _fate(x, policy, k3(log_rho_BT))
    if taken := metrics.keys() & policy.metrics.keys():
        raise ValueError(f"{config.import_path} returns metrics {sorted(taken)}: these names are taken, rename them")
    return _total(x, loss_BT), metrics | policy.metrics


def means(sums: Mapping[str, float]) -> dict[str, float]:
    """Divide the metrics of `loss_sum`, added up over the step, each by its own number of tokens.

    masked_* are means over the tokens without policy gradient, unmasked_* over the others, the rest over all trained
    tokens. 0 for a mean over nothing.
    """
    tokens, masked = sums["tokens"], sums["is_masked"]

    def denominator(name: str) -> float:
        return masked if name.startswith("masked_") else tokens - masked if name.startswith("unmasked_") else tokens

    return {name: total / max(denominator(name), 1.0) for name, total in sums.items() if name != "tokens"}


def k3(log_ratio_BT: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """Return ratio - log(ratio) - 1 >= 0, whose mean under the denominator's policy is KL(denominator, numerator).

    Off by a few float32 ulp of log(ratio), where exp(x) - x - 1 is off by ulps of 1 and may come out negative.
    """
    guarded_BT = _guarded(log_ratio_BT)
    return jnp.expm1(guarded_BT) - guarded_BT


def _trained_only(inputs: LossInputs) -> LossInputs:
    """Put 0 where the mask is False, before any exp, so that garbage reaches neither values nor gradients."""

    def clean(x_BT: jax.Array) -> jax.Array:
        return jnp.where(inputs.mask_BT, x_BT.astype(jnp.float32), 0.0)

    def constant(x_BT: jax.Array) -> jax.Array:
        return jax.lax.stop_gradient(clean(x_BT))

    return dataclasses.replace(
        inputs,
        logp_BT=clean(inputs.logp_BT),
        entropy_BT=clean(inputs.entropy_BT),
        sampler_logp_BT=constant(inputs.sampler_logp_BT),
        ref_logp_BT=None if inputs.ref_logp_BT is None else constant(inputs.ref_logp_BT),
        advantages_BT=constant(inputs.advantages_BT),
    )


def _guarded(log_ratio_BT: jax.Array) -> jax.Array:
    """Limit what exp will see; a non-finite log-ratio is a fault to be seen, not a large ratio: NaN."""
    return jnp.where(jnp.isfinite(log_ratio_BT), jnp.minimum(log_ratio_BT, MAX_LOG_RATIO), jnp.nan)


def _ratio(log_ratio_BT: jax.Array) -> jax.Array:
    return jnp.exp(_guarded(log_ratio_BT))


def _total(x: LossInputs, value_BT: jax.Array) -> jax.Array:
    return jnp.sum(jnp.where(x.mask_BT, value_BT.astype(jnp.float32), 0.0))


def _fate(x: LossInputs, policy: PolicyLoss, mismatch_kl_BT: jax.Array) -> dict[str, jax.Array]:
    """Sum what happened to the trained tokens. Names of Prime-RL where they exist there."""
    is_masked_BT = policy.is_masked_low_BT | policy.is_masked_high_BT
    counted = {
        "tokens": x.mask_BT,
        "is_masked": is_masked_BT,
        "is_masked_low": policy.is_masked_low_BT,
        "is_masked_high": policy.is_masked_high_BT,
        "is_clipped": policy.is_clipped_BT,
        "masked_advantage_positive": is_masked_BT & (x.advantages_BT > 0),
        "masked_advantage_negative": is_masked_BT & (x.advantages_BT < 0),
        "mismatch_kl": mismatch_kl_BT,
        "masked_mismatch_kl": jnp.where(is_masked_BT, mismatch_kl_BT, 0.0),
        "unmasked_mismatch_kl": jnp.where(is_masked_BT, 0.0, mismatch_kl_BT),
    }
    return {name: _total(x, value_BT) for name, value_BT in counted.items()}


def _policy_loss(
    loss_BT: jax.Array,
    *,
    low_BT: jax.Array | None = None,
    high_BT: jax.Array | None = None,
    clipped_BT: jax.Array | None = None,
) -> PolicyLoss:
    none_BT = jnp.zeros_like(loss_BT, dtype=jnp.bool_)
    low_BT, high_BT, clipped_BT = (none_BT if is_BT is None else is_BT for is_BT in (low_BT, high_BT, clipped_BT))
    return PolicyLoss(loss_BT=loss_BT, is_masked_low_BT=low_BT, is_masked_high_BT=high_BT, is_clipped_BT=clipped_BT)


def _dppo(config: LossConfig, x: LossInputs) -> PolicyLoss:
    delta_BT = jnp.exp(x.logp_BT) - jnp.exp(x.sampler_logp_BT)
    low_BT = (x.advantages_BT <= 0) & (delta_BT < -config.dppo_mask_low)
    high_BT = (x.advantages_BT > 0) & (delta_BT > config.dppo_mask_high)
    return _kept_ratio(config, x, low_BT, high_BT)


def _ipo(config: LossConfig, x: LossInputs) -> PolicyLoss:
    delta_BT = jnp.exp(x.logp_BT) - jnp.exp(x.sampler_logp_BT)
    return _kept_ratio(config, x, delta_BT < -config.ipo_threshold, delta_BT > config.ipo_threshold)


def _kept_ratio(config: LossConfig, x: LossInputs, low_BT: jax.Array, high_BT: jax.Array) -> PolicyLoss:
    keep_BT = jnp.where(low_BT | high_BT, 0.0, config.adv_tau)  # a factor, not a where: NaN must show
    loss_BT = -keep_BT * x.advantages_BT * _ratio(x.logp_BT - x.sampler_logp_BT)
    return _policy_loss(loss_BT, low_BT=low_BT, high_BT=high_BT)


def _aipo(config: LossConfig, x: LossInputs) -> PolicyLoss:
    rho_BT = jax.lax.stop_gradient(_ratio(x.logp_BT - x.sampler_logp_BT))
    weight_BT = jnp.minimum(rho_BT, config.aipo_rho_max)
    return _policy_loss(-weight_BT * x.advantages_BT * x.logp_BT, clipped_BT=rho_BT > config.aipo_rho_max)


def _aipo_surrogate(config: LossConfig, x: LossInputs) -> PolicyLoss:
    rho_BT = _ratio(x.logp_BT - x.sampler_logp_BT)
    high_BT = rho_BT > config.aipo_rho_max
    return _policy_loss(-jnp.where(high_BT, config.aipo_rho_max, rho_BT) * x.advantages_BT, high_BT=high_BT)


def _ppo_clip(config: LossConfig, x: LossInputs) -> PolicyLoss:
    ratio_BT = _ratio(x.logp_BT - _old_logp(config, x))
    return _clipped_surrogate(ratio_BT, x.advantages_BT, config.ppo_clip_low, config.ppo_clip_high)


def _gspo(config: LossConfig, x: LossInputs) -> PolicyLoss:
    here_BT = jax.lax.stop_gradient(x.logp_BT)
    num_BT = _segment_sum(x.mask_BT.astype(jnp.float32), x.segments_BT)
    mean_BT = _segment_sum(here_BT - _old_logp(config, x), x.segments_BT) / jnp.maximum(num_BT, 1.0)
    ratio_BT = _ratio(mean_BT) * jnp.exp(x.logp_BT - here_BT)
    return _clipped_surrogate(ratio_BT, x.advantages_BT, config.gspo_clip_low, config.gspo_clip_high)


def _cispo(config: LossConfig, x: LossInputs) -> PolicyLoss:
    ratio_BT = jax.lax.stop_gradient(_ratio(x.logp_BT - _old_logp(config, x)))
    weight_BT = jnp.clip(ratio_BT, 1 - config.cispo_clip_low, 1 + config.cispo_clip_high)
    return _policy_loss(-weight_BT * x.advantages_BT * x.logp_BT, clipped_BT=weight_BT != ratio_BT)


def _custom(config: LossConfig, x: LossInputs) -> PolicyLoss:
    function = typing.cast(CustomLoss, _import_function(config.import_path))
    loss_BT, metrics = function(x, **config.kwargs)
    if loss_BT.shape != x.logp_BT.shape:
        raise ValueError(f"{config.import_path} returns a loss of shape {loss_BT.shape}: expected {x.logp_BT.shape}")
    return dataclasses.replace(_policy_loss(loss_BT), metrics=metrics)


_POLICY_LOSSES: dict[str, Callable[[LossConfig, LossInputs], PolicyLoss]] = {
    "dppo": _dppo,
    "ipo": _ipo,
    "aipo": _aipo,
    "aipo_surrogate": _aipo_surrogate,
    "ppo_clip": _ppo_clip,
    "gspo": _gspo,
    "cispo": _cispo,
    "custom": _custom,
}


def _old_logp(config: LossConfig, x: LossInputs) -> jax.Array:
    """Return log-probabilities of the policy that clipped ratios count from; see the module."""
    return jax.lax.stop_gradient(x.logp_BT) if config.tis_max > 0 else x.sampler_logp_BT


def _clipped_surrogate(ratio_BT: jax.Array, advantages_BT: jax.Array, low: float, high: float) -> PolicyLoss:
    """Return -min(ratio * A, clip(ratio) * A)."""
    low_BT = (advantages_BT < 0) & (ratio_BT < 1 - low)
    high_BT = (advantages_BT > 0) & (ratio_BT > 1 + high)
    limited_BT = jnp.where(low_BT, 1 - low, jnp.where(high_BT, 1 + high, ratio_BT))
    return _policy_loss(-limited_BT * advantages_BT, low_BT=low_BT, high_BT=high_BT)


def _segment_sum(x_BT: jax.Array, segments_BT: jax.Array) -> jax.Array:
    """Return at each token the sum over its segment, a run of equal numbers.

    Adds windows of 1, 2, 4 ... tokens from the left and from the right: log T steps of [B, T], no gather, no bound on
    the number of segments, and no sum crosses a segment, so neither rounding nor NaN does.
    """
    index_T = jnp.arange(x_BT.shape[1])[None, :]

    def running(x_BT: jax.Array, segments_BT: jax.Array) -> jax.Array:
        def double(sum_BT: jax.Array, shift: jax.Array) -> tuple[jax.Array, None]:
            is_same_BT = (jnp.roll(segments_BT, shift, axis=1) == segments_BT) & (index_T >= shift)
            return sum_BT + jnp.where(is_same_BT, jnp.roll(sum_BT, shift, axis=1), 0.0), None

        return jax.lax.scan(double, x_BT, 2 ** jnp.arange((x_BT.shape[1] - 1).bit_length()))[0]

    from_right_BT = jnp.flip(running(jnp.flip(x_BT, 1), jnp.flip(segments_BT, 1)), 1)
    return running(x_BT, segments_BT) + from_right_BT - x_BT


@functools.cache
def _import_function(import_path: str) -> object:
    source, _, name = import_path.rpartition(":")
    if not source.endswith(".py"):
        return getattr(importlib.import_module(source), name)
    spec = importlib.util.spec_from_file_location(Path(source).stem, source)
    assert spec is not None and spec.loader is not None, f"no loader for {source}"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


_INF = float("inf")
_KNOBS: dict[str, tuple[tuple[str, ...], float, float]] = {  # field: the types that read it, lowest, highest
    "dppo_mask_low": (("dppo",), 0, 1),
    "dppo_mask_high": (("dppo",), 0, 1),
    "ipo_threshold": (("ipo",), 0, 1),
    "adv_tau": (("dppo", "ipo"), 0, _INF),
    "kl_tau": (("dppo", "ipo"), 0, _INF),
    "aipo_rho_max": (("aipo", "aipo_surrogate"), 1, _INF),
    "ppo_clip_low": (("ppo_clip",), 0, 1),
    "ppo_clip_high": (("ppo_clip",), 0, _INF),
    "gspo_clip_low": (("gspo",), 0, 1),
    "gspo_clip_high": (("gspo",), 0, _INF),
    "cispo_clip_low": (("cispo",), 0, 1),
    "cispo_clip_high": (("cispo",), 0, _INF),
    "tis_max": (("ppo_clip", "gspo", "cispo"), 1, _INF),
}
_CARRY_RHO = ("dppo", "ipo", "aipo", "aipo_surrogate")


def _knob_faults(config: LossConfig) -> list[str]:
    """Fault every number that the chosen loss does not read but that was set, or that it reads but cannot use."""
    faults = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name not in _KNOBS or value == field.default:
            continue
        types, low, high = _KNOBS[field.name]
        if field.name == "tis_max" and config.type in _CARRY_RHO:
            faults.append(f"tis_max={value}: {config.type} carries pi/mu already, a weight would count it twice; set 0")
        elif config.type not in types:
            faults.append(f"{field.name}={value}: only read by type {', '.join(types)}, but type={config.type!r}")
        elif not low <= value <= high or value == _INF:
            faults.append(f"{field.name}={value}: expected a number from {low} to {high}")
    return faults


def _import_fault(config: LossConfig) -> str | None:
    """Import the custom loss while the config is checked: a bad path must not surface at the first step."""
    if config.type != "custom":
        unread = config.import_path or config.kwargs
        return f"import_path, kwargs: only read by type custom, but type={config.type!r}" if unread else None
    try:
        function = _import_function(config.import_path)
    except (ImportError, OSError, AttributeError, SyntaxError, ValueError) as error:
        function, why = None, f" ({type(error).__name__}: {error})"
    else:
        why = " (not callable)"
    if callable(function):
        return None
    return (
        f"import_path={config.import_path!r}: cannot be imported{why}; expected package.module:function or "
        "path/file.py:function"
    )
