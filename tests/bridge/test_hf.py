"""bridge/hf.py and bridge/names.py against hand-built safetensors."""

import json
import re

import jax
import numpy as np
import pytest
from flax import traverse_util
from safetensors.numpy import load_file, save_file

from bridge.hf import load_params, save_params
from bridge.names import from_hf, hf_shapes, hf_slices, to_hf
from rl_jax.config import ConfigError
from rl_jax.mesh import MeshConfig, make_mesh
from rl_jax.models.architecture import Architecture, Rope, from_hf_config, read_architecture, to_hf_config
from rl_jax.models.schema import flat_table, init_params, num_params

DENSE = Architecture(
    family="llama",
    vocab_size=11,
    width=6,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_width=8,
    mlp_width=10,
    qk_norm=False,
    attention_bias=True,
    tie_embeddings=False,
)
MOE = Architecture(
    vocab_size=12,
    width=8,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_width=4,
    num_experts=6,
    num_active_experts=2,
    expert_width=10,
    rope=Rope(type="yarn", factor=4.0, original_max_position=64, theta=5e5),
)


def _tensors(arch: Architecture) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in hf_shapes(arch).items()}


def _write(directory, arch, tensors, num_files=1):
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(to_hf_config(arch)))
    names = sorted(tensors)
    weight_map = {}
    for i in range(num_files):
        file = f"model-{i + 1:05d}-of-{num_files:05d}.safetensors"
        save_file({n: tensors[n] for n in names[i::num_files]}, directory / file)
        weight_map |= dict.fromkeys(names[i::num_files], file)
    if num_files > 1:
        index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("arch", [DENSE, MOE])
def test_names_are_one_to_one_and_shapes_add_up(arch):
    assert sum(int(np.prod(shape)) for shape in hf_shapes(arch).values()) == num_params(arch)


@pytest.mark.parametrize("arch", [DENSE, MOE])
def test_config_round_trip(arch, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(to_hf_config(arch)))
    assert read_architecture(tmp_path) == arch


@pytest.mark.parametrize(("arch", "num_files"), [(DENSE, 1), (MOE, 3)])
@pytest.mark.parametrize("mesh", [MeshConfig(), MeshConfig(fsdp=2, tensor=2)])
def test_load_places_every_element(arch, num_files, mesh, tmp_path):
    tensors = _tensors(arch)
    if arch is DENSE and mesh.tensor > 1:
        tensors, arch = _tensors(MOE), MOE
    _write(tmp_path / "m", arch, tensors, num_files)
    params = traverse_util.flatten_dict(load_params(tmp_path / "m", arch, make_mesh(mesh)), sep="/")
    layer, group, hidden = 1, 1, 3
    wq = np.asarray(params["layers/wq_LDKQH"])
    queries = arch.queries_per_kv
    row = (group * queries + queries - 1) * arch.head_width + hidden
    np.testing.assert_array_equal(
        wq[layer, :, group, queries - 1, hidden], tensors[f"model.layers.{layer}.self_attn.q_proj.weight"][row]
    )
    wo = np.asarray(params["layers/wo_LKQHD"])
    np.testing.assert_array_equal(
        wo[layer, group, queries - 1, hidden], tensors[f"model.layers.{layer}.self_attn.o_proj.weight"][:, row]
    )
    if arch.num_experts:
        down = np.asarray(params["layers/down_LEFD"])
        for expert in range(arch.num_experts):
            expected = tensors[f"model.layers.{layer}.mlp.experts.{expert}.down_proj.weight"].T
            np.testing.assert_array_equal(down[layer, expert], expected)


@pytest.mark.parametrize("arch", [DENSE, MOE])
def test_both_directions_are_inverse(arch):
    tensors = _tensors(arch)
    for param in flat_table(arch).values():
        for _, name in hf_slices(param):
            np.testing.assert_array_equal(to_hf(param, from_hf(param, tensors[name])), tensors[name])


