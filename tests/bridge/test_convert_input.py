"""python -m bridge.convert: what it refuses, in one message that names the option, and that nothing is left behind."""

import fcntl
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from conversions import ONE_MB, bf16_directory, full_disk, run
from exports import edit, set_first, with_value
from references import DENSE, MOE, draw_params, write_checkpoint

from bridge.out_folder import shown_bytes
from rl_jax.checksums import write_checksums
from rl_jax.models.architecture import to_hf_config


def test_another_conversion_to_the_same_place_is_refused(runs, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    args = ("--checkpoint", runs[MOE], "--out", tmp_path / "out", *ONE_MB, "--num-hosts", 2)
    assert run(*args) == 0
    assert run(*args, "--format", "bf16") == 2
    assert "format: fp8-block instead of bf16" in capfd.readouterr().err
    assert run(*args, "--host-index", 1) == 0


def test_a_second_process_touches_nothing_of_the_first(
    runs, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    args = ("--checkpoint", runs[MOE], "--out", tmp_path / "out", *ONE_MB, "--num-hosts", 2)
    assert run(*args) == 0
    before = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0))  # the second would tidy up
    with (tmp_path / ".out.converting/host-0.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert run(*args) == 2
    assert "another process converts as host 0" in capfd.readouterr().err
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == before


def test_a_second_process_touches_nothing_of_the_first_on_the_way_back(runs, tmp_path: Path, capfd):
    """The first one is written by hand: between its begin and its end nobody else may come."""
    hf = bf16_directory(runs, tmp_path)
    aside = tmp_path / ".out.converting"
    (aside / "made").mkdir(parents=True)
    (aside / "made" / "weights").write_text("of the first")
    with (aside / "host-0.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for way, source in (("--from-hf", hf), ("--checkpoint", runs[MOE])):
            assert run(way, source, "--out", tmp_path / "out") == 2
            assert "another process converts as host 0; wait for it" in " ".join(capfd.readouterr().err.split())
    assert sorted(path.name for path in aside.rglob("*")) == ["host-0.lock", "made", "weights"]
    assert run("--from-hf", hf, "--out", tmp_path / "out") == 0  # the first was killed: its lock fell
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["checkpoints", "source", "tokenizer"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "out"]


def test_what_a_kill_left_is_not_mixed_with_the_other_direction(runs, tmp_path: Path, capfd):
    hf = bf16_directory(runs, tmp_path)
    first_half = ("--checkpoint", runs[MOE], "--out", tmp_path / "one", *ONE_MB, "--num-hosts", 2)
    assert run(*first_half) == 0
    before = sorted((tmp_path / ".one.converting").rglob("*"))
    assert run("--from-hf", hf, "--out", tmp_path / "one") == 2
    assert sorted((tmp_path / ".one.converting").rglob("*")) == before
    assert run(*first_half, "--host-index", 1) == 0
    (tmp_path / ".two.converting").mkdir()
    (tmp_path / ".two.converting" / "plan.json").write_text(json.dumps({"from_hf": str(hf)}))
    assert run("--checkpoint", runs[MOE], "--out", tmp_path / "two") == 2
    printed = " ".join(capfd.readouterr().err.split())
    assert printed.count("another conversion to this directory was begun") == 2
    assert f"(from_hf: {hf}" in printed
    assert run("--from-hf", hf, "--out", tmp_path / "two") == 0


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--out", "/"], "--out /: must name a directory to make"),
        (["--out", "x", "--max-shard-gb", "inf"], "--max-shard-gb inf: must be positive and finite"),
        (["--out", "x", "--max-shard-gb", "nan"], "--max-shard-gb nan: must be positive and finite"),
    ],
)
def test_impossible_options_are_refused(args: list[str], expected: str, runs, capfd: pytest.CaptureFixture[str]):
    assert run("--checkpoint", runs[MOE], *args) == 2
    assert expected in capfd.readouterr().err


