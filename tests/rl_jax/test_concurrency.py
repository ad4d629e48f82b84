"""orchestrator/concurrency.py: each rule of the cap, and that it settles."""

import pytest

from rl_jax.orchestrator.concurrency import Concurrency, ConcurrencyConfig
from rl_jax.sampler import SamplerHealth


def health(kv=0.3, running=8, waiting=0, preemptions=0, max_running=16):
    return SamplerHealth(
        version=0,
        num_running=running,
        num_waiting=waiting,
        max_running=max_running,
        kv_used_frac=kv,
        num_sampled_tokens=0,
        num_prompt_tokens=0,
        num_cached_tokens=0,
        busy_s=0.0,
        num_preemptions=preemptions,
    )


def make(initial=20, **config):
    return Concurrency(ConcurrencyConfig(initial_inflight=initial, **config), health())


def test_starts_with_a_queue_of_half_of_what_runs():
    assert Concurrency(ConcurrencyConfig(), health(max_running=16)).cap == 24
    assert Concurrency(ConcurrencyConfig(max_inflight=10), health(max_running=16)).cap == 10


@pytest.mark.parametrize(
    ("state", "landed", "is_limiting", "expected"),
    [
        (health(kv=0.5), 20, True, 25),
        (health(kv=0.5), 19, True, 20),  # not all that were in flight are replaced
        (health(kv=0.5), 20, False, 20),  # it was not the cap that held work back
        (health(kv=0.7), 20, True, 20),
        (health(kv=0.5, waiting=5), 20, True, 20),
        (health(kv=0.875), 20, True, 16),
        (health(preemptions=1), 20, True, 16),
    ],
)
def test_one_update(state, landed, is_limiting, expected):
    concurrency = make()
    concurrency.count_landed(landed)
    concurrency.update(state, 20, is_limiting)
    assert concurrency.cap == expected


def test_crowd_of_six_polls_shrinks_the_cap():
    concurrency = make()
    caps = []
    for _ in range(7):
        concurrency.update(health(waiting=5), 20, False)
        caps.append(concurrency.cap)
    assert caps == [20, 20, 20, 20, 20, 18, 18]


def test_no_second_cut_before_the_first_took_effect():
    concurrency = make()
    concurrency.update(health(preemptions=1), 20, False)
    concurrency.update(health(preemptions=2), 20, False)
    assert concurrency.cap == 16
    concurrency.update(health(preemptions=3), 16, False)
    assert concurrency.cap == 12


def test_settles_where_the_cache_is_about_full():
    concurrency = make(initial=4, max_inflight=500)
    for _ in range(200):  # a cache that 100 rollouts fill
        concurrency.count_landed(concurrency.cap)
        concurrency.update(health(kv=min(concurrency.cap / 100, 1.0)), concurrency.cap, True)
    assert 60 <= concurrency.cap <= 80


def test_bounds_hold():
    concurrency = make(initial=8, min_inflight=7, max_inflight=9)
    for preemptions in range(1, 5):
        concurrency.update(health(preemptions=preemptions), 0, True)
    assert concurrency.cap == 7
    for _ in range(5):
        concurrency.count_landed(100)
        concurrency.update(health(preemptions=4), 0, True)
    assert concurrency.cap == 9


@pytest.mark.parametrize(
    "fields", [{"min_inflight": 0}, {"max_inflight": 0}, {"initial_inflight": 2000}, {"poll_s": 0.0}]
)
def test_config_refuses(fields):
    with pytest.raises(ValueError, match=next(iter(fields))):
        ConcurrencyConfig(**fields)
