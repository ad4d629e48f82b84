"""Losses against closed forms in float64: values, gradients with respect to logp, metrics, masks, sharding.

Tolerance: |log rho| <= 8, so a float32 ratio is off by at most 8 * 6e-8 + a few ulp, about 1e-6; sums of 44 tokens stay
below 1e-5 of the sum of absolute values.
"""

import dataclasses
import functools
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from rl_jax.config import ConfigError
from rl_jax.losses import LossConfig, LossInputs, k3, loss_sum, means

RTOL = 1e-5
B, T = 4, 11
CONFIGS = [
    LossConfig(),
    LossConfig(type="dppo", dppo_mask_low=0.05, dppo_mask_high=0.3, adv_tau=0.7, kl_tau=0.02),
    LossConfig(type="ipo", ipo_threshold=0.15, kl_tau=0.01),
    LossConfig(type="aipo", aipo_rho_max=2.0),
    LossConfig(type="aipo_surrogate", aipo_rho_max=2.0),
    LossConfig(type="ppo_clip", ppo_clip_low=0.2, ppo_clip_high=0.28),
    LossConfig(type="gspo", gspo_clip_low=0.2, gspo_clip_high=0.3),
    LossConfig(type="cispo", cispo_clip_low=0.5, cispo_clip_high=1.5),
    LossConfig(type="ppo_clip", tis_max=2.0),
    LossConfig(type="gspo", tis_max=2.0),
    LossConfig(type="cispo", tis_max=2.0),
]
IDS = [f"{c.type}-{i}" for i, c in enumerate(CONFIGS)]
FULL = LossConfig(type="aipo", aipo_rho_max=2.0, ref_kl_coef=0.3, entropy_coef=0.05)


def make_inputs(seed: int, spread: float = 1.0) -> dict[str, np.ndarray]:
    """Rows of two sequences and padding; about half the tokens trained; some advantages exactly 0."""
    rng = np.random.default_rng(seed)
    logp_BT = -rng.exponential(1.0, (B, T)).clip(0, 6)
    segments_BT = np.zeros((B, T), np.int32)
    advantages_BT = np.zeros((B, T))
    for b in range(B):
        cut, end = rng.integers(2, 6), rng.integers(7, T + 1)
        segments_BT[b, :cut], segments_BT[b, cut:end] = 1, 2
        advantages_BT[b, :cut], advantages_BT[b, cut:end] = rng.choice([-1.5, -0.4, 0.0, 0.3, 1.2], 2)
    mask_BT = (rng.random((B, T)) < 0.6) & (segments_BT > 0)
    arrays = {
        "logp_BT": logp_BT,
        "entropy_BT": rng.exponential(1.0, (B, T)),
        "sampler_logp_BT": (logp_BT + spread * rng.normal(size=(B, T))).clip(-8, 0),
        "ref_logp_BT": (logp_BT + 0.5 * rng.normal(size=(B, T))).clip(-8, 0),
        "advantages_BT": advantages_BT,
    }
    arrays = {name: value_BT.astype(np.float32) for name, value_BT in arrays.items()}
    return arrays | {"mask_BT": mask_BT, "segments_BT": segments_BT}


def to_inputs(arrays: dict[str, np.ndarray]) -> LossInputs:
    return LossInputs(**{name: jnp.asarray(value) for name, value in arrays.items()})


@functools.partial(jax.jit, static_argnums=0)
@functools.partial(jax.value_and_grad, argnums=1, has_aux=True)
def loss_of(config: LossConfig, floats: dict[str, jax.Array], rest: LossInputs) -> tuple[jax.Array, dict]:
    return loss_sum(config, dataclasses.replace(rest, **floats))


def run(config: LossConfig, inputs: LossInputs) -> tuple[float, np.ndarray, dict[str, float]]:
    """Return the loss, its gradient with respect to logp, and the metrics."""
    (loss, sums), grads = loss_of(config, {"logp_BT": inputs.logp_BT}, inputs)
    grad_BT = grads["logp_BT"]
    return float(loss), np.asarray(grad_BT, np.float64), {name: float(value) for name, value in sums.items()}


