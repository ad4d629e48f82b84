"""What a served model weighs, how vLLM may split it, and what is left for its KV cache."""

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.export import export_table
from bridge.serving import tensor_parallel_faults
from rl_jax.config import ConfigError
from rl_jax.models.architecture import Architecture
from rl_jax.models.fp8_rule import Format
from rl_jax.models.schema import num_active_params, num_params
from rl_jax.plan.cache import HeadCache, LatentCache
from rl_jax.plan.kv_budget import GIB, kv_budget, layouts, serving_faults
from rl_jax.plan.sampler_config import ServingConfig
from rl_jax.plan.served import LatentModelConfig, ServedModel, latent_model, served_model

MOE = Architecture(
    vocab_size=640, width=256, num_layers=3, num_heads=8, num_kv_heads=4, head_width=128, num_experts=6,
    num_active_experts=2, expert_width=384, tie_embeddings=False,
)  # fmt: skip
DENSE = Architecture(
    family="qwen3", vocab_size=330, width=130, num_layers=2, num_heads=6, num_kv_heads=2, head_width=64, mlp_width=512
)
RAGGED = replace(MOE, num_kv_heads=1, num_heads=3, head_width=96, expert_width=200, shared_expert_width=256)
QWEN_30B = Architecture(
    vocab_size=151936, width=2048, num_layers=48, num_heads=32, num_kv_heads=4, head_width=128, num_experts=128,
    num_active_experts=8, expert_width=768, tie_embeddings=False, max_positions=262144,
)  # fmt: skip
QWEN_235B = replace(QWEN_30B, width=4096, num_layers=94, num_heads=64, expert_width=1536)
GLM_5 = LatentModelConfig(
    name="GLM-5", width=6144, num_layers=78, num_dense_layers=3, num_heads=64, vocab_size=154880, mlp_width=12288,
    num_experts=256, num_active_experts=8, expert_width=2048, query_rank=2048, plain_width=192, value_width=256,
    index_heads=32, max_positions=202752,
)  # fmt: skip
DEEPSEEK_V3 = LatentModelConfig(
    name="DeepSeek-V3", width=7168, num_layers=61, num_dense_layers=3, num_heads=128, vocab_size=129280,
    mlp_width=18432, num_experts=256, num_active_experts=8, expert_width=2048, query_rank=1536, plain_width=128,
    value_width=128, max_positions=163840,
)  # fmt: skip
ONE = ServingConfig(tensor=1)


@pytest.mark.parametrize("fmt", ["bf16", "fp8-block", "fp8-channel"])
@pytest.mark.parametrize("arch", [MOE, DENSE, RAGGED], ids=["moe", "dense", "ragged"])
def test_a_served_model_weighs_what_its_export_weighs(arch: Architecture, fmt: Format):
    model = served_model(arch, fmt)
    assert model.nbytes == sum(tensor.nbytes for tensor in export_table(arch, fmt))
    assert model.num_params == num_params(arch)
    assert model.num_active_params == num_active_params(arch)


@pytest.mark.parametrize(
    ("model", "billions", "active"),  # as their makers publish them; 3.3 of Qwen3-30B-A3B less the embedding
    [
        (served_model(QWEN_30B, "bf16"), 30.5, 3.0),
        (served_model(QWEN_235B, "bf16"), 235, 22),
        (latent_model(GLM_5, "fp8-block"), 744, 40),
        (latent_model(DEEPSEEK_V3, "fp8-block"), 671, 37),
    ],
)
def test_published_models_have_their_published_sizes(model: ServedModel, billions: float, active: float):
    assert model.num_params / 1e9 == pytest.approx(billions, rel=0.003)
    assert model.num_active_params / 1e9 == pytest.approx(active, rel=0.03)  # makers round, some count the embedding