def test_options_of_the_one_direction_are_refused_in_the_other(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    options = ["--source", tmp_path, "--num-hosts", 2, "--trust-checkpoint", "--max-shard-gb", 1]
    assert run("--from-hf", tmp_path, "--out", tmp_path / "out", *options) == 2
    printed = capfd.readouterr().err
    for option in ("--source", "--num-hosts", "--trust-checkpoint", "--max-shard-gb"):
        assert f"{option}: has no effect with --from-hf" in printed
    assert "--tensor-parallel" not in printed


@pytest.mark.parametrize("place", ["checkpoints/hf", "checkpoints/step_000007/hf", "checkpoints/step_000007/params/hf"])
def test_an_output_among_the_checkpoints_is_refused(place: str, runs, tmp_path: Path, capfd):
    before = sorted(runs[MOE].rglob("*"))
    assert run("--checkpoint", runs[MOE], "--out", runs[MOE] / place) == 2
    assert f"--out {runs[MOE] / place}: lies in {runs[MOE]}/checkpoints; name a directory outside" in " ".join(
        capfd.readouterr().err.split()
    )
    assert sorted(runs[MOE].rglob("*")) == before


@pytest.mark.parametrize("way", ["--checkpoint", "--from-hf"])
def test_where_a_disk_is_mounted_no_directory_can_appear(way: str, runs, tmp_path: Path, capfd, monkeypatch):
    source = runs[MOE] if way == "--checkpoint" else bf16_directory(runs, tmp_path)
    (tmp_path / "disk").mkdir()
    monkeypatch.setattr(Path, "is_mount", lambda path: path.name == "disk")
    assert run(way, source, "--out", tmp_path / "disk") == 2
    printed = " ".join(capfd.readouterr().err.split())
    assert f"--out {tmp_path}/disk: is where a disk is mounted; name a directory on it, for example" in printed
    assert not [path for path in tmp_path.iterdir() if path.name not in ("hf", "disk")]


def break_nothing(run_folder: Path) -> None:
    pass


def put_nan(run_folder: Path) -> None:
    params = {key: value.copy() for key, value in draw_params(MOE).items()}
    params["layers/down_LEFD"][1, 0, 5, 3] = np.nan
    shutil.rmtree(run_folder / "checkpoints")
    write_checkpoint(run_folder, MOE, params)


def flip_data(run_folder: Path) -> None:
    """One bit of a weight: every reader would take it for good."""
    (checkpoint_folder,) = run_folder.glob("checkpoints/*")
    write_checksums(checkpoint_folder)
    data = max(run_folder.glob("checkpoints/*/params/d/*"), key=lambda path: path.stat().st_size)
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)


def lose_file(run_folder: Path) -> None:
    (checkpoint_folder,) = run_folder.glob("checkpoints/*")
    write_checksums(checkpoint_folder)
    max(run_folder.glob("checkpoints/*/params/d/*"), key=lambda path: path.stat().st_size).unlink()


def cut_data(run_folder: Path) -> None:
    data = max(run_folder.glob("checkpoints/*/params/d/*"), key=lambda path: path.stat().st_size)
    data.write_bytes(data.read_bytes()[:-2000])


def claim_other_shape(run_folder: Path) -> None:
    meta = next(run_folder.glob("checkpoints/*/meta/metadata"))
    meta.write_text(meta.read_text().replace('"expert_width": 128', '"expert_width": 256'))


def lose_tokenizer(run_folder: Path) -> None:
    shutil.rmtree(run_folder / "tokenizer")


def lose_model(run_folder: Path) -> None:
    (run_folder / "config.toml").write_text('[model]\npath = "/nowhere"\n')


def other_source(run_folder: Path) -> None:
    (run_folder / "source").mkdir()
    (run_folder / "source/config.json").write_text(json.dumps(to_hf_config(DENSE)))


def source_without_a_field(run_folder: Path) -> None:
    (run_folder / "source").mkdir()
    config = {key: value for key, value in to_hf_config(MOE).items() if key != "num_experts_per_tok"}
    (run_folder / "source/config.json").write_text(json.dumps(config))


