"""python -m bridge.verify finds each way in which a directory can be wrong, and says where and what to do."""

import dataclasses
import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from exports import (
    EXPERT,
    SQUARE,
    against,
    convert_to,
    edit,
    edit_config,
    findings,
    set_first,
    swapped,
    with_value,
    without,
)
from references import DENSE, draw_params, write_checkpoint

from bridge import verify
from bridge.manifest import read_manifest
from bridge.verify_files import Finding, open_folder
from rl_jax.checksums import write_checksums
from rl_jax.models.fp8_rule import FORMATS


@pytest.fixture(scope="module")
def another(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model, one version later."""
    folder = tmp_path_factory.mktemp("later")
    write_checkpoint(folder, SQUARE, draw_params(SQUARE, seed=1), step=8)
    return convert_to(folder / "model", folder)


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_fresh_conversion_has_no_fault(fmt: str, tmp_path: Path):
    write_checkpoint(tmp_path, DENSE, draw_params(DENSE))
    made = convert_to(tmp_path / "model", tmp_path, fmt)
    assert findings(made) == []
    assert against(made, tmp_path) == []


def test_a_missing_expert_weight_is_named(copy: Path):
    edit(copy, without(EXPERT + "up_proj.weight"))
    assert Finding(
        "headers",
        EXPERT + "up_proj.weight",
        "F8_E4M3 [128, 128]",
        "missing",
        "convert the checkpoint again (python -m bridge.convert)",
    ) in findings(copy)


def test_a_missing_scale_is_named(copy: Path):
    name = EXPERT + "down_proj.weight_scale_inv"
    edit(copy, without(name))
    found = findings(copy)
    assert ("headers", name, "F32 [1, 1]", "missing") in [(f.check, f.where, f.expected, f.got) for f in found]
    assert {f.check for f in found} == {"headers", "index", "manifest"}


def test_a_swapped_gate_and_up_is_told_by_the_manifest(copy: Path):
    gate, up = EXPERT + "gate_proj.weight", EXPERT + "up_proj.weight"
    edit(copy, swapped(gate, up))
    found = findings(copy)
    assert [(f.check, f.where) for f in found] == [("checksums", gate), ("checksums", up)]
    assert found[0].got.endswith(f"the bytes of {up}: swapped?")


def test_a_swapped_gate_and_up_with_an_agreeing_manifest_is_told_by_the_checkpoint_alone(copy: Path, run_folder: Path):
    gate, up = EXPERT + "gate_proj.weight", EXPERT + "up_proj.weight"
    edit(copy, swapped(gate, up), agreeing=True)
    assert findings(copy) == []
    found = against(copy, run_folder)
    assert [(f.check, f.where) for f in found] == [("against", gate), ("against", up)]
    assert found[1].got.endswith(f"the bytes of {gate}: swapped?")


def test_a_transposed_matrix_is_told_by_its_shape(copy: Path):
    name = "model.layers.0.self_attn.q_proj.weight"
    edit(copy, with_value(name, lambda array: array.T))
    (found,) = [f for f in findings(copy) if f.check == "headers"]
    assert (found.where, found.expected) == (name, "F8_E4M3 [256, 128]")
    assert found.got.startswith("F8_E4M3 [128, 256] in model-")
    assert found.got.endswith(", transposed")


def test_a_transposed_square_matrix_is_told_by_its_bytes(copy: Path, run_folder: Path):
    name = EXPERT + "down_proj.weight"
    edit(copy, with_value(name, lambda array: array.T))
    (found,) = findings(copy)
    assert (found.check, found.where) == ("checksums", name)
    assert found.got.endswith("the transpose")
    (found,) = against(copy, run_folder)
    assert found.got.endswith("the transpose")


def test_bf16_where_fp8_belongs_is_named(copy: Path):
    name = EXPERT + "down_proj.weight"
    edit(copy, with_value(name, lambda array: array.astype(ml_dtypes.bfloat16)))
    (found,) = [f for f in findings(copy) if f.check == "headers"]
    assert (found.where, found.expected) == (name, "F8_E4M3 [128, 128]")
    assert found.got == f"BF16 [128, 128] in {open_folder(copy).tensors[name].file.name}", "a square is not transposed"


def forget_gates(config: dict) -> None:
    quantised = config["quantization_config"]
    kept = [name for name in quantised["modules_to_not_convert"] if not name.endswith("mlp.gate")]
    quantised["modules_to_not_convert"] = kept


def list_an_expert(config: dict) -> None:
    config["quantization_config"]["modules_to_not_convert"].append("model.layers.0.self_attn.o_proj")


def short_name(config: dict) -> None:
    config["quantization_config"]["modules_to_not_convert"].append("gate")


def other_key(config: dict) -> None:
    config["quantization_config"]["ignored_layers"] = ["lm_head"]


@pytest.mark.parametrize(
    ("change", "expected", "got"),
    [
        (forget_gates, "model.layers.0.mlp.gate (it has no scale)", "absent: vLLM would load it as FP8"),
        (
            list_an_expert,
            "model.layers.0.self_attn.o_proj absent (it has a scale)",
            "listed: vLLM would load its codes",
        ),
        (short_name, "full module names", "'gate', which names no module"),
        (other_key, "model.layers.0.mlp.gate (it has no scale)", "absent: vLLM would load it as FP8"),
    ],
)
def test_a_wrong_ignore_list_is_explained(copy: Path, change, expected: str, got: str):
    edit_config(copy, change)
    found = findings(copy)
    assert {f.check for f in found} == {"ignore list"}
    assert any(f.expected == expected and f.got.startswith(got) for f in found)


def test_a_list_of_patterns_is_read_as_vllm_reads_it(run_folder: Path, tmp_path: Path):
    made = convert_to(tmp_path / "model", run_folder, "fp8-channel")

    def listing(*names: str):
        return lambda config: config["quantization_config"].update(ignore=list(names))

    edit_config(made, listing("lm_head", "re:.*mlp.gate$", "model.embed_tokens"), agreeing=True)
    assert findings(made) == []
    edit_config(made, listing("lm_head", "model.embed_tokens", "re:.*gate.*"))
    assert "model.layers.0.mlp.experts.0.gate_proj absent (it has a scale)" in {f.expected for f in findings(made)}


def test_a_truncated_file_is_named_and_the_exit_code_is_1(copy: Path, capsys: pytest.CaptureFixture[str]):
    file = sorted(copy.glob("*.safetensors"))[1]
    file.write_bytes(file.read_bytes()[:-9])
    assert verify.main([str(copy), "--no-vllm"]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "do not serve this directory" in printed
    assert "ends at byte" in printed


def test_names_are_whole_in_a_narrow_window(copy: Path, capsys: pytest.CaptureFixture[str], monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    name = EXPERT + "gate_proj.weight"
    manifest = copy / "bridge_manifest.json"
    entries = json.loads(manifest.read_text())
    next(entry for entry in entries["tensors"] if entry["name"] == name)["checksum"] = "0" * 64
    manifest.write_text(json.dumps(entries))
    assert verify.main([str(copy), "--no-vllm"]) == 1
    assert name in capsys.readouterr().out


@pytest.mark.parametrize("index", ["[]", '{"weight_map": {"a": 3}}', '{"metadata": {}, "weight_map": {}}', "{"])
def test_an_index_of_any_kind_is_a_finding(index: str, copy: Path, capsys: pytest.CaptureFixture[str]):
    (copy / "model.safetensors.index.json").write_text(index)
    assert verify.main([str(copy), "--no-vllm"]) == 1
    assert "what to do" in capsys.readouterr().out


def test_a_broken_pattern_is_a_finding(run_folder: Path, tmp_path: Path):
    made = convert_to(tmp_path / "model", run_folder, "fp8-channel")
    edit_config(made, lambda config: config["quantization_config"]["ignore"].append("re:("))
    assert "'re:(', which names no module" in {found.got for found in findings(made)}


def test_what_is_no_model_directory_is_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    for name in ("file", "empty", "absent"):
        assert verify.main([str(tmp_path / name), "--no-vllm"]) == 2
        assert f"{tmp_path / name}: no such directory, or nothing in it" in capsys.readouterr().err


def test_a_shard_of_another_version_is_one_finding(copy: Path, another: Path):
    file = sorted(copy.glob("*.safetensors"))[2]
    shutil.copy(another / file.name, file)
    (found,) = findings(copy)
    assert (found.check, found.where, found.expected) == ("checksums", file.name, "policy step 7")
    assert found.got.endswith(" of the bytes: a shard of another version?")


def test_another_version_as_a_whole_is_told_by_the_checkpoint(another: Path, run_folder: Path):
    assert findings(another) == []
    found = against(another, run_folder)
    weights = {name for name in open_folder(another).tensors if not name.endswith("_scale_inv")}
    assert weights <= {f.where for f in found}, "every weight differs, though few scales do"


def test_another_architecture_is_named_field_by_field(converted: Path, tmp_path: Path):
    write_checkpoint(tmp_path, DENSE, draw_params(DENSE))
    found = {f.where: (f.expected, f.got) for f in against(converted, tmp_path)}
    assert found["config.json: family"] == ("'llama' of step_000007", "'qwen3_moe'")
    assert found["config.json: num_layers"] == ("3 of step_000007", "2")
    assert "config.json: max_positions" in found
    assert {where.split(":")[0] for where in found} == {"config.json"}, "the tensors are not compared"


def test_a_config_that_differs_in_no_shape_is_told_by_the_checkpoint(copy: Path, run_folder: Path):
    edit_config(copy, lambda config: config.update(rms_norm_eps=1e-5, num_experts_per_tok=1), agreeing=True)
    assert findings(copy) == []
    found = {f.where: (f.expected, f.got) for f in against(copy, run_folder)}
    assert found == {
        "config.json: norm_eps": ("1e-06 of step_000007", "1e-05"),
        "config.json: num_active_experts": ("2 of step_000007", "1"),
    }


def test_a_damaged_checkpoint_is_nothing_to_compare_with(converted: Path, tmp_path: Path, capsys):
    checkpoint = write_checkpoint(tmp_path / "run", SQUARE, draw_params(SQUARE))
    write_checksums(checkpoint)
    data = max(checkpoint.glob("params/d/*"), key=lambda path: path.stat().st_size)
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    assert verify.main([str(converted), "--no-vllm", "--against", str(checkpoint)]) == 2
    assert f"{data}: damaged or gone since the run wrote it" in " ".join(capsys.readouterr().err.split())


def test_what_is_no_checkpoint_is_bad_input(converted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for place in (tmp_path, tmp_path / "absent", converted):
        assert verify.main([str(converted), "--no-vllm", "--against", str(place)]) == 2
        printed = " ".join(capsys.readouterr().err.split())
        assert f"--against {place}: no whole checkpoint in there; give the folder of the run" in printed


@pytest.mark.parametrize(
    ("name", "change", "expected", "got"),
    [
        ("model.norm.weight", set_first(np.nan), "finite numbers", "1 of 128 are NaN or infinite"),
        (EXPERT + "up_proj.weight", set_first(np.nan), "finite numbers", "1 of 16384 are NaN or infinite"),
        (EXPERT + "up_proj.weight_scale_inv", set_first(0.3), "positive powers of two", "1 of 1 are not"),
        (EXPERT + "up_proj.weight_scale_inv", set_first(0.0), "positive powers of two", "1 of 1 are not"),
        (EXPERT + "up_proj.weight_scale_inv", set_first(-0.5), "positive powers of two", "1 of 1 are not"),
    ],
)
def test_values_that_no_model_has_are_found(copy: Path, name: str, change, expected: str, got: str):
    edit(copy, with_value(name, change), agreeing=True)
    (found,) = findings(copy)
    assert (found.check, found.where, found.expected, found.got) == ("values", name, expected, got)


def test_an_index_without_metadata_lacks_the_total_size(copy: Path):
    path = copy / "model.safetensors.index.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"metadata": None}))
    (found,) = findings(copy)
    total = sum(stored.nbytes for stored in open_folder(copy).tensors.values())
    assert (found.where, found.expected, found.got) == (f"{path.name}: metadata.total_size", f"{total} bytes", "None")


@pytest.mark.parametrize("max_shard_gb", [0.0001, 1.0])
def test_a_missing_index_is_named(max_shard_gb: float, run_folder: Path, tmp_path: Path):
    made = convert_to(tmp_path / "model", run_folder, max_shard_gb=max_shard_gb)
    num_files = len(list(made.glob("*.safetensors")))
    (made / "model.safetensors.index.json").unlink()
    (found,) = findings(made)
    assert (found.check, found.where, found.got) == ("index", "model.safetensors.index.json", "missing")
    assert found.expected.startswith(f"an index of {num_files} file(s)")


def test_one_file_with_the_plain_name_needs_no_index_unless_the_manifest_names_one(run_folder: Path, tmp_path: Path):
    made = convert_to(tmp_path / "model", run_folder, max_shard_gb=1.0)
    index = made / "model.safetensors.index.json"
    (made / "model-00001-of-00001.safetensors").rename(made / "model.safetensors")
    index.write_text(index.read_text().replace("model-00001-of-00001.safetensors", "model.safetensors"))
    manifest = read_manifest(made)
    renamed = tuple(dataclasses.replace(entry, file="model.safetensors") for entry in manifest.tensors)
    (shard,) = [entry for entry in manifest.files if entry.file == "model-00001-of-00001.safetensors"]
    others = [entry for entry in manifest.files if entry not in (shard,) and entry.file != index.name]
    manifest = dataclasses.replace(
        manifest, tensors=renamed, files=(dataclasses.replace(shard, file="model.safetensors"), *others)
    )
    (made / "bridge_manifest.json").write_text(manifest.to_json())
    (found,) = findings(made)
    assert (found.check, found.where, found.remedy) == ("index", index.name, "remove it")
    index.unlink()
    assert findings(made) == []


def test_an_index_that_lies_is_explained(copy: Path):
    path = copy / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["metadata"]["total_size"] += 1
    index["weight_map"]["model.norm.weight"] = "model-00001-of-00009.safetensors"
    shutil.copy(next(copy.glob("*.safetensors")), copy / "model-extra.safetensors")
    path.write_text(json.dumps(index))
    with pytest.raises(Exception, match=r"model-00001-of-00009.safetensors: missing"):
        open_folder(copy)
    index["weight_map"]["model.norm.weight"] = "model-00001-of-0000{}.safetensors".format(
        len(list(copy.glob("model-0*.safetensors")))
    )
    path.write_text(json.dumps(index))
    where = {f.where for f in findings(copy)}
    assert {
        "model.safetensors.index.json: metadata.total_size",
        "model.norm.weight",
        "model-extra.safetensors",
    } == where


def test_a_good_directory_passes_and_says_what_was_not_asked(converted: Path, capsys: pytest.CaptureFixture[str]):
    assert verify.main([str(converted), "--no-vllm"]) == 0
    assert "--against RUN" in capsys.readouterr().out
