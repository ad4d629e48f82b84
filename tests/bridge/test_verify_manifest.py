"""bridge/verify_config.py and verify_manifest.py: whatever differs from what the conversion wrote is named, once."""

import json
import shutil
from pathlib import Path

import pytest
from exports import EXPERT, edit, edit_config, findings, set_first, with_value

from bridge.manifest import FILE
from bridge.verify_files import Finding

RESTORE = "put the field back as it was, or convert again"


def set_to(**fields: object):
    return lambda config: config.update(fields)


def quantised(**fields: object):
    return lambda config: config["quantization_config"].update(fields)


def lose(key: str):
    return lambda config: config.pop(key)


def lose_quantised(key: str):
    return lambda config: config["quantization_config"].pop(key)


@pytest.mark.parametrize(
    ("change", "where", "expected", "got"),
    [
        (set_to(rope_theta=5e5), "rope_theta", "10000.0, as converted", "500000.0"),
        (set_to(rms_norm_eps=1e-5), "rms_norm_eps", "1e-06, as converted", "1e-05"),
        (set_to(num_experts_per_tok=1), "num_experts_per_tok", "2, as converted", "1"),
        (set_to(norm_topk_prob=False), "norm_topk_prob", "true, as converted", "false"),
        (set_to(max_position_embeddings=4096), "max_position_embeddings", "512, as converted", "4096"),
        (set_to(attention_dropout=0.0), "attention_dropout", "no such field, as converted", "0.0"),
        (lose("hidden_act"), "hidden_act", '"silu", as converted', "no such field"),
        (
            lambda config: config["rope_parameters"].update(factor=2.0),
            "rope_parameters.factor",
            "no such field, as converted",
            "2.0",
        ),
    ],
)
def test_every_field_of_the_config_is_compared_with_the_manifest(copy: Path, change, where: str, expected, got):
    edit_config(copy, change)
    assert findings(copy) == [Finding("config", f"config.json: {where}", expected, got, RESTORE)]


@pytest.mark.parametrize("agreeing", [False, True])
@pytest.mark.parametrize(
    ("change", "where", "expected", "got"),
    [
        (
            set_to(architectures=["LlamaForCausalLM"]),
            "architectures",
            '["Qwen3MoeForCausalLM"]',
            '["LlamaForCausalLM"]',
        ),
        (set_to(dtype="float16"), "dtype", '"bfloat16"', '"float16"'),
        (quantised(fmt="e5m2"), "quantization_config.fmt", '"e4m3"', '"e5m2"'),
        (quantised(activation_scheme="static"), "quantization_config.activation_scheme", '"dynamic"', '"static"'),
        (lose_quantised("scale_fmt"), "quantization_config.scale_fmt", '"ue8m0"', "no such field"),
        (quantised(kv_cache_scheme="e4m3"), "quantization_config.kv_cache_scheme", "no such field", '"e4m3"'),
    ],
)
def test_what_the_format_demands_needs_no_manifest(copy: Path, change, where: str, expected, got, agreeing: bool):
    edit_config(copy, change, agreeing=agreeing)
    (found,) = findings(copy)
    assert (found.check, found.where, found.expected, found.got) == ("config", f"config.json: {where}", expected, got)


def test_a_model_of_another_shape_is_told_first_by_its_config(copy: Path):
    edit_config(copy, set_to(moe_intermediate_size=256))
    found = findings(copy)
    assert (found[0].check, found[0].where) == ("config", "config.json: moe_intermediate_size")
    assert any(f.check == "headers" for f in found)


@pytest.mark.parametrize(
    "file", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"]
)
def test_files_beside_the_weights_have_checksums(copy: Path, file: str):
    content = (copy / file).read_bytes()
    (copy / file).write_bytes(content[:-2] + b"  ")
    (found,) = findings(copy)
    assert (found.check, found.where) == ("checksums", file)
    assert found.expected.startswith(f"{len(content)} bytes, ")
    assert found.got.endswith(": other bytes")
    (copy / file).unlink()
    (found,) = findings(copy)
    assert (found.where, found.expected, found.got) == (file, f"a file of {len(content)} bytes", "missing")


