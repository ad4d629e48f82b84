"""python -m bridge.convert: bytes against the reference, there and back, killed and resumed, on many hosts."""

import dataclasses
import hashlib
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from conversions import ONE_MB, bf16_directory, run
from flax import struct
from references import DENSE, MOE, draw_params, hf_matrices, load_safetensors, reference_quantise, write_checkpoint
from safetensors import safe_open

from bridge import hf, orbax_reader, orbax_writer, stream, verify_source
from bridge.export import export_arrays, export_config, export_table
from bridge.export_folder import ExportFolder
from bridge.manifest import read_manifest
from bridge.shard_writer import plan_shards
from bridge.sources import find_source
from bridge.to_hf import ToHf, ToHfConversion
from bridge.verify_files import open_folder
from rl_jax import checkpoint
from rl_jax.checksums import stated_checksums
from rl_jax.mesh import MeshConfig, make_mesh
from rl_jax.models.architecture import Architecture, read_architecture
from rl_jax.models.fp8_rule import FORMATS, Format
from rl_jax.models.schema import Params, flat, nested


@struct.dataclass
class State:
    """A training state without an optimizer."""

    params: Params
    step: np.ndarray


ROOT = Path(__file__).resolve().parents[2]
MESH = make_mesh(MeshConfig())


def tensors_of(directory: Path) -> dict[str, np.ndarray]:
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    found = {}
    for file in sorted(set(index["weight_map"].values())):
        found |= load_safetensors(directory / file)
    return found


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("arch", [DENSE, MOE])
def test_every_file_of_the_directory_is_right(arch: Architecture, fmt: Format, runs, tmp_path: Path):
    assert run("--checkpoint", runs[arch], "--out", tmp_path / "out", "--format", fmt, *ONE_MB) == 0
    made = tensors_of(tmp_path / "out")
    table = export_table(arch, fmt)
    assert made.keys() == {t.name for t in table}
    expected = hf_matrices(arch, draw_params(arch))
    for tensor in table:
        array = made[tensor.name]
        if tensor.dtype == "F8_E4M3":
            block = (128, 128) if fmt == "fp8-block" else (1, tensor.shape[1])
            codes, scale = reference_quantise(expected[tensor.name], *block)
            np.testing.assert_array_equal(array.view(np.uint8), codes, err_msg=tensor.name)
            np.testing.assert_array_equal(made[tensor.name + ("_scale_inv" if fmt == "fp8-block" else "_scale")], scale)
        elif tensor.role == "weight":
            np.testing.assert_array_equal(array, expected[tensor.name].astype(array.dtype), err_msg=tensor.name)
    assert json.loads((tmp_path / "out/config.json").read_text()) == export_config(arch, fmt)
    assert read_architecture(tmp_path / "out") == arch
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (tmp_path / "out" / file).read_bytes() == (runs[arch] / "tokenizer" / file).read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert not [path for path in (tmp_path / "out").iterdir() if path.is_dir() or path.name.endswith(".part")]


