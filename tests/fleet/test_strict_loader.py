"""What vLLM's own loader accepts in silence and the strict one refuses, and log-probabilities of FP8 against the twin."""

from pathlib import Path

import pytest
import torch
from tiny_checkpoints import (
    QWEN3_MOE_FP8,
    Tensors,
    dequantised,
    quantisation_config,
    quantised,
    read_folder,
    write_folder,
)

from bridge.vllm_plugin.offline import Scorer

PROMPTS = [[(7 * i + 3 * j) % 323 for i in range(40 + j)] for j in range(3)]
EXPERT = "model.layers.1.mlp.experts.3.down_proj.weight"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return QWEN3_MOE_FP8.save(tmp_path_factory.mktemp("plain"))


def without_expert(tensors: Tensors) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if name != EXPERT}


def without_scale(tensors: Tensors) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if name != f"{EXPERT}_scale_inv"}


def without_fused_scale(tensors: Tensors) -> Tensors:
    return {name: t for name, t in tensors.items() if name != "model.layers.0.self_attn.k_proj.weight_scale_inv"}


def with_nan(tensors: Tensors) -> Tensors:
    codes = tensors[EXPERT].clone()
    codes.view(torch.uint8)[5, 7] = 0xFF
    return tensors | {EXPERT: codes}


CORRUPTIONS = [
    (without_expert, r"experts.*w2_weight \[5, 256, 384\]: 98304 of 491520 elements"),
    (without_scale, r"experts.*w2_weight_scale_inv \[5, 2, 3\]: 6 of 30 elements"),
    (without_fused_scale, r"qkv_proj.weight_scale_inv \[4, 2\]: 2 of 8 elements"),
    (with_nan, r"w2_weight \[5, 256, 384\]: 1 of 491520 elements"),
]


@pytest.mark.parametrize(("corrupt", "message"), CORRUPTIONS, ids=[c.__name__ for c, _ in CORRUPTIONS])
def test_a_checkpoint_with_something_missing_is_refused(plain: Path, tmp_path: Path, corrupt, message: str):
    tensors = quantised(read_folder(plain), block=True)
    folder = write_folder(plain, tmp_path / "model", corrupt(tensors), quantisation_config(tensors, block=True))
    with pytest.raises(ValueError, match=message), Scorer(folder, max_len=64):
        pass


def test_a_gate_that_the_ignore_list_forgets_is_refused(plain: Path, tmp_path: Path):
    tensors = quantised(read_folder(plain), block=True)
    config = quantisation_config(tensors, block=True) | {"modules_to_not_convert": ["lm_head"]}
    folder = write_folder(plain, tmp_path / "model", tensors, config)
    with pytest.raises(ValueError, match=r"mlp.gate.weight_scale_inv"), Scorer(folder, max_len=64):
        pass


@pytest.mark.parametrize("block", [True, False], ids=["block", "channel"])
def test_fp8_has_the_log_probabilities_of_its_twin(plain: Path, tmp_path: Path, block: bool):
    tensors = quantised(read_folder(plain), block)
    fp8 = write_folder(plain, tmp_path / "fp8", tensors, quantisation_config(tensors, block))
    twin = write_folder(plain, tmp_path / "twin", dequantised(tensors), None)
    scores = {}
    for name, folder, options in (
        ("exact", fp8, {}),
        ("fp8", fp8, {"additional_config": {}}),
        ("twin", twin, {}),
    ):
        with Scorer(folder, max_len=64, **options) as scorer:
            scores[name] = torch.tensor([one for prompt in scorer.prompt_logprobs(PROMPTS) for one in prompt])
    assert (scores["exact"] - scores["twin"]).abs().max() < 2e-5
    quantised_activations = (scores["fp8"] - scores["twin"]).abs().mean()
    assert 1e-4 < quantised_activations < 0.5, "W8A8 must differ, by what rounding of activations costs"


def test_a_wrong_word_for_activations_is_refused(plain: Path, tmp_path: Path):
    tensors = quantised(read_folder(plain), block=True)
    folder = write_folder(plain, tmp_path / "fp8", tensors, quantisation_config(tensors, block=True))
    options = {"additional_config": {"rl_jax_activations": "exactly"}}
    with pytest.raises(ValueError, match=r"'exactly'; expected \"fp8\" or \"exact\""), Scorer(folder, 64, **options):
        pass
