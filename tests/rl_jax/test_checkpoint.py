"""Checkpoints: whole or not there, whatever fails; what was saved is what the arrays held when save returned."""

import gc
import json
import re
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore

from rl_jax.checkpoint import (
    FOLDER,
    CheckpointConfig,
    Checkpointer,
    CheckpointFailed,
    find_checkpoint,
    load_params,
    whole_steps,
)
from rl_jax.config import ConfigError
from rl_jax.mesh import MeshConfig, make_mesh
from rl_jax.models.architecture import Architecture, Rope
from rl_jax.models.schema import abstract_params
from rl_jax.optim import OptimConfig, make_optimizer
from rl_jax.trainer.state import TrainState, abstract_state, weight_roles

ARCH = Architecture(
    family="qwen3",
    vocab_size=7,
    width=4,
    num_layers=3,
    num_heads=2,
    num_kv_heads=1,
    head_width=2,
    mlp_width=5,
    rope=Rope(type="linear", factor=2.0),
)
MESH = make_mesh(MeshConfig())
ABSTRACT = abstract_state(ARCH, make_optimizer(OptimConfig(), weight_roles(ARCH)), MESH)
# When one of its writers fails, Orbax abandons the others in the middle; Python complains when it collects them.
ORBAX_LEAVES_COROUTINES = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def draw(seed: int) -> TrainState:
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jax.device_put(rng.normal(0, 9, x.shape).astype(x.dtype), x.sharding), ABSTRACT)


def assert_equal(found: TrainState, expected: TrainState) -> None:
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(found), jax.device_get(expected))


def checkpointer(folder: Path, **config: int) -> Checkpointer:
    return Checkpointer(folder, CheckpointConfig(**config), ARCH, config_hash="c0ffee")


