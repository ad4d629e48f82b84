"""Live updates on the wire: deltas against a naive reference, chains of versions, every kind of damage, full disks."""

import json
import resource
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from safetensors.numpy import save_file

from bridge.wire import Sender, Shadow, Spec, WireError, read_update, sha256_of
from bridge.wire.delta import apply_delta, find_delta, grid_of
from bridge.wire.manifest import DATA, MANIFEST, write_manifest

ROOT = Path(__file__).resolve().parents[2]
SHAPES = {
    "model.embed_tokens.weight": (131, 5),
    "model.layers.0.mlp.up_proj.weight": (257, 130),
    "model.layers.0.mlp.up_proj.weight_scale_inv": (3, 2),
    "model.layers.1.mlp.up_proj.weight": (257, 130),
    "model.layers.1.norm.weight": (17,),
    "model.norm.weight": (1,),
}
WORDS = {"uint8": "U8", "float32": "F32"}
Tensors = dict[str, np.ndarray]


def make_tensors(seed: int = 0) -> Tensors:
    """Random tensors of a tiny model; matrices of 1 byte an element, the rest float32."""
    rng = np.random.default_rng(seed)
    return {
        name: rng.integers(0, 256, shape, dtype=np.uint8)
        if name.endswith("proj.weight")
        else rng.normal(size=shape).astype(np.float32)
        for name, shape in SHAPES.items()
    }


def changed(tensors: Tensors, seed: int, frac: float = 0.002) -> Tensors:
    """Return a version in which `frac` of the elements of each matrix differ, and nothing else."""
    rng, after = np.random.default_rng(seed), {name: array.copy() for name, array in tensors.items()}
    for name, array in after.items():
        if name.endswith("proj.weight"):
            flat = array.reshape(-1)
            flat[rng.random(flat.size) < frac] ^= 1
    return after


def as_stream(tensors: Tensors) -> Iterator[tuple[str, str, tuple[int, ...], np.ndarray]]:
    for name, array in tensors.items():
        yield name, WORDS[array.dtype.name], array.shape, array


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """The folder that fleet and trainer start from, in two files."""
    folder = tmp_path / "model"
    folder.mkdir()
    names = sorted(SHAPES)
    for number, part in enumerate((names[:2], names[2:])):
        save_file({name: make_tensors()[name] for name in part}, folder / f"model-{number}.safetensors")
    return folder


def held(shadow: Shadow) -> dict[str, bytes]:
    return {spec.name: bits.tobytes() for spec, bits in shadow.tensors()}


def raw(tensors: Tensors) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in tensors.items()}


def take(shadow: Shadow, path: Path) -> dict[str, bytes]:
    """Stage and commit; return what went to the model."""
    shadow.stage(path)
    return {spec.name: bits.tobytes() for spec, bits in shadow.commit(path)}