def test_index_manifest_and_shards_agree(runs, tmp_path: Path):
    out = tmp_path / "out"
    assert run("--checkpoint", runs[MOE], "--out", out, "--format", "fp8-block", *ONE_MB) == 0
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(out.glob("*.safetensors"))
    assert len(files) > 3
    assert [f.name for f in files] == [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    total, manifest = 0, {entry.name: entry for entry in read_manifest(out).tensors}
    for file in files:
        with safe_open(file, framework="np") as opened:
            assert opened.metadata() == {"format": "pt"}
            assert set(opened.keys()) == load_safetensors(file).keys()
        for name, array in load_safetensors(file).items():
            total += array.nbytes
            assert index["weight_map"][name] == manifest[name].file == file.name
            assert manifest[name].checksum == hashlib.sha256(array.tobytes()).hexdigest()
            assert manifest[name].shape == array.shape
            assert name + "_scale_inv" not in index["weight_map"] or name + "_scale_inv" in load_safetensors(file)
    assert index["metadata"]["total_size"] == total
    assert manifest.keys() == index["weight_map"].keys()
    assert read_manifest(out).policy_step == 7
    assert read_manifest(out).config == json.loads((out / "config.json").read_text())
    stated = {entry.file: (entry.nbytes, entry.checksum) for entry in read_manifest(out).files}
    whole = {path.name: path.read_bytes() for path in out.iterdir() if path.name != "bridge_manifest.json"}
    headers = {file.name: whole[file.name][: -sum(a.nbytes for a in load_safetensors(file).values())] for file in files}
    sums = {name: hashlib.sha256(headers.get(name, content)).hexdigest() for name, content in whole.items()}
    assert stated == {name: (len(content), sums[name]) for name, content in whole.items()}


@pytest.mark.parametrize("fmt", ["fp8-block", "fp8-channel", "bf16"])
def test_files_have_the_bytes_of_live_weights(fmt: Format, runs, tmp_path: Path):
    assert run("--checkpoint", runs[MOE], "--out", tmp_path / "out", "--format", fmt) == 0
    sums = {entry.name: entry.checksum for entry in read_manifest(tmp_path / "out").tensors}
    live = export_arrays(MOE, nested(draw_params(MOE)), fmt)
    assert {t.name: hashlib.sha256(a.tobytes()).hexdigest() for t, a in live} == sums


def test_a_bfloat16_checkpoint_is_quantised_as_it_is(runs, tmp_path: Path):
    params = {key: value.astype(ml_dtypes.bfloat16) for key, value in draw_params(MOE).items()}
    write_checkpoint(tmp_path / "run", MOE, params)
    assert run("--checkpoint", tmp_path / "run", "--out", tmp_path / "out") == 0
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    matrix = hf_matrices(MOE, {key: value.astype(np.float32) for key, value in params.items()})[name]
    codes, _ = reference_quantise(matrix, 128, 128)
    np.testing.assert_array_equal(tensors_of(tmp_path / "out")[name].view(np.uint8), codes)


@pytest.mark.parametrize(("fmt", "back"), [("float32", "float32"), ("bf16", "bf16"), ("bf16", "float32")])
@pytest.mark.parametrize("arch", [DENSE, MOE])
def test_there_and_back_is_exact(arch: Architecture, fmt: Format, back: str, runs, tmp_path: Path):
    assert run("--checkpoint", runs[arch], "--out", tmp_path / "hf", "--format", fmt) == 0
    assert run("--from-hf", tmp_path / "hf", "--out", tmp_path / "back", "--format", back) == 0
    meta, params = checkpoint.load_params(tmp_path / "back", MESH)
    assert (meta.architecture, meta.step) == (arch, 0)
    for key, value in flat(params).items():
        expected = draw_params(arch)[key]
        expected = expected if fmt == "float32" else expected.astype(ml_dtypes.bfloat16).astype(np.float32)
        np.testing.assert_array_equal(np.asarray(value), expected, err_msg=key)
    assert run("--checkpoint", tmp_path / "back", "--out", tmp_path / "again", "--format", fmt) == 0
    for file in ("config.json", "tokenizer.json"):
        assert (tmp_path / "again" / file).read_text() == (tmp_path / "hf" / file).read_text()
    again, first = read_manifest(tmp_path / "again"), read_manifest(tmp_path / "hf")
    assert dataclasses.replace(again, policy_step=7) == first
    assert not again.is_edited


@pytest.mark.parametrize("fmt", ["fp8-block", "fp8-channel"])
def test_fp8_is_read_back_as_code_times_scale(fmt: Format, runs, tmp_path: Path):
    assert run("--checkpoint", runs[MOE], "--out", tmp_path / "hf", "--format", fmt, *ONE_MB) == 0
    assert run("--from-hf", tmp_path / "hf", "--out", tmp_path / "back", "--format", "bf16") == 0
    made = tensors_of(tmp_path / "hf")
    name = "model.layers.1.mlp.experts.2.down_proj.weight"  # [160, 128]
    scale = made[name + ("_scale_inv" if fmt == "fp8-block" else "_scale")]
    wide = np.repeat(scale, 128, 0)[:160] if fmt == "fp8-block" else scale
    expected = made[name].astype(np.float64) * wide
    _, from_orbax = checkpoint.load_params(tmp_path / "back", MESH)
    from_hf = hf.load_params(tmp_path / "hf", MOE, MESH)
    for params in (from_orbax, from_hf):
        np.testing.assert_array_equal(np.asarray(params["layers"]["down_LEFD"][1, 2]).T.astype(np.float64), expected)


def test_the_source_config_travels_both_ways(runs, tmp_path: Path):
    assert run("--checkpoint", runs[MOE], "--out", tmp_path / "hf", "--format", "bf16") == 0
    config = json.loads((tmp_path / "hf/config.json").read_text()) | {
        "eos_token_id": [3, 5],
        "router_aux_loss_coef": 0.1,
    }
    (tmp_path / "hf/config.json").write_text(json.dumps(config))
    assert run("--from-hf", tmp_path / "hf", "--out", tmp_path / "back") == 0
    assert run("--checkpoint", tmp_path / "back", "--out", tmp_path / "fp8") == 0
    found = json.loads((tmp_path / "fp8/config.json").read_text())
    assert {key: found[key] for key in config} == config
    run_config = tmp_path / "run" / "config.toml"
    write_checkpoint(tmp_path / "run", MOE, draw_params(MOE))
    run_config.write_text(f'[model]\npath = "{tmp_path / "hf"}"\n')
    assert run("--checkpoint", tmp_path / "run", "--out", tmp_path / "trained", "--format", "bf16") == 0
    assert json.loads((tmp_path / "trained/config.json").read_text()) == config


def test_hosts_write_their_files_and_the_last_one_commits(runs, tmp_path: Path):
    assert run("--checkpoint", runs[MOE], "--out", tmp_path / "one", *ONE_MB) == 0
    for host in (2, 0):
        assert (
            run("--checkpoint", runs[MOE], "--out", tmp_path / "many", *ONE_MB, "--num-hosts", 3, "--host-index", host)
            == 0
        )
        assert not (tmp_path / "many").exists()
    assert run("--checkpoint", runs[MOE], "--out", tmp_path / "many", *ONE_MB, "--num-hosts", 3, "--host-index", 1) == 0
    for path in (tmp_path / "one").iterdir():
        assert (tmp_path / "many" / path.name).read_bytes() == path.read_bytes(), path.name


def test_a_killed_conversion_goes_on_where_it_was(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    arch = dataclasses.replace(MOE, width=256, num_layers=4, expert_width=256, num_experts=8)
    write_checkpoint(tmp_path / "run", arch, draw_params(arch))
    args = ["--checkpoint", tmp_path / "run", "--out", tmp_path / "out", "--max-shard-gb", "0.0005", "--threads", "1"]
    command = [sys.executable, "-m", "bridge.convert", *map(str, args)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    marks = tmp_path / ".out.converting" / "done"
    while process.poll() is None and len(list(marks.glob("*.json"))) < 2:
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "it was done before it could be killed; make the checkpoint larger"
    assert not (tmp_path / "out").exists()
    torn = next((tmp_path / ".out.converting" / "model").glob("*.safetensors"))
    kept = len(list(marks.glob("*.json")))
    with torn.open("r+b") as file:  # a file that the kill left damaged is made again
        file.seek(-1, 2)
        file.write(b"\x55")
    assert run(*args) == 0
    assert f"resumed   {kept - 1} files" in capfd.readouterr().out
    assert run("--checkpoint", tmp_path / "run", "--out", tmp_path / "whole", "--max-shard-gb", "0.0005") == 0
    for path in (tmp_path / "whole").iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes(), path.name
    assert not (tmp_path / ".out.converting").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_conversion_keeps_its_files_and_a_way_back_nothing(number: signal.Signals, tmp_path: Path, capfd):
    arch = dataclasses.replace(MOE, width=256, num_layers=4, expert_width=256, num_experts=8)
    write_checkpoint(tmp_path / "run", arch, draw_params(arch))
    there = ["--checkpoint", tmp_path / "run", "--out", tmp_path / "hf", "--max-shard-gb", "0.0005", "--threads", "1"]
    marks = tmp_path / ".hf.converting" / "done"
    printed = stopped(number, there, lambda: len(list(marks.glob("*.json"))) >= 2)
    assert "files that are done are kept: the same command goes on from there" in printed
    assert printed[-1] == "stopped"
    assert run(*there) == 0
    assert "resumed " in capfd.readouterr().out
    back = ["--from-hf", tmp_path / "hf", "--out", tmp_path / "back", "--threads", "1"]
    assert stopped(number, back, (tmp_path / ".back.converting" / "made").exists)[-1] == "stopped"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "run"]


def stopped(number: signal.Signals, args: list[object], is_under_way: Callable[[], bool]) -> list[str]:
    """Stop a conversion of its own process once it is under way; return what it printed."""
    command = [sys.executable, "-m", "bridge.convert", *map(str, args)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    while process.poll() is None and not is_under_way():
        time.sleep(0.002)
    process.send_signal(number)
    printed = process.communicate()[0]
    assert process.returncode == 130, "it was done before it could be stopped; make the checkpoint larger"
    return printed.splitlines()


def test_hosts_that_finish_together_find_the_work_done(runs, tmp_path: Path):
    checkpoint_folder = checkpoint.find_checkpoint(runs[MOE])
    meta = checkpoint.read_meta(checkpoint_folder)
    job = ToHf(
        checkpoint=checkpoint_folder,
        arch=meta.architecture,
        step=meta.step,
        source=find_source(checkpoint_folder, None, False),
        out=tmp_path / "out",
        fmt="fp8-block",
        max_shard_bytes=100_000,
        threads=1,
        num_hosts=2,
    )
    folder = ExportFolder(job.out, plan_shards(export_table(job.arch, job.fmt), job.max_shard_bytes), {})
    first, second = ToHfConversion(job), ToHfConversion(dataclasses.replace(job, host=1))
    with first.held(), second.held():
        first.prepare()
        second.prepare()
        assert first.run(lambda _: None).missing
        assert not second.run(lambda _: None).missing
        assert folder.missing() == []
        folder.commit("fp8-block", 7, {}, ())  # between its look and its turn the other one was faster
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_checkpoint_from_hf_has_checksums(runs, tmp_path: Path):
    assert run("--from-hf", bf16_directory(runs, tmp_path), "--out", tmp_path / "back") == 0
    (made,) = (tmp_path / "back").glob("checkpoints/*")
    files = {path for path in made.rglob("*") if path.is_file() and path.name != "checksums.json"}
    assert stated_checksums(made) == {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_an_embedding_in_pieces_is_the_same_embedding(tmp_path: Path, capfd, monkeypatch: pytest.MonkeyPatch):
    """Rows of a large matrix are stored, read, hashed and written some at a time, both ways."""
    arch = dataclasses.replace(MOE, vocab_size=211)
    row_bytes = arch.width * 4
    monkeypatch.setattr(orbax_writer, "_CHUNK_BYTES", 100 * row_bytes)
    monkeypatch.setattr(orbax_writer, "_PIECE_BYTES", 20 * row_bytes + 5)
    monkeypatch.setattr(orbax_reader, "_PIECE_BYTES", 50 * row_bytes)
    for module in (stream, verify_source):
        monkeypatch.setattr(module, "UNIT_BYTES", 100 * row_bytes)
    write_checkpoint(tmp_path / "run", arch, draw_params(arch))
    assert run("--checkpoint", tmp_path / "run", "--out", tmp_path / "hf", "--format", "float32") == 0
    shown = re.search(r"embed_tokens\s+\S\s+([\d,]+)\s+\S\s+([\d.]+)\s+\S\s+F32\s+\S\s+exact", capfd.readouterr().out)
    assert shown is not None
    assert (shown[1], shown[2]) == ("1", f"{211 * row_bytes / 1e6:.1f}")
    made = tensors_of(tmp_path / "hf")
    for name, key in (("model.embed_tokens.weight", "embed_VD"), ("lm_head.weight", "unembed_VD")):
        np.testing.assert_array_equal(made[name], draw_params(arch)[key])
    opened, checkpoint_folder = open_folder(tmp_path / "hf"), checkpoint.find_checkpoint(tmp_path / "run")
    assert list(verify_source.check_against(opened, checkpoint_folder, arch)) == []
    assert run("--from-hf", tmp_path / "hf", "--out", tmp_path / "back") == 0
    assert f"tensors   {len(made)} weights" in capfd.readouterr().out
    (back,) = (tmp_path / "back").glob("checkpoints/*")
    for folder in (checkpoint_folder, back):
        chains = list(orbax_reader.WeightStore(folder / "params", arch).chains([("embed_VD", ())], 100 * row_bytes))
        assert [unit.rows for unit in chains[0]] == [range(at, min(at + 40, 211)) for at in range(0, 211, 40)]
    _, params = checkpoint.load_params(tmp_path / "back", MESH)
    np.testing.assert_array_equal(np.asarray(params["embed_VD"]), draw_params(arch)["embed_VD"])


@pytest.mark.parametrize(("vocab_size", "num_pieces"), [(14 * 160, 14), (2243, 0)])
def test_a_run_stores_its_embedding_in_pieces_if_its_rows_can_be_shared_out(
    vocab_size: int, num_pieces: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    arch = dataclasses.replace(MOE, vocab_size=vocab_size)
    monkeypatch.setattr(checkpoint, "CHUNK_BYTES", 170 * arch.width * 4)
    params = draw_params(arch)
    state = State(params=jax.device_put(nested(params)), step=np.array(3, np.int32))
    with checkpoint.Checkpointer(tmp_path, checkpoint.CheckpointConfig(), arch) as saver:
        saver.save(3, state, b"")
    monkeypatch.setattr(orbax_reader, "_PIECE_BYTES", 16 * arch.width * 4)
    store = orbax_reader.WeightStore(tmp_path / "checkpoints/step_000003/params", arch)
    (chain,) = store.chains([("embed_VD", ())], 16 * arch.width * 4)
    pieces = [values for _, values in store.results(chain, store.read(chain[0]))]
    assert [unit.rows for unit in chain] == ([range(160 * i, 160 * i + 160) for i in range(num_pieces)] or [None])
    np.testing.assert_array_equal(np.concatenate(pieces), params["embed_VD"])


def test_a_nan_in_a_later_piece_of_an_embedding_is_found(tmp_path: Path, capfd, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(orbax_writer, "_CHUNK_BYTES", 1000)
    monkeypatch.setattr(orbax_writer, "_PIECE_BYTES", 5 * MOE.width * 4)
    monkeypatch.setattr(orbax_reader, "_PIECE_BYTES", 5 * MOE.width * 4)
    monkeypatch.setattr(stream, "UNIT_BYTES", 5 * MOE.width * 4)
    params = draw_params(MOE)
    params["unembed_VD"][MOE.vocab_size - 1, 3] = np.inf
    write_checkpoint(tmp_path / "run", MOE, params)
    assert run("--checkpoint", tmp_path / "run", "--out", tmp_path / "out") == 2
    assert "lm_head.weight: holds NaN or infinity" in " ".join(capfd.readouterr().err.split())
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
