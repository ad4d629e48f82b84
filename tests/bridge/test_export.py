"""bridge/export.py: the table against the names of the hub, config.json field by field, live weights against files."""

import dataclasses
import itertools

import ml_dtypes
import numpy as np
import pytest
from references import DENSE, MOE, draw_params, hf_matrices, reference_quantise

from bridge.export import export_arrays, export_config, export_table, ignore_list
from bridge.fp8 import NonFiniteWeight
from bridge.names import hf_shapes
from bridge.serving import tensor_parallel_faults
from rl_jax.axes import spec
from rl_jax.config import ConfigError
from rl_jax.mesh import MeshConfig, make_mesh, to_mesh
from rl_jax.models.architecture import Architecture, to_hf_config
from rl_jax.models.fp8_rule import FORMATS, Format
from rl_jax.models.schema import flat_table, nested


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("arch", [DENSE, MOE])
def test_weights_are_those_of_the_hub_and_each_scale_follows_its_weight(arch: Architecture, fmt: Format):
    table = export_table(arch, fmt)
    assert {t.name: t.shape for t in table if t.role == "weight"} == hf_shapes(arch)
    for before, tensor in itertools.pairwise(table):
        assert (tensor.role == "scale") == (before.dtype == "F8_E4M3")
        if tensor.role == "scale":
            rows, columns = before.shape
            expected = (-(-rows // 128), -(-columns // 128)) if fmt == "fp8-block" else (rows, 1)
            suffix = "_scale_inv" if fmt == "fp8-block" else "_scale"
            assert (tensor.name, tensor.dtype, tensor.shape) == (before.name + suffix, "F32", expected)
            assert (tensor.param, tensor.index) == (before.param, before.index)


def test_a_moe_keeps_gates_embeddings_and_head_and_nothing_else():
    expected = ["model.embed_tokens", *(f"model.layers.{i}.mlp.gate" for i in range(2)), "lm_head"]
    for fmt in ("fp8-block", "fp8-channel"):
        assert sorted(ignore_list(MOE, fmt)) == sorted(expected)


def test_stacked_matrices_without_whole_blocks_stay_bf16_all_of_them():
    in_fp8 = {t.param.removeprefix("layers/") for t in export_table(DENSE, "fp8-block") if t.dtype == "F8_E4M3"}
    assert in_fp8 == {"wo_LKQHD", "down_LFD"}
    ignored = ignore_list(DENSE, "fp8-block")
    for module in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
        assert f"model.layers.2.{module}" in ignored
    assert "lm_head" in ignored  # tied: no tensor, but a module
    narrow = dataclasses.replace(MOE, expert_width=136)
    assert f"model.layers.1.mlp.experts.{2}.down_proj" in ignore_list(narrow, "fp8-block")
    assert not [name for name in ignore_list(narrow, "fp8-channel") if "experts" in name]


@pytest.mark.parametrize("fmt", FORMATS)
def test_config_carries_every_field_of_its_source(fmt: Format):
    source = to_hf_config(MOE) | {
        "torch_dtype": "float16",
        "x": {"y": [1]},
        "quantization_config": {"quant_method": "fp8"},
    }
    config = export_config(MOE, fmt, source)
    kept = {key: value for key, value in source.items() if key not in ("torch_dtype", "quantization_config")}
    assert {key: config[key] for key in kept} == kept
    assert config["dtype"] == ("float32" if fmt == "float32" else "bfloat16")
    new = {"dtype"} | ({"quantization_config"} if fmt.startswith("fp8") else set())
    assert config.keys() == kept.keys() | new


def test_the_quantization_config_says_what_the_tensors_are():
    block = export_config(MOE, "fp8-block")["quantization_config"]
    assert block == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "scale_fmt": "ue8m0",
        "modules_to_not_convert": ignore_list(MOE, "fp8-block"),
    }
    channel = export_config(MOE, "fp8-channel")["quantization_config"]
    assert isinstance(channel, dict)
    assert (channel["quant_method"], channel["format"]) == ("compressed-tensors", "float-quantized")
    assert channel["config_groups"]["group_0"]["weights"]["strategy"] == "channel"
    assert channel["ignore"] == ignore_list(MOE, "fp8-channel")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"architectures": None}, "architectures=None: vLLM chooses the model class by it"),
        ({"hidden_size": None}, "hidden_size=None"),
        ({"num_hidden_layers": 3}, "num_layers=3, the checkpoint has 2"),
        ({"model_type": "gpt2"}, "model_type='gpt2'"),
    ],
)
def test_a_source_that_does_not_fit_is_refused(change: dict, expected: str):
    source = {key: value for key, value in (to_hf_config(MOE) | change).items() if value is not None}
    with pytest.raises(ConfigError, match=expected):
        export_config(MOE, "bf16", source)