@pytest.mark.parametrize("arch", [DENSE, MOE])
def test_save_then_load_is_exact_in_bfloat16(arch, tmp_path):
    mesh = make_mesh(MeshConfig())
    params = init_params(arch, mesh, jax.random.key(1))
    save_params(tmp_path / "out", arch, params)
    assert set(load_file(tmp_path / "out" / "model.safetensors")) == set(hf_shapes(arch))
    again = load_params(tmp_path / "out", read_architecture(tmp_path / "out"), mesh)
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(
            np.asarray(a.astype("bfloat16"), np.float32), np.asarray(b, np.float32)
        ),
        params,
        again,
    )


def test_faults_name_the_tensors(tmp_path):
    tensors = _tensors(DENSE)
    del tensors["model.layers.2.self_attn.k_proj.bias"]
    tensors["model.norm.weight"] = np.zeros(5, np.float32)
    tensors["model.layers.7.mlp.up_proj.weight"] = np.zeros((2, 3), np.float32)
    _write(tmp_path / "m", DENSE, tensors)
    with pytest.raises(ConfigError) as error:
        load_params(tmp_path / "m", DENSE, make_mesh(MeshConfig()))
    message = str(error.value)
    assert "missing tensor model.layers.2.self_attn.k_proj.bias" in message
    assert "extra tensor model.layers.7.mlp.up_proj.weight" in message
    assert re.search(r"model\.norm\.weight has shape \(5,\), config\.json says \(6,\)", message)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_weight_that_is_not_finite_is_named(bad: float, tmp_path):
    tensors = _tensors(MOE)
    tensors["model.layers.1.mlp.experts.4.up_proj.weight"][3, 2] = bad
    _write(tmp_path / "m", MOE, tensors, num_files=2)
    with pytest.raises(
        ConfigError, match=r"model-0000\d-of-00002\.safetensors: .*1\.mlp\.experts\.4\.up_proj\.weight: holds"
    ):
        load_params(tmp_path / "m", MOE, make_mesh(MeshConfig(expert=2)))


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda d: None, "no such directory"),
        (lambda d: d.mkdir(), "no config.json"),
        (lambda d: (d.mkdir(), (d / "config.json").write_text("{")), "not valid JSON"),
        (lambda d: (d.mkdir(), (d / "config.json").write_text('{"model_type": "gpt2"}')), "model_type='gpt2'"),
        (lambda d: (d.mkdir(), (d / "config.json").write_text('{"model_type": "llama"}')), "hidden_size=None"),
    ],
)
def test_a_directory_that_is_no_model_is_refused(make, expected, tmp_path):
    make(tmp_path / "m")
    with pytest.raises(ConfigError, match=expected):
        read_architecture(tmp_path / "m")


def test_broken_or_missing_shards_are_named(tmp_path):
    _write(tmp_path / "m", DENSE, _tensors(DENSE), num_files=2)
    (tmp_path / "m" / "model-00002-of-00002.safetensors").write_bytes(b"\x10")
    with pytest.raises(ConfigError, match="model-00002-of-00002"):
        load_params(tmp_path / "m", DENSE, make_mesh(MeshConfig()))
    (tmp_path / "m" / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ConfigError, match="model-00002-of-00002"):
        load_params(tmp_path / "m", DENSE, make_mesh(MeshConfig()))


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        {"type": "linear", "factor": 2.0},
        {"rope_type": "dynamic", "factor": 3.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    ],
)
def test_both_spellings_of_rope_scaling_give_one_architecture(scaling):
    base = to_hf_config(DENSE)
    del base["rope_parameters"]
    older = from_hf_config(base | {"rope_theta": 7e5, "rope_scaling": scaling})
    newer = from_hf_config(base | {"rope_parameters": scaling | {"rope_theta": 7e5}})
    assert older == newer
    assert older.rope.theta == 7e5
    assert older.rope.factor == scaling["factor"]
