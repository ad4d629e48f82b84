"""rl_jax/rollout/canary.py: each layer of suspicion is named from numbers that only it explains."""

import numpy as np
import pytest

from rl_jax.rollout.canary import Canary, CanaryConfig, CanaryFailed

SEQUENCES = [np.arange(n, dtype=np.int32) for n in (5, 3, 7)]


def _logits(shift: float) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(9, 9)) * 2 + shift * np.random.default_rng(1).normal(size=(9, 9))


def _scores(logits, temperature=1.0):
    z = logits / temperature
    logp = z - np.log(np.exp(z).sum(1, keepdims=True))
    return [np.concatenate([[0.0], logp[s[:-1], s[1:]]]).astype(np.float32) for s in SEQUENCES]


def _trainer(shift):
    return lambda sequences, temperature: _scores(_logits(shift), temperature)


def test_gap_is_the_mean_absolute_difference():
    theirs = [s + np.float32(0.01) for s in _scores(_logits(0))]
    gap = Canary(CanaryConfig(), SEQUENCES).check(_trainer(0), {"sampler": theirs}, version=0)
    np.testing.assert_allclose(gap, 0.01, rtol=1e-4)


@pytest.mark.parametrize(
    ("theirs", "suspect"),
    [
        (_scores(_logits(0), 0.7), "temperature: the sampler's scores fit temperature 0.7"),
        ([s + np.float32(0.05) for s in _scores(_logits(0))], "precision"),
        (_scores(_logits(5.0)), "weights or tokenizer"),
        ([s[:-1] for s in _scores(_logits(0))], "tokenizer"),
        ([s * np.float32("nan") for s in _scores(_logits(0))], "not finite"),
    ],
)
def test_the_cause_is_named(theirs, suspect):
    with pytest.raises(CanaryFailed, match=suspect):
        Canary(CanaryConfig(), SEQUENCES).check(_trainer(0), {"sampler": theirs}, version=3)


def test_a_sampler_that_was_not_updated_is_recognised():
    canary = Canary(CanaryConfig(), SEQUENCES)
    stale = _scores(_logits(0))
    canary.check(_trainer(0), {"sampler": stale}, version=0)
    with pytest.raises(CanaryFailed, match="still runs the version before"):
        canary.check(_trainer(1.0), {"sampler": stale}, version=1)


def test_the_worst_of_several_samplers_is_named():
    right, wrong = _scores(_logits(0)), _scores(_logits(5.0))
    with pytest.raises(CanaryFailed, match="trainer and replica1 differ"):
        Canary(CanaryConfig(), SEQUENCES).check(_trainer(0), {"replica0": right, "replica1": wrong}, version=3)