def sequence_ratio(x: dict[str, np.ndarray], b: int, t: int) -> float:
    """GSPO's ratio of the sequence of a token."""
    mine = [s for s in range(T) if x["mask_BT"][b, s] and x["segments_BT"][b, s] == x["segments_BT"][b, t]]
    logs = [float(x["logp_BT"][b, s]) - float(x["sampler_logp_BT"][b, s]) for s in mine]
    return math.exp(sum(logs) / len(logs))


def clip_loss(ratio: float, adv: float, low: float, high: float) -> tuple[float, float, str]:
    """PPO's clipped loss and its derivative by log pi, given d ratio / d log pi = ratio."""
    if adv > 0 and ratio > 1 + high:
        return -(1 + high) * adv, 0.0, "high"
    if adv < 0 and ratio < 1 - low:
        return -(1 - low) * adv, 0.0, "low"
    return -ratio * adv, -ratio * adv, ""


def token_reference(c: LossConfig, x: dict[str, np.ndarray], b: int, t: int) -> tuple[float, float, str]:
    """Closed form of one trained token in float64: loss, derivative by log pi, what happened to it."""
    logp, mu, adv = (float(x[name][b, t]) for name in ("logp_BT", "sampler_logp_BT", "advantages_BT"))
    rho, delta = math.exp(logp - mu), math.exp(logp) - math.exp(mu)
    if c.type in ("dppo", "ipo"):
        if c.type == "dppo":
            fate = ("high" if delta > c.dppo_mask_high else "") if adv > 0 else "low" * (delta < -c.dppo_mask_low)
        else:
            fate = "high" if delta > c.ipo_threshold else "low" if delta < -c.ipo_threshold else ""
        policy = 0.0 if fate else -c.adv_tau * adv * rho
        return policy + c.kl_tau * (logp - mu) ** 2, policy + 2 * c.kl_tau * (logp - mu), fate
    if c.tis_max:
        weight = min(rho, c.tis_max)
        value = -weight * adv * (logp if c.type == "cispo" else 1.0)
        return value, -weight * adv, "clipped" if rho > c.tis_max else ""
    if c.type == "aipo":
        weight = min(rho, c.aipo_rho_max)
        return -weight * adv * logp, -weight * adv, "clipped" if rho > c.aipo_rho_max else ""
    if c.type == "aipo_surrogate":
        return (-c.aipo_rho_max * adv, 0.0, "high") if rho > c.aipo_rho_max else (-rho * adv, -rho * adv, "")
    if c.type == "cispo":
        weight = min(max(rho, 1 - c.cispo_clip_low), 1 + c.cispo_clip_high)
        return -weight * adv * logp, -weight * adv, "clipped" if weight != rho else ""
    if c.type == "gspo":
        return clip_loss(sequence_ratio(x, b, t), adv, c.gspo_clip_low, c.gspo_clip_high)
    return clip_loss(rho, adv, c.ppo_clip_low, c.ppo_clip_high)


def reference(c: LossConfig, x: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray, dict[str, float]]:
    loss_BT, grad_BT = np.zeros((B, T)), np.zeros((B, T))
    sums = dict.fromkeys(("tokens", "is_masked", "is_masked_low", "is_masked_high", "is_clipped", "mismatch_kl"), 0.0)
    sums |= dict.fromkeys(("masked_advantage_positive", "masked_advantage_negative"), 0.0)
    sums |= dict.fromkeys(("masked_mismatch_kl", "unmasked_mismatch_kl", "entropy"), 0.0)
    for b, t in np.argwhere(x["mask_BT"]):
        loss_BT[b, t], grad_BT[b, t], fate = token_reference(c, x, b, t)
        log_rho, adv = float(x["logp_BT"][b, t]) - float(x["sampler_logp_BT"][b, t]), x["advantages_BT"][b, t]
        kl = math.exp(log_rho) - log_rho - 1
        sums["tokens"] += 1
        sums["entropy"] += x["entropy_BT"][b, t]
        sums["mismatch_kl"] += kl
        sums["is_clipped"] += fate == "clipped"
        sums["masked_mismatch_kl" if fate in ("low", "high") else "unmasked_mismatch_kl"] += kl
        if fate in ("low", "high"):
            sums["is_masked"] += 1
            sums[f"is_masked_{fate}"] += 1
            sums["masked_advantage_positive"] += adv > 0
            sums["masked_advantage_negative"] += adv < 0
    return loss_BT, grad_BT, sums