def bytes_by_hand(arch: Architecture, tensor: int, data: int, is_expert_parallel: bool) -> float:
    """Give each tensor of an FP8 export to the first GPU of a replica, as vLLM does, and add up what it gets."""
    num_gpus, total = tensor * data, 0.0
    for one in export_table(arch, "fp8-block"):
        if ".experts." in one.name:
            if is_expert_parallel:
                mine = -(-arch.num_experts // num_gpus)
                total += one.nbytes * (int(one.name.split(".experts.")[1].split(".")[0]) < mine)
            else:
                total += one.nbytes / num_gpus
        elif any(part in one.name for part in ("k_proj", "v_proj")):
            total += one.nbytes / min(tensor, arch.num_kv_heads)
        elif any(part in one.name for part in ("q_proj", "o_proj", "_proj.", "embed_tokens", "lm_head")):
            total += one.nbytes / tensor
        else:
            total += one.nbytes
    return total


@pytest.mark.parametrize(
    ("tensor", "data", "is_expert_parallel"), [(1, 1, False), (2, 1, False), (3, 1, False), (1, 4, True), (2, 2, True)]
)
def test_weights_of_a_gpu_are_those_that_it_is_given(tensor: int, data: int, is_expert_parallel: bool):
    arch = replace(MOE, num_heads=12, shared_expert_width=384)
    serving = ServingConfig(tensor=tensor, data=data, expert_parallel=is_expert_parallel)
    budget = kv_budget(served_model(arch, "fp8-block"), serving)
    assert budget.weight_bytes == round(bytes_by_hand(arch, tensor, data, is_expert_parallel))


def legal(model: ServedModel, is_expert_parallel: bool = False) -> list[int]:
    serving = replace(ONE, max_len=1, expert_parallel=is_expert_parallel)
    return [n for n in range(1, 129) if not serving_faults(model, replace(serving, tensor=n))]


@pytest.mark.parametrize(
    ("model", "sizes", "with_expert_parallel"),
    [
        # Widths of experts: 768 and 1536 have 6 and 12 blocks; vLLM repeats 4 key/value heads.
        (served_model(QWEN_30B, "fp8-block"), [1, 2], [1, 2, 4, 8, 16, 32]),
        (served_model(QWEN_235B, "fp8-block"), [1, 2, 4], [1, 2, 4, 8, 16, 32, 64]),
        (served_model(QWEN_235B, "bf16"), [1, 2, 4, 8, 16, 32, 64], [1, 2, 4, 8, 16, 32, 64]),
        (latent_model(GLM_5, "fp8-block"), [1, 2, 4, 8, 16], [1, 2, 4, 8, 16]),
        (latent_model(DEEPSEEK_V3, "fp8-block"), [1, 2, 4, 8, 16], [1, 2, 4, 8, 16]),
    ],
)
def test_legal_tensor_sizes(model: ServedModel, sizes: list[int], with_expert_parallel: list[int]):
    assert legal(model) == sizes
    assert legal(model, is_expert_parallel=True) == with_expert_parallel


@settings(max_examples=40)
@given(
    heads=st.sampled_from([(4, 1), (8, 2), (12, 4), (32, 8)]),
    head_width=st.sampled_from([64, 128]),
    blocks=st.integers(1, 9),
    tensor=st.integers(1, 16),
    fmt=st.sampled_from(["bf16", "fp8-block", "fp8-channel"]),
)
def test_what_the_planner_allows_the_bridge_allows(
    heads: tuple[int, int], head_width: int, blocks: int, tensor: int, fmt: Format
):
    arch = replace(
        MOE, num_heads=heads[0], num_kv_heads=heads[1], head_width=head_width, expert_width=128 * blocks, width=384
    )
    ours = serving_faults(served_model(arch, fmt), replace(ONE, tensor=tensor, max_len=1, format=fmt))
    theirs = tensor_parallel_faults(arch, fmt, tensor)
    if not ours:
        assert not theirs
    if fmt == "fp8-block" and not (heads[1] % tensor and tensor % heads[1]):
        assert bool(ours) == bool(theirs)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            {"tensor": 4},
            r"tensor=4: .*experts\.\*\.gate_proj\.weight has 768 rows, 192 a GPU.*128.*tensor=2.*expert_par",
        ),
        ({"tensor": 6}, r"tensor=6: must divide num_heads=32.*tensor=2"),
        ({"tensor": 2, "data": 4}, r"tensor\*data=8: .*has 768 rows, 96 a GPU"),
        ({"tensor": 64, "expert_parallel": True}, r"tensor=64: must divide num_heads=32; try tensor=32"),
        ({"data": 512, "expert_parallel": True}, r"tensor\*data=512: .*at most num_experts=128"),
        ({"max_len": 300_000}, r"max_len=300000: the model has max_positions=262144"),
    ],
)
def test_an_illegal_layout_is_named_with_what_would_be_legal(change: dict, expected: str):
    faults = serving_faults(served_model(QWEN_30B, "fp8-block"), replace(ONE, **change))
    assert faults
    assert re.search(expected, faults[0])