@st.composite
def two_versions(draw: st.DrawFn) -> tuple[tuple[int, ...], np.ndarray, np.ndarray]:
    shape = draw(st.sampled_from([(), (1,), (16_385,), (129, 257), (128, 128), (3, 1), (2, 67, 131), (0, 5)]))
    kind = draw(st.sampled_from(["<u1", "<u2", "<u4"]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    size = int(np.prod(shape, dtype=np.int64))
    old = rng.integers(0, 7, size).astype(kind)
    new = old.copy()
    where = rng.random(size) < draw(st.sampled_from([0.0, 0.001, 0.05, 0.6, 1.0]))
    new[where] = rng.integers(0, 7, int(where.sum())).astype(kind)
    return shape, old, new


def naive_changed_blocks(shape: tuple[int, ...], old: np.ndarray, new: np.ndarray) -> list[int]:
    """Numbers of the blocks with a change, one block after the other."""
    if old.size == 0:
        return []
    table = (1, old.size, 1, 16_384) if len(shape) < 2 else (old.size // shape[-1], shape[-1], 128, 128)
    rows, cols, high, wide = table
    old, new = old.reshape(rows, cols), new.reshape(rows, cols)
    corners = [(r, c) for r in range(0, rows, high) for c in range(0, cols, wide)]
    return [
        number
        for number, (r, c) in enumerate(corners)
        if (old[r : r + high, c : c + wide] != new[r : r + high, c : c + wide]).any()
    ]


@hypothesis.given(two_versions())
@hypothesis.settings(max_examples=150)
def test_a_delta_names_the_changed_blocks_and_gives_the_new_version(case):
    shape, old, new = case
    delta = find_delta(old, new, shape)
    assert delta.blocks.tolist() == naive_changed_blocks(shape, old, new)
    assert delta.num_changed == np.count_nonzero(old != new)
    target = old.copy()
    apply_delta(target, delta, shape)
    assert target.tobytes() == new.tobytes()
    whole = grid_of(shape).num_blocks * 6 + new.nbytes  # every block dense
    assert delta.num_bytes <= whole


def test_a_sparse_change_takes_two_bytes_and_the_element():
    old = np.zeros(300 * 200, "<u1")
    new = old.copy()
    new[[5, 7, 130]] = 9  # columns 5 and 7: block 0; column 130: block 1
    delta = find_delta(old, new, (300, 200))
    assert (delta.blocks.tolist(), delta.counts.tolist(), delta.places.tolist()) == ([0, 1], [2, 1], [5, 7, 2])
    assert delta.num_bytes == 2 * (4 + 2) + 3 * (2 + 1)


def test_minus_zero_and_nan_are_compared_as_they_are_stored():
    old = np.array([0.0, np.nan, 1.0], np.float32).view("<u4")
    new = np.array([-0.0, np.nan, 1.0], np.float32).view("<u4")
    assert find_delta(old, new, (3,)).num_changed == 1


@pytest.mark.parametrize("on_disk", [False, True])
def test_versions_follow_each_other_by_deltas(model_dir: Path, tmp_path: Path, on_disk: bool):
    scratch = tmp_path / "scratch" if on_disk else None
    sender = Sender(tmp_path / "updates", base=(0, model_dir), scratch=scratch)
    shadow, tensors = Shadow(model_dir, scratch), make_tensors()
    for version in range(1, 6):
        before, tensors = tensors, changed(tensors, version)
        update = sender.write(version, as_stream(tensors))
        take(shadow, update.path)
        num_changed = sum(np.count_nonzero(before[name] != tensors[name]) for name in tensors)
        assert (update.kind, update.base_version, update.reason) == ("delta", version - 1, "")
        assert update.changed_frac == pytest.approx(num_changed / sum(array.size for array in tensors.values()))
        assert update.num_bytes < sum(array.nbytes for array in tensors.values()) / 50
        assert held(shadow) == raw(tensors)
        assert (shadow.version, shadow.digest) == (version, update.digest)
    assert raw(make_tensors()) == held(Shadow(model_dir)), "the folder changed"


def test_only_layers_with_a_change_go_to_the_model_and_those_whole(model_dir: Path, tmp_path: Path):
    sender, shadow = Sender(tmp_path / "updates", base=(0, model_dir)), Shadow(model_dir)
    tensors = make_tensors()
    tensors["model.layers.0.mlp.up_proj.weight_scale_inv"][1, 1] *= 2
    given = take(shadow, sender.write(1, as_stream(tensors)).path)
    assert given == {name: data for name, data in raw(tensors).items() if name.startswith("model.layers.0.")}
    assert take(shadow, sender.write(2, as_stream(tensors)).path) == {}, "nothing changed"
    assert shadow.version == 2


def test_a_delta_that_is_no_smaller_gives_way_to_a_full_update(model_dir: Path, tmp_path: Path):
    sender, shadow = Sender(tmp_path / "updates", base=(0, model_dir)), Shadow(model_dir)
    other = make_tensors(seed=1)
    update = sender.write(1, as_stream(other))
    assert (update.kind, update.base_version, update.reason) == ("full", None, "a delta would be no smaller")
    assert 0.9 < update.changed_frac < 1.0, "one byte in 256 is the same by chance"
    take(shadow, update.path)
    assert held(shadow) == raw(other)
    again = sender.write(2, as_stream(changed(other, 3)))
    assert again.kind == "delta"
    take(shadow, again.path)
    assert held(shadow) == raw(changed(other, 3))


def test_a_replica_with_another_version_gets_a_full_update(model_dir: Path, tmp_path: Path):
    sender = Sender(tmp_path / "updates", base=(0, model_dir))
    first, second = changed(make_tensors(), 1), changed(make_tensors(), 2)
    sender.write(1, as_stream(first))
    delta = sender.write(2, as_stream(second))
    assert sender.update_for(1) == delta
    full = sender.update_for(0)
    assert (full.kind, full.reason) == ("full", "the replica holds version 0, the delta starts from 1")
    assert sender.update_for(None).path == full.path, "written once"
    late = Shadow(model_dir)
    with pytest.raises(WireError, match=r"starts from version 1 .*holds version None .*send a full update"):
        late.stage(delta.path)
    take(late, full.path)
    assert (held(late), late.digest) == (raw(second), delta.digest)


def test_the_first_update_without_a_base_is_full(model_dir: Path, tmp_path: Path):
    sender, shadow = Sender(tmp_path / "updates"), Shadow(model_dir)
    update = sender.write(7, as_stream(changed(make_tensors(), 1)))
    assert (update.kind, update.reason) == ("full", "no version was sent before it")
    given = take(shadow, update.path)
    assert {name.split(".")[2] for name in given} == {"0", "1"}, "embedding and norms did not change"
    assert held(shadow) == raw(changed(make_tensors(), 1))


def test_folders_of_old_versions_are_removed(model_dir: Path, tmp_path: Path):
    folder = tmp_path / "updates"
    (folder / ".writing-v000003-delta").mkdir(parents=True)
    (folder / "v000003-full").mkdir()
    sender, tensors = Sender(folder, max_kept=2, base=(0, model_dir)), make_tensors()
    for version in range(1, 5):
        tensors = changed(tensors, version)
        sender.write(version, as_stream(tensors))
    sender.full(4)
    assert sorted(path.name for path in folder.iterdir()) == ["v000003-delta", "v000004-delta", "v000004-full"]
    with pytest.raises(ValueError, match="version 3 is not held; only the newest, 4"):
        sender.full(3)
    with pytest.raises(ValueError, match="version 4 does not follow 4"):
        sender.write(4, as_stream(tensors))


def drop(tensors: Tensors) -> Tensors:
    return {name: array for name, array in tensors.items() if name != "model.norm.weight"}


def reshape(tensors: Tensors) -> Tensors:
    return tensors | {"model.layers.1.norm.weight": np.zeros(18, np.float32)}


def add(tensors: Tensors) -> Tensors:
    return tensors | {"lm_head.weight": np.zeros((2, 3), np.float32)}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (drop, r"1 tensors of the version before are missing, first \['model.norm.weight'\]"),
        (reshape, r"model.layers.1.norm.weight F32 \[18\] does not fit the version before, which has .*\[17\]"),
        (add, "lm_head.weight .* is not in the version before"),
    ],
)
def test_a_version_with_other_tensors_is_refused_and_the_next_is_full(model_dir: Path, tmp_path: Path, make, message):
    sender = Sender(tmp_path / "updates", base=(0, model_dir))
    with pytest.raises(WireError, match=message):
        sender.write(1, as_stream(make(make_tensors())))
    assert list((tmp_path / "updates").iterdir()) == []
    update = sender.write(1, as_stream(make_tensors()))
    assert (update.kind, update.reason) == ("full", "the write before it failed")


@pytest.mark.parametrize("frac", [0.002, 1.0])
def test_a_full_disk_leaves_nothing_and_the_next_update_is_full(model_dir: Path, tmp_path: Path, frac: float):
    sender, shadow = Sender(tmp_path / "updates", base=(0, model_dir)), Shadow(model_dir)
    tensors = changed(make_tensors(), 1, frac)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))  # a file may not grow beyond 100 bytes
    try:
        with pytest.raises(OSError, match="too large"):
            sender.write(1, as_stream(tensors))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list((tmp_path / "updates").iterdir()) == []
    with pytest.raises(ValueError, match="there is no version to send: the write before it failed"):
        sender.update_for(0)
    update = sender.write(2, as_stream(tensors))
    assert (update.kind, update.reason) == ("full", "the write before it failed")
    take(shadow, update.path)
    assert held(shadow) == raw(tensors)