def assert_matches(config: LossConfig, arrays: dict[str, np.ndarray], got: tuple) -> None:
    loss, grad_BT, sums = got
    loss_BT, expected_grad_BT, expected_sums = reference(config, arrays)
    np.testing.assert_allclose(loss, loss_BT.sum(), rtol=0, atol=RTOL * (np.abs(loss_BT).sum() + 1))
    np.testing.assert_allclose(grad_BT, expected_grad_BT, rtol=RTOL, atol=1e-6)
    for name, value in expected_sums.items():
        np.testing.assert_allclose(sums[name], value, rtol=RTOL, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("config", CONFIGS, ids=IDS)
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), spread=st.sampled_from([0.01, 0.5, 2.0]))
def test_value_gradient_and_metrics_equal_the_closed_form(config, seed, spread):
    arrays = make_inputs(seed, spread)
    assert_matches(config, arrays, run(config, to_inputs(arrays)))


@pytest.mark.parametrize("config", [*CONFIGS, FULL], ids=[*IDS, "full"])
@pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf])
def test_garbage_on_untrained_tokens_changes_nothing(config, garbage):
    clean = make_inputs(5)
    dirty = {
        name: np.where(clean["mask_BT"], value, np.float32(garbage)) if value.dtype == np.float32 else value
        for name, value in clean.items()
    }
    loss, grad_BT, sums = run(config, to_inputs(dirty))
    expected_loss, expected_grad_BT, expected_sums = run(config, to_inputs(clean))
    assert loss == expected_loss
    np.testing.assert_array_equal(grad_BT, expected_grad_BT)
    assert (grad_BT[~clean["mask_BT"]] == 0).all()
    assert sums == expected_sums


@pytest.mark.parametrize("config", CONFIGS, ids=IDS)
@pytest.mark.parametrize("name", ["logp_BT", "sampler_logp_BT"])
@pytest.mark.parametrize("garbage", [np.nan, -np.inf])
def test_non_finite_trained_token_shows(config, name, garbage):
    arrays = make_inputs(5)
    b, t = np.argwhere(arrays["mask_BT"] & (arrays["advantages_BT"] != 0))[0]
    arrays[name][b, t] = garbage
    assert not math.isfinite(run(config, to_inputs(arrays))[0])


@pytest.mark.parametrize("config", CONFIGS, ids=IDS)
def test_zero_advantage_has_no_policy_gradient(config):
    arrays = make_inputs(7) | {"advantages_BT": np.zeros((B, T), np.float32)}
    loss, grad_BT, sums = run(config, to_inputs(arrays))
    log_rho_BT = np.where(arrays["mask_BT"], arrays["logp_BT"] - arrays["sampler_logp_BT"], 0).astype(np.float64)
    kl_tau = config.kl_tau if config.type in ("dppo", "ipo") else 0.0
    np.testing.assert_allclose(loss, (kl_tau * log_rho_BT**2).sum(), rtol=RTOL)
    np.testing.assert_allclose(grad_BT, 2 * kl_tau * log_rho_BT, rtol=RTOL, atol=1e-9)
    assert sums["loss/policy"] == 0.0


GAP = float(np.float32(-0.1) - np.float32(-120.0))


