"""The roofline of decode and prefill against products by hand."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_jax.models.architecture import Architecture
from rl_jax.models.schema import num_params
from rl_jax.plan.sampler_config import ServingConfig
from rl_jax.plan.served import LatentModelConfig, latent_model, served_model
from rl_jax.plan.speed import Speed

DENSE = Architecture(
    family="qwen3", vocab_size=32000, width=4096, num_layers=31, num_heads=32, num_kv_heads=8, head_width=128,
    mlp_width=11008, tie_embeddings=False,
)  # fmt: skip
MOE = Architecture(
    vocab_size=32000, width=2048, num_layers=24, num_heads=16, num_kv_heads=4, head_width=128, num_experts=64,
    num_active_experts=4, expert_width=1024, tie_embeddings=False,
)  # fmt: skip
IDEAL = ServingConfig(
    format="bf16", tensor=1, memory_frac=1.0, compute_frac=1.0, network_frac=1.0, layer_overhead_us=0.0
)


def test_one_sequence_reads_the_weights_and_its_cache():
    step = Speed(served_model(DENSE, "bf16"), IDEAL).step(1, 5000)
    read = 2 * (num_params(DENSE) - 32000 * 4096)  # all but the embedding, bf16
    assert step.linear_s == pytest.approx(read / 4.8e12)
    assert step.attention_s == pytest.approx(5000 * 2 * 31 * 8 * 128 * 2 / 4.8e12)
    assert (step.overhead_s, step.links_s) == (0, 0)


def test_many_sequences_are_bound_by_compute():
    num = 5000
    step = Speed(served_model(DENSE, "bf16"), IDEAL).step(num, 0)
    assert step.linear_s == pytest.approx(2 * num * (num_params(DENSE) - 32000 * 4096) / 989e12)


def test_experts_are_read_if_a_token_chose_them():
    speed = Speed(served_model(MOE, "bf16"), IDEAL)
    experts = 24 * 64 * 3 * 2048 * 1024
    rest = num_params(MOE) - experts - 32000 * 2048
    assert speed.step(1, 0).linear_s == pytest.approx(2 * (rest + experts * 4 / 64) / 4.8e12)
    assert speed.step(2, 0).linear_s == pytest.approx(2 * (rest + experts * (1 - (60 / 64) ** 2)) / 4.8e12)
    assert speed.step(300, 0).linear_s == pytest.approx(2 * (rest + experts) / 4.8e12, rel=1e-6)


def test_links_carry_activations():
    model = served_model(MOE, "bf16")
    sharded = Speed(model, replace(IDEAL, tensor=4)).step(10, 0)
    assert sharded.links_s == pytest.approx(2 * 24 * (2 * 3 / 4) * 2 * 2048 * 10 / 450e9)
    spread = Speed(model, replace(IDEAL, data=16, expert_parallel=True)).step(160, 0)  # two nodes: the network
    assert spread.links_s == pytest.approx(24 * 10 * 4 * 2048 * 3 * 15 / 16 / 50e9)


def test_data_parallel_ranks_share_the_contexts():
    model = served_model(MOE, "bf16")
    one = Speed(model, IDEAL).step(1, 7000).attention_s
    assert Speed(model, replace(IDEAL, data=4, expert_parallel=True)).step(4, 28000).attention_s == pytest.approx(one)


def test_sparse_attention_reads_the_indexer_everywhere_and_latents_of_the_best():
    config = LatentModelConfig(
        name="x", width=1024, num_layers=5, num_heads=16, vocab_size=1000, mlp_width=64, num_experts=8,
        num_active_experts=2, expert_width=128, query_rank=256, plain_width=64, value_width=64, index_heads=4,
        index_top=2048, num_index_layers=3, max_positions=10**6,
    )  # fmt: skip
    speed = Speed(latent_model(config, "fp8-block"), replace(IDEAL, format="fp8-block", kv_dtype="fp8"))
    assert speed.step(2, 90_000).attention_s == pytest.approx((90_000 * 3 * 132 + 2 * 2048 * 5 * 656) / 4.8e12)


def test_prefill_is_bound_by_flops():
    speed = Speed(served_model(DENSE, "bf16"), replace(IDEAL, tensor=2))
    weights = num_params(DENSE) - 32000 * 4096
    attention = 4 * 31 * 32 * 128 * 1000 * (3000 + 500)
    assert speed.prefill_s(1000, 3000) == pytest.approx((2 * 1000 * weights + attention) / 989e12 / 2)
    apart = Speed(served_model(DENSE, "bf16"), replace(IDEAL, prefill_gpus=12, prefill_servers=3))
    assert apart.prefill_s(1000, 3000) == pytest.approx(speed.prefill_s(1000, 3000) / 2)


def test_training_is_three_forward_passes():
    speed = Speed(served_model(DENSE, "bf16"), IDEAL)
    weights = num_params(DENSE) - 32000 * 4096
    assert speed.training_flops(1e6, 0.0) == pytest.approx(6e6 * weights)
    assert speed.training_flops(1e6, 8000.0) == pytest.approx(6e6 * weights + 3e6 * 4 * 31 * 32 * 128 * 4000)


@settings(max_examples=40)
@given(
    num=st.integers(1, 2000),
    context=st.floats(0, 1e8),
    tensor=st.sampled_from([1, 2, 4]),
    data=st.integers(1, 8),
)
def test_more_work_takes_longer(num: int, context: float, tensor: int, data: int):
    serving = ServingConfig(tensor=tensor, data=data, expert_parallel=True)
    speed = Speed(served_model(MOE, "fp8-block"), serving)
    step = speed.step(num, context)
    assert speed.base_s(num) + speed.token_s * context == pytest.approx(step.total_s)
    assert speed.step(num + 1, context).total_s >= step.total_s
    assert speed.step(num, context + 1000).total_s > step.total_s
    assert speed.base_s(num + 1) / (num + 1) < speed.base_s(num) / num  # batching pays