def test_a_file_that_vllm_would_read_may_not_be_added(copy: Path):
    (copy / "added_tokens.json").write_text("{}")
    (copy / "README.md").write_text("nobody reads this")
    (found,) = findings(copy)
    assert (found.check, found.where, found.remedy) == ("checksums", "added_tokens.json", "remove it")


@pytest.mark.parametrize("file", ["config.json", "model.safetensors.index.json"])
def test_other_bytes_of_the_same_content_are_other_bytes(copy: Path, file: str):
    (copy / file).write_text(json.dumps(json.loads((copy / file).read_text())))
    (found,) = findings(copy)
    assert (found.check, found.where) == ("checksums", file)


@pytest.mark.parametrize("end", [b"", b"tail"])
def test_a_file_of_tensors_has_a_checksum_of_its_header_and_a_length(copy: Path, end: bytes):
    file = min(copy.glob("*.safetensors"))
    content = file.read_bytes()
    file.write_bytes((content if end else content.replace(b'{"format":"pt"}', b'{"format":"np"}')) + end)
    (found,) = findings(copy)
    assert (found.check, found.where) == ("checksums", file.name)
    assert "another header, or bytes behind the last tensor; the tensors are right" in found.got


def edit_manifest(folder: Path, change) -> None:
    manifest = json.loads((folder / FILE).read_text())
    change(manifest)
    (folder / FILE).write_text(json.dumps(manifest))


def entry_of(manifest: dict, name: str) -> dict:
    return next(entry for entry in manifest["tensors"] if entry["name"] == name)


def test_an_edited_manifest_says_so_and_is_to_be_mended_first(copy: Path):
    name = EXPERT + "gate_proj.weight"
    edit_manifest(copy, lambda manifest: entry_of(manifest, name).update(checksum="0" * 64))
    first, second = findings(copy)
    assert (first.check, first.where, first.got) == ("manifest", FILE, "changed since: its own checksum does not fit")
    assert (second.where, second.expected) == (name, "0" * 12)
    assert second.remedy == f"bring {FILE} back first; it may be this entry that is wrong, and not the file"
    edit(copy, with_value(name, set_first(1.0)), agreeing=False)
    edit_manifest(copy, lambda manifest: manifest.pop("sha256"))
    assert [f.where for f in findings(copy)] == [FILE, name]


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("shape", [64, 256], "F8_E4M3 [64, 256] in FILE"),
        ("dtype", "BF16", "BF16 [128, 128] in FILE"),
        ("file", "model-00099-of-00099.safetensors", "F8_E4M3 [128, 128] in model-00099-of-00099.safetensors"),
    ],
)
def test_where_the_manifest_says_a_tensor_is_and_how_large(copy: Path, field: str, value: object, expected: str):
    name = EXPERT + "gate_proj.weight"
    file = entry_of(json.loads((copy / FILE).read_text()), name)["file"]
    edit_manifest(copy, lambda manifest: entry_of(manifest, name).update({field: value}))
    (found,) = [f for f in findings(copy) if f.where == name]
    assert (found.check, found.expected) == ("manifest", expected.replace("FILE", file))
    assert found.got == f"F8_E4M3 [128, 128] in {file}"


def test_a_directory_without_a_manifest_cannot_pass(copy: Path):
    (copy / FILE).unlink()
    (found,) = findings(copy)
    assert (found.check, found.where) == ("manifest", FILE)


@pytest.mark.parametrize("content", ["[]", "{", '{"version": 1, "format": "fp8-block", "algorithm": "sha256"}'])
def test_a_manifest_of_any_kind_is_a_finding(copy: Path, content: str):
    (copy / FILE).write_text(content)
    (found,) = findings(copy)
    assert found.got.startswith(f"{copy / FILE}: no manifest of this version")


def test_a_tensor_that_moved_to_another_file_is_named(copy: Path, tmp_path: Path):
    first, second = sorted(copy.glob("*.safetensors"))[:2]
    aside = tmp_path / "aside"
    shutil.move(first, aside)
    shutil.move(second, first)
    shutil.move(aside, second)
    found = {f.check for f in findings(copy)}
    assert found == {"index", "manifest"}