@pytest.mark.parametrize(
    ("config", "advantage", "expected_loss", "expected_grad"),
    [
        (CONFIGS[0], 2.0, 1e-3 * GAP**2, 2e-3 * GAP),  # pi - mu = 0.9 > 0.2: masked, the KL term stays
        (CONFIGS[0], -2.0, 2 * math.exp(20) + 1e-3 * GAP**2, 2e-3 * GAP),  # not masked: the guard holds exp at 20
        (CONFIGS[3], 2.0, 2 * 2 * 0.1, -4.0),
        (CONFIGS[4], 2.0, -4.0, 0.0),
        (CONFIGS[5], 2.0, -2 * 1.28, 0.0),
        (CONFIGS[6], 2.0, -2 * 1.3, 0.0),
        (CONFIGS[7], -2.0, -2 * 2.5 * 0.1, 5.0),
        (CONFIGS[8], 2.0, -4.0, -4.0),
    ],
    ids=lambda value: value.type if isinstance(value, LossConfig) else "",
)
def test_huge_ratio_stays_finite(config, advantage, expected_loss, expected_grad):
    here = (1, 3)
    arrays = make_inputs(29)
    for name, value in (("logp_BT", -0.1), ("sampler_logp_BT", -120.0), ("advantages_BT", advantage)):
        arrays[name][here] = value
    arrays["mask_BT"][:] = False
    arrays["mask_BT"][here] = True
    loss, grad_BT, _ = run(config, to_inputs(arrays))
    np.testing.assert_allclose(loss, expected_loss, rtol=RTOL)
    np.testing.assert_allclose(grad_BT[here], expected_grad, rtol=RTOL)
    assert np.count_nonzero(grad_BT) == (expected_grad != 0)


@pytest.mark.parametrize("config", [c for c in CONFIGS if c.tis_max], ids=lambda c: c.type)
def test_truncated_weight_makes_every_clipped_loss_push_like_aipo(config):
    """One optimizer step for each batch: old = pi, so the weight is all that is left of the correction."""
    inputs = to_inputs(make_inputs(11))
    grad_BT = run(LossConfig(type="aipo", aipo_rho_max=config.tis_max), inputs)[1]
    np.testing.assert_allclose(run(config, inputs)[1], grad_BT, rtol=1e-6)


def test_reference_kl_and_entropy_terms():
    arrays = make_inputs(13)
    loss, grad_BT, sums = run(FULL, to_inputs(arrays))
    plain_loss, plain_grad_BT, _ = run(LossConfig(type="aipo", aipo_rho_max=2.0), to_inputs(arrays))
    mask_BT = arrays["mask_BT"]
    gap_BT = arrays["ref_logp_BT"].astype(np.float64) - arrays["logp_BT"]
    kl_BT = np.where(mask_BT, np.exp(gap_BT) - gap_BT - 1, 0)
    entropy = float(arrays["entropy_BT"][mask_BT].sum(dtype=np.float64))
    np.testing.assert_allclose(sums["ref_kl"], kl_BT.sum(), rtol=RTOL)
    np.testing.assert_allclose(loss, plain_loss + 0.3 * kl_BT.sum() - 0.05 * entropy, rtol=RTOL)
    expected_grad_BT = plain_grad_BT + np.where(mask_BT, 0.3 * (1 - np.exp(gap_BT)), 0)
    np.testing.assert_allclose(grad_BT, expected_grad_BT, rtol=RTOL, atol=1e-6)
    inputs = to_inputs(arrays)
    names = ("entropy_BT", "sampler_logp_BT", "ref_logp_BT", "advantages_BT")
    grads = loss_of(FULL, {name: getattr(inputs, name) for name in names}, inputs)[1]
    np.testing.assert_allclose(grads.pop("entropy_BT"), np.where(mask_BT, -0.05, 0), rtol=1e-6)
    for name, grad in grads.items():
        assert not np.asarray(grad).any(), name