@pytest.mark.parametrize(
    ("arch", "fmt"), [(MOE, "fp8-block"), (MOE, "fp8-channel"), (DENSE, "fp8-block"), (DENSE, "bf16")]
)
def test_live_weights_become_the_reference_bytes(arch: Architecture, fmt: Format):
    params = draw_params(arch)
    made = dict(export_arrays(arch, nested(params), fmt))
    assert tuple(made) == export_table(arch, fmt)
    expected = hf_matrices(arch, params)
    for tensor, array in made.items():
        assert (array.shape, array.dtype) == (tensor.shape, _dtype(tensor.dtype)), tensor
        if tensor.role == "weight" and tensor.dtype != "F8_E4M3":
            np.testing.assert_array_equal(array, expected[tensor.name].astype(array.dtype), err_msg=tensor.name)
        if tensor.dtype == "F8_E4M3":
            block = (128, 128) if fmt == "fp8-block" else (1, tensor.shape[1])
            codes, scale = reference_quantise(expected[tensor.name], *block)
            np.testing.assert_array_equal(array.view(np.uint8), codes, err_msg=tensor.name)
            suffix = "_scale_inv" if fmt == "fp8-block" else "_scale"
            np.testing.assert_array_equal(next(a for t, a in made.items() if t.name == tensor.name + suffix), scale)


@pytest.mark.parametrize("mesh", [MeshConfig(fsdp=2, tensor=2), MeshConfig(expert=3)])
@pytest.mark.parametrize("fmt", ["fp8-block"])
def test_a_mesh_changes_no_byte(mesh: MeshConfig, fmt: Format):
    arch = dataclasses.replace(MOE, vocab_size=40)
    params = draw_params(arch)
    devices = make_mesh(mesh)
    table = flat_table(arch)
    sharded = {key: to_mesh(value, devices, spec(table[key].axes)) for key, value in params.items()}
    whole = {t.name: a.tobytes() for t, a in export_arrays(arch, nested(params), fmt)}
    assert {t.name: a.tobytes() for t, a in export_arrays(arch, nested(sharded), fmt)} == whole


@pytest.mark.parametrize("key", ["layers/up_LEDF", "final_norm_D", "layers/router_LDE"])
def test_a_weight_that_is_not_finite_is_named(key: str):
    params = {k: v.copy() for k, v in draw_params(MOE).items()}
    params[key].flat[-1] = np.nan
    names = {
        "layers/up_LEDF": "model.layers.1.mlp.experts.2.up_proj.weight",
        "final_norm_D": "model.norm.weight",
        "layers/router_LDE": "model.layers.1.mlp.gate.weight",
    }
    with pytest.raises(NonFiniteWeight, match=names[key].replace(".", r"\.")):
        list(export_arrays(MOE, nested(params), "fp8-block"))


def test_tensor_parallel_shares_must_be_whole_blocks():
    arch = dataclasses.replace(MOE, width=256, num_heads=16, num_kv_heads=8, head_width=64, expert_width=768)
    assert tensor_parallel_faults(arch, "fp8-block", 2) == []
    faults = "\n".join(tensor_parallel_faults(arch, "fp8-block", 4))
    assert "mlp.experts.*.gate_proj.weight has 768" in faults
    assert "at most 2" in faults
    assert tensor_parallel_faults(arch, "fp8-channel", 4) == []


def _dtype(word: str) -> np.dtype:
    words = {"F32": np.float32, "BF16": ml_dtypes.bfloat16, "F8_E4M3": ml_dtypes.float8_e4m3fn}
    return np.dtype(words[word])
