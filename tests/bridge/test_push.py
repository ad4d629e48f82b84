"""bridge/push.py: what a server starts from and what it is sent are the trainer's weights, element by element."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bridge import hf
from bridge.export import Format
from bridge.names import hf_slices, to_hf
from bridge.push import Pusher, write_model
from bridge.wire import Shadow
from rl_jax.mesh import MeshConfig, make_mesh
from rl_jax.models.architecture import Architecture, read_architecture
from rl_jax.models.schema import Params, flat, flat_table, init_params, nested
from rl_jax.tokenizer import Tokenizer

ARCH = Architecture(
    vocab_size=264,
    width=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_width=10,
    num_experts=5,
    num_active_experts=2,
    expert_width=14,
    max_positions=40,
)
KEPT: dict[Format, type] = {"float32": np.float32, "bf16": jnp.bfloat16}


def tensors_of(params: Params) -> dict[str, np.ndarray]:
    """Return every Hugging Face tensor, straight from the parameter table."""
    values = flat(params)
    return {
        name: to_hf(param, np.asarray(values[key])[index])
        for key, param in flat_table(ARCH).items()
        for index, name in hf_slices(param)
    }


def held_by(shadow: Shadow, dtype: type) -> dict[str, np.ndarray]:
    return {spec.name: bits.view(dtype).reshape(spec.shape) for spec, bits in shadow.tensors()}


def changed(params: Params, seed: int) -> Params:
    """Return the parameters with one of twenty elements of some moved."""

    def move(key: str, value: jax.Array) -> jax.Array:
        rng = jax.random.fold_in(jax.random.key(seed), len(key))
        return jnp.where(jax.random.bernoulli(rng, 0.05, value.shape), value * 1.5 + 0.01, value)

    values = flat(params)
    return nested({key: move(key, value) if "norm" not in key else value for key, value in values.items()})


@pytest.fixture
def params() -> Params:
    return init_params(ARCH, make_mesh(MeshConfig()), jax.random.key(1))


@pytest.fixture
def tokenizer_dir(tmp_path: Path) -> Path:
    Tokenizer.byte_level().save(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


def test_what_a_server_starts_from_is_the_policy(tmp_path: Path, params: Params, tokenizer_dir: Path):
    out = tmp_path / "model"
    write_model(out, ARCH, params, "float32", tokenizer_dir=tokenizer_dir, step=3)
    assert read_architecture(out) == ARCH
    back = hf.load_params(out, ARCH, make_mesh(MeshConfig()))
    for key, value in flat(params).items():
        np.testing.assert_array_equal(np.asarray(flat(back)[key]), np.asarray(value))
    assert Tokenizer.from_dir(out).stop_token_ids == Tokenizer.byte_level().stop_token_ids
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("fmt", KEPT)
def test_a_replica_that_follows_holds_every_version_exactly(
    fmt: Format, tmp_path: Path, params: Params, tokenizer_dir: Path
):
    write_model(tmp_path / "model", ARCH, params, fmt, tokenizer_dir=tokenizer_dir)
    follower, latecomer = Shadow(tmp_path / "model"), Shadow(tmp_path / "model")
    pusher = Pusher(ARCH, fmt, tmp_path / "updates")
    kinds = []
    for version in range(4):
        params = changed(params, version)
        update = pusher.write(params, version)
        kinds.append(update.kind)
        assert update == pusher.update_for(version - 1) or version == 0
        follower.stage(update.path)
        assert list(follower.commit(update.path))
        assert follower.digest == update.digest
        expected = {name: tensor.astype(KEPT[fmt]) for name, tensor in tensors_of(params).items()}
        held = held_by(follower, KEPT[fmt])
        assert held.keys() == expected.keys()
        for name, tensor in expected.items():
            np.testing.assert_array_equal(held[name], tensor, err_msg=name)
    assert kinds == ["full", "delta", "delta", "delta"]
    assert 0.02 < update.changed_frac < 0.06
    everything = pusher.update_for(None)
    assert (everything.kind, everything.version, everything.base_version) == ("full", 3, None)
    latecomer.stage(everything.path)
    assert list(latecomer.commit(everything.path))
    assert latecomer.digest == follower.digest


def test_a_weight_that_is_not_finite_reaches_nobody(tmp_path: Path, params: Params):
    pusher = Pusher(ARCH, "bf16", tmp_path / "updates")
    pusher.write(params, 0)
    values = flat(params)
    router_LDE = np.array(values["layers/router_LDE"])
    router_LDE[1, 3, 2] = np.nan
    broken = nested({**values, "layers/router_LDE": jax.device_put(router_LDE, values["layers/router_LDE"].sharding)})
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.gate\.weight"):
        pusher.write(broken, 1)
    assert [path.name for path in (tmp_path / "updates").iterdir()] == ["v000000-full"]
    assert pusher.write(params, 2).kind == "full"