def test_reference_kl_without_reference_is_refused():
    inputs = dataclasses.replace(to_inputs(make_inputs(1)), ref_logp_BT=None)
    with pytest.raises(ValueError, match=r"ref_kl_coef=0.1 needs ref_logp_BT"):
        loss_sum(LossConfig(ref_kl_coef=0.1), inputs)


@pytest.mark.parametrize("config", CONFIGS, ids=IDS)
def test_micro_batches_and_packing_change_nothing(config):
    """Two micro-batches with one sequence in each row add up to one micro-batch with two sequences in each row."""
    arrays = make_inputs(17)
    loss, grad_BT, sums = run(config, to_inputs(arrays))
    alone = {name: np.zeros((2 * B, T), value.dtype) for name, value in arrays.items()}
    places = [(i, i // 2, np.flatnonzero(arrays["segments_BT"][i // 2] == i % 2 + 1)) for i in range(2 * B)]
    for i, b, mine_S in places:
        for name, value in arrays.items():
            alone[name][i, : len(mine_S)] = value[b, mine_S]
    parts = [run(config, to_inputs({k: v[half] for k, v in alone.items()})) for half in (np.s_[:B], np.s_[B:])]
    np.testing.assert_allclose(parts[0][0] + parts[1][0], loss, rtol=RTOL)
    for name, value in sums.items():
        np.testing.assert_allclose(parts[0][2][name] + parts[1][2][name], value, rtol=RTOL, atol=1e-6, err_msg=name)
    alone_grad_BT = np.concatenate([part[1] for part in parts])
    for i, b, mine_S in places:
        np.testing.assert_allclose(alone_grad_BT[i, : len(mine_S)], grad_BT[b, mine_S], rtol=1e-6)


@pytest.mark.parametrize("config", [CONFIGS[0], CONFIGS[6], CONFIGS[10], FULL], ids=lambda c: c.type)
def test_rows_sharded_over_devices_change_nothing(config):
    arrays = make_inputs(19)
    loss, grad_BT, sums = run(config, to_inputs(arrays))
    mesh = jax.make_mesh((2, 2), ("data", "fsdp"), axis_types=(AxisType.Explicit,) * 2, devices=jax.devices()[:4])
    rows = NamedSharding(mesh, PartitionSpec(("data", "fsdp"), None))
    with jax.set_mesh(mesh):
        sharded = run(config, jax.device_put(to_inputs(arrays), rows))
    np.testing.assert_allclose(sharded[0], loss, rtol=RTOL)
    np.testing.assert_allclose(sharded[1], grad_BT, rtol=1e-6)
    for name, value in sums.items():
        np.testing.assert_allclose(sharded[2][name], value, rtol=RTOL, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("gap", [1e-6, -1e-4, 1e-3, 0.3, -5.0, 19.0, -40.0])
def test_k3_is_accurate_near_zero_and_far_away(gap):
    gap = float(np.float32(gap))
    expected = math.expm1(gap) - gap if abs(gap) > 1e-2 else gap**2 / 2 + gap**3 / 6 + gap**4 / 24
    # XLA's expm1 is good to a few ulp, and an ulp is 1.2e-7 * abs(gap); measured at most 2.1e-7
    np.testing.assert_allclose(k3(jnp.full((1, 1), gap)), [[expected]], rtol=1e-6, atol=4e-7 * abs(gap))


def test_means_divide_each_metric_by_its_own_tokens():
    sums = {"tokens": 8.0, "is_masked": 2.0, "mismatch_kl": 4.0, "masked_mismatch_kl": 3.0, "unmasked_mismatch_kl": 1.2}
    expected = {"is_masked": 0.25, "mismatch_kl": 0.5, "masked_mismatch_kl": 1.5, "unmasked_mismatch_kl": 0.2}
    assert means(sums) == pytest.approx(expected)
    assert means(dict.fromkeys(sums, 0.0)) == dict.fromkeys(expected, 0.0)


def scaled(inputs: LossInputs, scale: float) -> tuple[jax.Array, dict[str, jax.Array]]:
    """A custom loss: plain REINFORCE."""
    return -scale * inputs.advantages_BT * inputs.logp_BT, {"my_metric": jnp.sum(inputs.advantages_BT)}


def scalar(inputs: LossInputs) -> tuple[jax.Array, dict[str, jax.Array]]:
    return jnp.sum(inputs.logp_BT), {}


def taken(inputs: LossInputs) -> tuple[jax.Array, dict[str, jax.Array]]:
    return inputs.logp_BT, {"mismatch_kl": jnp.float32(0)}


HERE = str(Path(__file__))


def test_custom_loss_from_a_file():
    arrays = make_inputs(23)
    config = LossConfig(type="custom", import_path=f"{HERE}:scaled", kwargs={"scale": 2.5})
    loss, grad_BT, sums = run(config, to_inputs(arrays))
    adv_BT = np.where(arrays["mask_BT"], arrays["advantages_BT"], 0).astype(np.float64)
    np.testing.assert_allclose(loss, -2.5 * (adv_BT * arrays["logp_BT"]).sum(), rtol=RTOL)
    np.testing.assert_allclose(grad_BT, -2.5 * adv_BT, rtol=1e-6)
    np.testing.assert_allclose(sums["my_metric"], adv_BT.sum(), rtol=RTOL)
    assert hash(config) != hash(LossConfig())


@pytest.mark.parametrize(
    ("function", "message"), [("scalar", r"shape \(\): expected \(4, 11\)"), ("taken", r"\['mismatch_kl'\]")]
)
def test_custom_loss_with_a_wrong_answer_is_refused(function, message):
    with pytest.raises(ValueError, match=message):
        loss_sum(LossConfig(type="custom", import_path=f"{HERE}:{function}"), to_inputs(make_inputs(1)))


@pytest.mark.parametrize(
    ("kwargs", "faults"),
    [
        ({"kl_tau": -1.0}, ["kl_tau=-1.0"]),
        ({"dppo_mask_low": 1.5, "adv_tau": float("nan")}, ["dppo_mask_low=1.5", "adv_tau=nan"]),
        ({"tis_max": 2.0}, ["tis_max=2.0: dppo carries pi/mu already"]),
        ({"type": "aipo", "tis_max": 2.0}, ["tis_max=2.0: aipo carries"]),
        ({"type": "ppo_clip", "tis_max": 0.5}, ["tis_max=0.5: expected a number from 1"]),
        ({"type": "aipo", "aipo_rho_max": 0.9}, ["aipo_rho_max=0.9"]),
        ({"type": "gspo", "ppo_clip_low": 0.1}, ["ppo_clip_low=0.1: only read by type ppo_clip, but type='gspo'"]),
        ({"ref_kl_coef": -0.1, "entropy_coef": float("inf")}, ["ref_kl_coef=-0.1", "entropy_coef=inf"]),
        ({"import_path": "a:b"}, ["import_path, kwargs: only read by type custom"]),
        ({"type": "custom"}, ["import_path='': cannot be imported"]),
        ({"type": "custom", "import_path": "no_such_module:f"}, ["cannot be imported (ModuleNotFoundError"]),
        ({"type": "custom", "import_path": "no/such.py:f"}, ["cannot be imported (FileNotFoundError"]),
        ({"type": "custom", "import_path": "math:no_such"}, ["cannot be imported (AttributeError"]),
        ({"type": "custom", "import_path": "math:pi"}, ["cannot be imported (not callable)"]),
    ],
)
def test_bad_configs_are_refused(kwargs, faults):
    with pytest.raises(ConfigError) as error:
        LossConfig(**kwargs)
    assert len(error.value.faults) == len(faults)
    for got, expected in zip(error.value.faults, faults, strict=True):
        assert expected in got