def cut_data(path: Path) -> None:
    data = (path / DATA).read_bytes()
    (path / DATA).write_bytes(data[:-1])


def flip_data(path: Path) -> None:
    data = bytearray((path / DATA).read_bytes())
    data[-1] ^= 0x10
    (path / DATA).write_bytes(data)


def flip_manifest(path: Path) -> None:
    text = (path / MANIFEST).read_text()
    (path / MANIFEST).write_text(text.replace('"version": 1', '"version": 2', 1))


def no_manifest(path: Path) -> None:
    (path / MANIFEST).unlink()


def another_format(path: Path) -> None:
    content = json.loads((path / MANIFEST).read_text()) | {"format": "rl_jax-update-9"}
    (path / MANIFEST).write_text(json.dumps(content))


def with_entry(**fields: object):
    """Return a damage: the first entry of the manifest is another one, with a manifest that agrees with itself."""

    def damage(path: Path) -> None:
        manifest = read_update(path)
        first, *rest = manifest.entries
        spec = replace(first.spec, **{k: v for k, v in fields.items() if k in ("name", "dtype", "shape")})
        other = {k: v for k, v in fields.items() if k not in ("name", "dtype", "shape")}
        write_manifest(path, replace(manifest, entries=(replace(first, spec=spec, **other), *rest)))

    return damage


def another_digest(path: Path) -> None:
    write_manifest(path, replace(read_update(path), digest="0" * 64))