def test_bytes_of_a_token():
    heads = HeadCache(num_layers=94, num_heads=64, num_kv_heads=4, head_width=128)
    assert heads.token_bytes(1, "bf16") == 192_512
    assert heads.token_bytes(2, "fp8") == 192_512 // 4
    assert heads.token_bytes(8, "bf16") == heads.token_bytes(4, "bf16") == 192_512 // 4
    latent = LatentCache(num_layers=61, num_heads=128, latent_width=512, rope_width=64)
    assert latent.token_bytes(8, "bf16") == 61 * 1152
    sparse = replace(latent, num_layers=78, num_heads=64, num_index_layers=78, index_heads=32)
    assert sparse.token_bytes(1, "fp8") == 78 * (656 + 132)


def test_a_budget_by_hand():
    arch = replace(QWEN_30B, max_positions=4096)
    serving = replace(
        ONE, max_len=4000, block_size=48, max_num_seqs=7, activation_reserve_gib=2.0, other_reserve_gib=1.0
    )
    budget = kv_budget(served_model(arch, "bf16"), serving)
    free = int(151_397_597_184 * 0.9) - 2 * num_params(arch) - 3 * GIB
    blocks = free // (48 * 98_304)
    assert budget.free_bytes == free
    assert budget.tokens == 48 * blocks
    assert budget.concurrency(4000) == 7  # of max_num_seqs; 84 blocks each would leave room for more
    assert replace(budget, max_num_seqs=10_000).concurrency(4000) == blocks // 84
    assert budget.missing_bytes(4000) == 0


@settings(max_examples=40)
@given(length=st.integers(1, 400_000), memory=st.floats(0.2, 1.0), block=st.integers(1, 200), data=st.integers(1, 3))
def test_a_sequence_that_misses_nothing_fits(length: int, memory: float, block: int, data: int):
    serving = replace(ONE, memory_utilization=memory, block_size=block, data=data, expert_parallel=data > 1)
    budget = kv_budget(served_model(QWEN_30B, "fp8-block"), serving)
    assert (budget.missing_bytes(length) == 0) == (budget.concurrency(length) >= 1)
    grown = replace(budget, usable_bytes=budget.usable_bytes + budget.missing_bytes(length))
    assert grown.concurrency(length) >= data
    assert budget.concurrency(length) * length <= budget.tokens


def test_the_best_layouts_are_legal_and_hold_more_on_more_gpus():
    model = latent_model(GLM_5, "fp8-block")
    found = layouts(model, replace(ONE, kv_dtype="fp8", block_size=64))
    assert [layout.serving.num_gpus for layout in found] == [1, 2, 4, 8, 16, 32, 64, 128]
    assert [layout.fits for layout in found] == [False, False, False, True, True, True, True, True]
    tokens = [layout.budget.tokens for layout in found]
    assert tokens == sorted(tokens)
    # Experts alone are 725 GB: what four GPUs lack is at least the rest of that.
    assert found[2].budget.missing_bytes(1) > 725e9 / 4 - 0.9 * 151.4e9
    for layout in found:
        assert not serving_faults(model, layout.serving)
    # With less memory ranks of two GPUs hold more tokens in all, but none of them a whole sequence.
    tight = layouts(model, replace(ONE, kv_dtype="fp8", block_size=64, memory_utilization=0.75, max_batched_tokens=96))
    assert (tight[3].serving.tensor, tight[3].serving.data, tight[3].fits) == (4, 2, True)


def test_impossible_numbers_are_refused_together():
    with pytest.raises(ConfigError) as error:
        ServingConfig(tensor=0, memory_utilization=1.2, max_len=-1, prefill_gpus=2, prefill_servers=3)
    assert [fault.split("=")[0] for fault in error.value.faults] == [
        "tensor", "max_len", "memory_utilization", "prefill_servers",
    ]  # fmt: skip
    with pytest.raises(ConfigError, match=r"num_active_experts=9: must be at most num_experts=8"):
        replace(GLM_5, num_experts=8, num_active_experts=9)