def other_class(run_folder: Path) -> None:
    (run_folder / "source").mkdir()
    config = to_hf_config(MOE) | {"architectures": ["LlamaForCausalLM"]}
    (run_folder / "source/config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("damage", "args", "expected"),
    [
        (put_nan, [], "model.layers.1.mlp.experts.0.down_proj.weight: holds NaN"),
        (cut_data, [], "damaged"),
        (flip_data, [], "damaged or gone since the run wrote it"),
        (lose_file, [], "damaged or gone since the run wrote it"),
        (claim_other_shape, [], "the architecture says (2, 3, 160, 256)"),
        (lose_tokenizer, [], "no tokenizer.json"),
        (lose_model, [], "model.path='/nowhere' has no config.json here; give --source"),
        (other_source, [], "width=96, the checkpoint has 160"),
        (source_without_a_field, [], "num_experts_per_tok=None: expected an integer"),
        (break_nothing, ["--host-index", "3"], "--host-index 3: must be 0..0"),
        (break_nothing, ["--threads", "0"], "--threads 0"),
        (break_nothing, ["--tensor-parallel", "3"], "must divide num_heads=8"),
        (other_class, [], "architectures=['LlamaForCausalLM']: vLLM chooses the model class by it"),
        (break_nothing, ["--source", "/nowhere"], "/nowhere/config.json: cannot be read"),
    ],
)
def test_bad_input_is_one_message_and_leaves_nothing(damage, args, expected, tmp_path: Path, capfd):
    write_checkpoint(tmp_path / "run", MOE, draw_params(MOE))
    damage(tmp_path / "run")
    assert run("--checkpoint", tmp_path / "run", "--out", tmp_path / "out", *ONE_MB, *args) == 2
    error = capfd.readouterr().err
    assert expected in error
    assert "Traceback" not in error
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_what_is_no_checkpoint_is_refused_with_the_option(tmp_path: Path, capfd):
    assert run("--checkpoint", tmp_path, "--out", tmp_path / "out") == 2
    assert f"--checkpoint {tmp_path}: no checkpoint in there" in " ".join(capfd.readouterr().err.split())


def test_the_files_of_a_checkpoint_are_compared_unless_it_is_trusted(tmp_path: Path, capfd):
    """Each host looks at a share: together they have looked at all before the directory appears."""
    write_checkpoint(tmp_path / "run", MOE, draw_params(MOE))
    args = ("--checkpoint", tmp_path / "run", *ONE_MB)
    assert run(*args, "--out", tmp_path / "no-sums") == 0
    assert "checked   no file of the checkpoint: step_000007 has no checksums.json" in capfd.readouterr().out
    (checkpoint_folder,) = (tmp_path / "run").glob("checkpoints/*")
    write_checksums(checkpoint_folder)
    num_files = len(list(checkpoint_folder.rglob("params/**/*"))) - len(list(checkpoint_folder.rglob("params/**/")))
    assert run(*args, "--out", tmp_path / "checked") == 0
    assert re.search(r"checked   \d+ files of the checkpoint have the checksums", capfd.readouterr().out)
    files = sorted(path for path in (checkpoint_folder / "params").rglob("*") if path.is_file())
    for file in (files[0], files[len(files) // 2], files[-1]):
        content = file.read_bytes()
        file.write_bytes(content + b"\0")  # nothing else would notice
        codes = [run(*args, "--out", tmp_path / "shared", "--num-hosts", 2, "--host-index", host) for host in range(2)]
        assert 2 in codes, file  # the other host does not look at it, but it may read it
        assert f"{file}: damaged" in " ".join(capfd.readouterr().err.split())
        assert not (tmp_path / "shared").exists()
        shutil.rmtree(tmp_path / ".shared.converting", ignore_errors=True)
        file.write_bytes(content)
    assert num_files > 2
    file = max((checkpoint_folder / "params" / "d").iterdir(), key=lambda path: path.stat().st_size)
    file.write_bytes(file.read_bytes() + b"\0")
    assert run(*args, "--out", tmp_path / "trusted", "--trust-checkpoint") == 0
    assert "checked   no file of the checkpoint: --trust-checkpoint" in capfd.readouterr().out


@pytest.mark.parametrize("num_bytes", [20_000, 150_000])
def test_a_full_disk_is_said_and_leaves_nothing(num_bytes: int, runs, tmp_path: Path, capfd):
    hf = bf16_directory(runs, tmp_path)
    with full_disk(num_bytes):
        assert run("--checkpoint", runs[MOE], "--out", tmp_path / "out") == 1
        assert run("--from-hf", hf, "--out", tmp_path / "back") == 1
    printed = " ".join(capfd.readouterr().err.split())
    for name in ("out", "back"):
        assert f"failed: --out {tmp_path / name}: cannot be written (File too large)" in printed
    assert printed.count("what was written is removed. Free disk space, or name a directory on another disk") == 2
    assert ".converting" not in printed
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_a_disk_that_fills_up_at_the_end_leaves_nothing(tmp_path: Path, capfd):
    """All tensors are there, the files beside them do not fit."""
    write_checkpoint(tmp_path / "run", MOE, draw_params(MOE))
    with (tmp_path / "run/tokenizer/tokenizer.json").open("a") as file:
        file.write(" " * 1_000_000)
    with full_disk(900_000):
        assert run("--checkpoint", tmp_path / "run", "--out", tmp_path / "out", *ONE_MB) == 1
    assert f"--out {tmp_path}/out: cannot be written (File too large)" in " ".join(capfd.readouterr().err.split())
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize(
    ("value", "fmt", "expected"),
    [
        (np.nan, "float32", "holds NaN or infinity; fetch the model again"),
        (-np.inf, "bf16", "holds NaN or infinity; fetch the model again"),
        (3.4e38, "bf16", "holds values beyond bfloat16; use --format float32"),
    ],
)
def test_weights_that_are_not_finite_become_no_checkpoint(value: float, fmt: str, expected: str, tmp_path: Path, capfd):
    params = draw_params(MOE)
    write_checkpoint(tmp_path / "run", MOE, params)
    assert run("--checkpoint", tmp_path / "run", "--out", tmp_path / "hf", "--format", "float32", *ONE_MB) == 0
    edit(tmp_path / "hf", with_value("model.layers.1.mlp.experts.0.down_proj.weight", set_first(value)))
    assert run("--from-hf", tmp_path / "hf", "--out", tmp_path / "back", "--format", fmt) == 2
    printed = " ".join(capfd.readouterr().err.split())
    assert f"model.layers.1.mlp.experts.0.down_proj.weight: {expected}" in printed
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "run"]


def test_a_directory_without_tokenizer_is_converted_only_as_such(runs, tmp_path: Path, capfd):
    hf = bf16_directory(runs, tmp_path)
    (hf / "tokenizer.json").unlink()
    assert run("--from-hf", hf, "--out", tmp_path / "back") == 2
    assert f"--from-hf {hf}: has no tokenizer.json; give --without-tokenizer" in " ".join(
        capfd.readouterr().err.split()
    )
    assert run("--from-hf", hf, "--out", tmp_path / "back", "--without-tokenizer") == 0


@pytest.mark.parametrize("way", ["--checkpoint", "--from-hf"])
def test_a_disk_that_is_too_full_is_said_in_fitting_units(way: str, runs, tmp_path: Path, capfd, monkeypatch):
    source = runs[MOE] if way == "--checkpoint" else bf16_directory(runs, tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2500))
    assert run(way, source, "--out", tmp_path / "out") == 2
    printed = " ".join(capfd.readouterr().err.split())
    assert re.search(rf"--out {tmp_path}/out: [\d.]+ (kB|MB) are needed and 2.50 kB are free; free disk space", printed)
    assert not [path for path in tmp_path.iterdir() if path.name != "hf"]