DAMAGES = [
    ("delta", cut_data, "the manifest says .*; it is incomplete"),
    ("delta", flip_data, "refused, the bytes of model.layers.1.mlp.up_proj.weight do not have their checksum"),
    ("delta", flip_manifest, "the manifest does not have the checksum that it states"),
    ("delta", no_manifest, "not a readable update"),
    ("delta", another_format, "format is 'rl_jax-update-9', expected 'rl_jax-update-1'"),
    (
        "delta",
        with_entry(name="model.layers.7.weight"),
        r"1 tensors differ: model.layers.7.weight U8 .*not in the model",
    ),
    ("delta", with_entry(dtype="F32"), r"model.layers.0.mlp.up_proj.weight F32 .*: the model has .* U8"),
    ("delta", with_entry(shape=(130, 257)), r"U8 \[130, 257\]: the model has .*\[257, 130\]"),
    ("delta", with_entry(lengths=(1, 1, 1)), "delta of 1 blocks takes"),
    ("delta", another_digest, "it would give version"),
    ("full", cut_data, "the manifest says .*; it is incomplete"),
    ("full", flip_data, "the bytes of model.layers.1.mlp.up_proj.weight do not have their checksum"),
    ("full", with_entry(name="lm_head.weight"), r"2 tensors differ: lm_head.weight .*; model.embed_tokens.weight"),
]


@pytest.mark.parametrize(("kind", "damage", "message"), DAMAGES, ids=range(len(DAMAGES)))
def test_a_damaged_update_is_refused_and_the_version_held_stays(
    model_dir: Path, tmp_path: Path, kind: str, damage, message: str
):
    sender, shadow = Sender(tmp_path / "updates", base=(0, model_dir)), Shadow(model_dir)
    tensors = changed(make_tensors(), 1)
    update = sender.write(1, as_stream(tensors))
    good = sender.full(1)
    bad = update if kind == "delta" else good
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in bad.path.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    damage(copy)
    with pytest.raises(WireError, match=message):
        shadow.stage(copy)
    with pytest.raises(WireError, match="no update is staged"):
        shadow.commit(copy)
    assert (held(shadow), shadow.version) == (raw(make_tensors()), None)
    take(shadow, bad.path)
    assert held(shadow) == raw(tensors)


def test_places_outside_the_tensor_are_refused():
    old = np.zeros(129 * 3, "<u2")
    new = old.copy()
    new[-1] = 1
    delta = find_delta(old, new, (129, 3))
    for broken in (
        replace(delta, places=delta.places + np.uint16(1)),
        replace(delta, blocks=delta.blocks + np.uint32(1)),
        replace(delta, counts=delta.counts + np.uint16(1)),
        replace(delta, dense=np.zeros(1, "<u2")),
    ):
        with pytest.raises(WireError):
            apply_delta(old.copy(), broken, (129, 3))


def test_a_commit_that_breaks_off_leaves_the_shadow_refusing(model_dir: Path, tmp_path: Path):
    sender, shadow = Sender(tmp_path / "updates", base=(0, model_dir)), Shadow(model_dir)
    update = sender.write(1, as_stream(changed(make_tensors(), 1)))
    shadow.stage(update.path)
    next(shadow.commit())
    with pytest.raises(WireError, match=r"the commit of version 1 did not end; the weights are mixed, restart"):
        shadow.stage(update.path)


def test_only_the_staged_update_can_be_committed(model_dir: Path, tmp_path: Path):
    sender, shadow = Sender(tmp_path / "updates", base=(0, model_dir)), Shadow(model_dir)
    first = sender.write(1, as_stream(changed(make_tensors(), 1)))
    second = sender.write(2, as_stream(changed(make_tensors(), 2)))
    shadow.stage(first.path)
    with pytest.raises(WireError, match="version 2 is not staged, version 1 is"):
        shadow.commit(second.path)
    assert dict(shadow.commit(first.path)).keys() != set()


def test_a_broken_model_folder_is_named(model_dir: Path):
    file = model_dir / "model-1.safetensors"
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(WireError, match=r"model-1.safetensors: .*the file is damaged"):
        Shadow(model_dir)
    file.write_bytes((model_dir / "model-0.safetensors").read_bytes())
    with pytest.raises(WireError, match=r"model-1.safetensors: .* is in another file of the folder too"):
        Shadow(model_dir)


def test_checksums_are_those_of_the_bytes():
    spec = Spec("a", "F32", (3,))
    assert (spec.num_bytes, spec.bits) == (12, np.dtype("<u4"))
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert sha256_of(np.empty(0, np.uint8)) == empty
    with pytest.raises(WireError, match="dtype 'F4' is unknown"):
        Spec("a", "F4", (3,))


def test_the_wire_needs_numpy_and_the_standard_library_only():
    code = "import sys, bridge.wire; print(*sorted(m for m in sys.modules if m.split('.')[0] in sys.argv[1:]))"
    others = ["jax", "ml_dtypes", "torch", "rl_jax", "safetensors"]
    run = subprocess.run([sys.executable, "-c", code, *others], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.split() == []
