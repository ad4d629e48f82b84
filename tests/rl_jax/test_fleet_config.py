"""`[sampler]`: embedded without a type, a fleet with type "vllm"; what does not fit is refused by dotted key."""

import sys
from pathlib import Path

import pytest

from rl_jax.cli import RunConfig, check
from rl_jax.config import ConfigError, load, to_toml
from rl_jax.engine.config import EngineConfig
from rl_jax.rollout.fleet_config import FleetConfig

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = {name: ROOT / "configs" / f"{name}.toml" for name in ("reverse_text_vllm", "reverse_text_vllm_fp8")}
HERE = f"sampler.server.python={sys.executable}"


def test_without_a_type_the_sampler_is_the_embedded_one():
    config = load(RunConfig, [ROOT / "configs" / "reverse_text.toml"])
    assert isinstance(config.sampler, EngineConfig)
    assert config.sampler.slot_buckets == (8, 64)
    with pytest.raises(ConfigError, match=r"sampler\.urls: unknown key"):
        load(RunConfig, [ROOT / "configs" / "reverse_text.toml"], ['sampler.urls=["http://a:1"]'])


@pytest.mark.parametrize("name", CONFIGS)
def test_a_fleet_is_read_and_written_back(name: str, tmp_path: Path):
    config = load(RunConfig, [CONFIGS[name]], [HERE])
    assert isinstance(config.sampler, FleetConfig)
    check(config, config.model.resolve(), "rl")
    copy = tmp_path / "config.toml"
    copy.write_text(to_toml(config))
    assert load(RunConfig, [copy]) == config


def test_the_demo_with_a_fleet_is_the_demo():
    demo = load(RunConfig, [ROOT / "configs" / "reverse_text.toml"])
    with_fleet = load(RunConfig, [CONFIGS["reverse_text_vllm"]])
    for section in ("model", "envs", "episode", "orchestrator", "loss", "advantage", "optim", "sft", "packing"):
        assert getattr(with_fleet, section) == getattr(demo, section)
    assert with_fleet.sampler.max_len == demo.sampler.max_len


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("sampler.server.python=/no/such/python", "sampler.server.python='/no/such/python': no such file; make fleet"),
        ("sampler.max_len=65", "sampler.max_len=65: a rollout must fit in a row of packing.seq_len=64"),
        ("episode.max_tokens=32", "episode.max_tokens=32: leaves no room for a prompt in sampler.max_len=32"),
        (
            "sampler.format=fp8-block",
            "sampler.format='fp8-block': vLLM stacks q, k, v: [128, 64] rows of q and k are no multiples of 128",
        ),
        ("episode.return_routed_experts=true", "episode.return_routed_experts=true: servers need --enable-return"),
    ],
)
def test_what_does_not_fit_is_refused(setting: str, expected: str):
    config = load(RunConfig, [CONFIGS["reverse_text_vllm"]], [HERE, setting])
    with pytest.raises(ConfigError) as caught:
        check(config, config.model.resolve(), "rl")
    (fault,) = caught.value.faults
    assert fault.startswith(expected)


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("sampler.format=fp4", "sampler.format='fp4': expected one of 'float32', 'bf16', 'fp8-block', 'fp8-channel'"),
        ('sampler.urls=["10.0.0.7:8000"]', "sampler.urls='10.0.0.7:8000': expected http://host:port without a path"),
        ('sampler.urls=["http://a:1/v1"]', "sampler.urls='http://a:1/v1': expected http://host:port without a path"),
        ('sampler.urls=["http://a:99999"]', "sampler.urls='http://a:99999': expected http://host:port"),
        ('sampler.urls=["http://"]', "sampler.urls='http://': expected http://host:port"),
        ('sampler.urls=["http://a:1","http://a:1"]', "sampler.urls=['http://a:1', 'http://a:1']: names a server twice"),
        ("sampler.dtype=bfloat16", "sampler.dtype='bfloat16': format='float32' keeps 24 bits"),
        ("sampler.max_running=0", "sampler.max_running=0: must be at least 1"),
        ("sampler.poll_s=0.0", "sampler.poll_s=0.0: must be positive and finite"),
        ("sampler.server.count=0", "sampler.server.count=0: must be at least 1"),
        (
            'sampler.server.args=["--logprobs-mode=raw_logprobs"]',
            "sampler.server.args=['--logprobs-mode=raw_logprobs']: --logprobs-mode is said by the run",
        ),
        ("sampler.num_slots=4", "sampler.num_slots: unknown key"),
    ],
)
def test_a_value_that_cannot_be_is_refused(setting: str, expected: str):
    with pytest.raises(ConfigError) as caught:
        load(RunConfig, [CONFIGS["reverse_text_vllm"]], [setting])
    (fault,) = caught.value.faults
    assert fault.startswith(expected)