@pytest.mark.parametrize(
    ("num_bytes", "shown"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (999_499, "999 kB"), (999_500, "1.00 MB"), (4.56e11, "456 GB")],
)
def test_amounts_have_three_digits(num_bytes: float, shown: str):
    assert shown_bytes(num_bytes) == shown


@pytest.mark.parametrize("way", ["--checkpoint", "--from-hf"])
@pytest.mark.parametrize("place", ["a-file", "no-room"])
def test_an_output_that_cannot_be_made_is_named_and_not_the_folder_beside_it(
    way: str, place: str, runs, tmp_path: Path, capfd
):
    source = runs[MOE] if way == "--checkpoint" else bf16_directory(runs, tmp_path)
    (tmp_path / "a-file").write_text("")
    out = {"a-file": tmp_path / "a-file" / "below" / "out", "no-room": Path("/sys/no/out")}[place]
    words = {"a-file": f"cannot be made, {tmp_path}/a-file is a file", "no-room": "cannot be made in /sys ("}[place]
    assert run(way, source, "--out", out) == 2
    printed = " ".join(capfd.readouterr().err.split())
    assert f"--out {out}: {words}" in printed
    assert ".converting" not in printed


def test_an_existing_output_is_not_touched(runs, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    assert run("--checkpoint", runs[MOE], "--out", tmp_path / "out") == 2
    assert run("--from-hf", bf16_directory(runs, tmp_path), "--out", tmp_path / "out") == 2
    assert capfd.readouterr().err.count("exists already") == 2
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]