@contextmanager
def files_limited_to(num_bytes: int) -> Iterator[None]:
    """Every write beyond this size fails, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_everything_comes_back_bitwise(tmp_path: Path) -> None:
    state = draw(0)
    host = bytes(range(256)) * 3 + b"\0"
    with checkpointer(tmp_path) as saver:
        assert saver.latest() is None
        saver.save(12, state, host)
        saver.wait()
        assert saver.latest() == 12
    with checkpointer(tmp_path) as saver:
        restored = saver.restore(ABSTRACT)
    assert_equal(restored.state, state)
    assert restored.host == host
    assert (restored.meta.step, restored.meta.architecture, restored.meta.config_hash) == (12, ARCH, "c0ffee")
    assert restored.meta.versions["numpy"] == np.__version__


def test_donating_the_state_after_save_does_not_change_what_is_saved(tmp_path: Path) -> None:
    state = draw(1)
    expected = jax.tree.map(np.array, jax.device_get(state))
    spoil = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0, tree), donate_argnums=0)
    with checkpointer(tmp_path) as saver:
        saver.save(1, state, b"")
        spoil(state)
        restored = saver.restore(ABSTRACT)
    assert_equal(restored.state, expected)
    assert restored.host == b""


def test_restored_state_can_be_donated(tmp_path: Path) -> None:
    state = draw(2)
    grow = jax.jit(lambda tree: jax.tree.map(lambda x: x + x, tree), donate_argnums=0)
    with checkpointer(tmp_path) as saver:
        saver.save(1, state, b"")
        restored = saver.restore(ABSTRACT)
        assert_equal(grow(restored.state), jax.tree.map(lambda x: x + x, state))
        assert_equal(saver.restore(ABSTRACT).state, state)


def test_retention_keeps_the_last_and_every_nth(tmp_path: Path) -> None:
    state = draw(3)
    with checkpointer(tmp_path, keep_last=2, keep_every=3) as saver:
        for step in range(1, 8):
            saver.save(step, state, b"")
    assert whole_steps(tmp_path / FOLDER) == [3, 6, 7]


@ORBAX_LEAVES_COROUTINES
def test_a_write_that_fails_keeps_the_last_checkpoint_and_leaves_no_rest(tmp_path: Path) -> None:
    first, second = draw(4), draw(5)
    with checkpointer(tmp_path) as saver:
        saver.save(1, first, b"one")
        saver.wait()
        with pytest.raises(CheckpointFailed) as caught, files_limited_to(10):
            saver.save(2, second, b"two")
            saver.wait()
        message = str(caught.value)
        assert "step 2 failed in" in message and str(tmp_path) in message
        assert "MB are free" in message and "the last whole one is of step 1" in message
        assert [path.name for path in (tmp_path / FOLDER).iterdir()] == ["step_000001"]
        assert saver.restore(ABSTRACT).host == b"one"
        saver.save(3, second, b"three")  # the disk has space again
        assert_equal(saver.restore(ABSTRACT).state, second)
    gc.collect()


@ORBAX_LEAVES_COROUTINES
def test_failure_in_the_background_is_raised_by_close(tmp_path: Path) -> None:
    saver = checkpointer(tmp_path)
    with pytest.raises(CheckpointFailed, match="there is none before it"), files_limited_to(10):
        saver.save(2, draw(6), b"")
        saver.close()
    gc.collect()


def test_a_full_disk_is_refused_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    with checkpointer(tmp_path) as saver:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100))
        with pytest.raises(CheckpointFailed, match=r"the disk is too full; 0\.0 MB are needed and 0\.0 MB are free"):
            saver.save(1, draw(7), b"")
    assert whole_steps(tmp_path / FOLDER) == []


def test_what_a_killed_writer_leaves_is_not_looked_at(tmp_path: Path) -> None:
    state = draw(8)
    with checkpointer(tmp_path) as saver:
        saver.save(5, state, b"five")
        saver.save(9, state, b"nine")
    folder = tmp_path / FOLDER
    (folder / "step_000012.orbax-checkpoint-tmp").mkdir()
    (folder / "step_000012.orbax-checkpoint-tmp" / "half").write_text("x")
    (folder / "step_000009" / "meta" / "metadata").write_text('{"step": 9')
    assert find_checkpoint(tmp_path).name == "step_000005"
    with pytest.raises(ConfigError, match=r"step_000009: is no whole checkpoint; whole are steps \[5\]"):
        find_checkpoint(folder / "step_000009")
    with checkpointer(tmp_path) as saver:
        assert saver.restore(ABSTRACT).host == b"five"
        saver.save(9, state, b"again")
        assert saver.restore(ABSTRACT).host == b"again"
    assert not (folder / "step_000012.orbax-checkpoint-tmp").exists()


def test_another_model_or_optimizer_is_refused(tmp_path: Path) -> None:
    with checkpointer(tmp_path) as saver:
        saver.save(1, draw(9), b"")
        saver.wait()
        muon = abstract_state(ARCH, make_optimizer(OptimConfig(type="muon"), weight_roles(ARCH)), MESH)
        with pytest.raises(
            ConfigError,
            match=r"another optimizer or model .* it has opt_state\.1\.count.* and lacks opt_state\.1\.inner_states",
        ):
            saver.restore(muon)
    wider = Architecture(**{**vars(ARCH), "mlp_width": 6})
    refused = pytest.raises(ConfigError, match="another architecture, mlp_width=5 instead of 6")
    with Checkpointer(tmp_path, CheckpointConfig(), wider) as saver, refused:
        saver.restore(ABSTRACT)


@ORBAX_LEAVES_COROUTINES
@pytest.mark.parametrize("part", ["params", "rest", "host"])
@pytest.mark.parametrize("deed", ["flip", "cut", "remove"])
@pytest.mark.parametrize("has_checksums", [True, False])
def test_a_damaged_file_is_refused_by_name_with_the_checkpoint_before(
    part: str, deed: str, has_checksums: bool, tmp_path: Path
) -> None:
    with checkpointer(tmp_path) as saver:
        for step in (1, 2):
            saver.save(step, draw(step), b"host")
    newest = tmp_path / FOLDER / "step_000002"
    file = max((f for f in (newest / part).glob("[dc]*/*") if f.name[0] != "."), key=lambda f: f.stat().st_size)
    if not has_checksums:
        if deed == "flip":
            return  # nothing else would notice
        (newest / "checksums.json").unlink()
    damage(file, deed)
    older = re.escape(f"--resume {tmp_path}/{FOLDER}/step_000001")
    named = re.escape(str(file)) if has_checksums else f"step_000002/{part}: cannot be read"
    with checkpointer(tmp_path) as saver:
        with pytest.raises(ConfigError, match=rf"{named}.*{older}") as refusal:
            saver.restore(ABSTRACT)
        assert len(str(refusal.value)) < 600
        assert_equal(saver.restore(ABSTRACT, 1).state, draw(1))
    if part == "params" and has_checksums:
        with pytest.raises(ConfigError, match=named):
            load_params(newest, MESH)


def damage(file: Path, deed: str) -> None:
    content = file.read_bytes()
    file.unlink()
    if deed == "flip":
        file.write_bytes(content[:-5] + bytes([content[-5] ^ 0x40]) + content[-4:])
    elif deed == "cut":
        file.write_bytes(content[: len(content) // 2])


def test_rewound_to_an_older_checkpoint_it_goes_on_from_there(tmp_path: Path) -> None:
    with checkpointer(tmp_path, keep_last=3) as saver:
        for step in (2, 4, 6):
            saver.save(step, draw(step), b"first")
    with checkpointer(tmp_path, keep_last=3) as saver:
        assert saver.restore(ABSTRACT, 2).host == b"first"
        saver.rewind(2)
        assert saver.latest() == 2
        saver.save(4, draw(7), b"second")
    with checkpointer(tmp_path) as saver:
        found = saver.restore(ABSTRACT)
    assert (found.meta.step, found.host) == (4, b"second")
    assert_equal(found.state, draw(7))
    aside = [path.name.rpartition("_")[0] for path in (tmp_path / FOLDER).glob("newer_*")]
    assert sorted(aside) == ["newer_step_000004", "newer_step_000006"]


def test_weights_alone_load_from_a_run_or_a_checkpoint_on_another_mesh(tmp_path: Path) -> None:
    state = draw(10)
    with checkpointer(tmp_path) as saver:
        saver.save(4, state, b"")
    mesh = make_mesh(MeshConfig(fsdp=2))
    for path in (tmp_path, tmp_path / FOLDER, tmp_path / FOLDER / "step_000004"):
        meta, params = load_params(path, mesh)
        assert meta.architecture == ARCH
        assert_equal(params, state.params)
        expected = jax.tree.map(lambda x: x.sharding, abstract_params(ARCH, mesh))
        assert jax.tree.map(lambda x: x.sharding, params) == expected
    with pytest.raises(ConfigError, match="no checkpoint in there"):
        load_params(tmp_path / "elsewhere", mesh)


def test_one_weight_can_be_read_with_tensorstore_alone(tmp_path: Path) -> None:
    state = draw(11)
    with checkpointer(tmp_path) as saver:
        saver.save(4, state, b"")
    store = f"file://{tmp_path / FOLDER / 'step_000004' / 'params'}/"
    spec = {"driver": "zarr", "kvstore": {"driver": "ocdbt", "base": store, "path": "layers.wq_LDKQH/"}}
    layers = state.params["layers"]
    assert isinstance(layers, dict)
    found = tensorstore.open(spec, open=True).result()[1].read().result()
    np.testing.assert_array_equal(found, layers["wq_LDKQH"][1])
    assert found.dtype == jnp.float32


def test_meta_is_plain_json(tmp_path: Path) -> None:
    with checkpointer(tmp_path) as saver:
        saver.save(4, draw(12), b"")
    raw = json.loads((tmp_path / FOLDER / "step_000004" / "meta" / "metadata").read_text())
    assert raw["step"] == 4 and raw["architecture"]["rope"]["factor"] == 2.0


def test_bad_values_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        CheckpointConfig(interval_steps=0, keep_last=0, keep_every=-1)
    assert len(caught.value.faults) == 3
