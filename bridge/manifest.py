"""The manifest of an exported directory: which policy it is, its config, and a checksum of every file and tensor in it.

    {"version": 2, "format": "fp8-block", "policy_step": 181, "algorithm": "sha256",
     "config": {"architectures": ["Qwen3MoeForCausalLM"], ...},
     "files": [{"file": "config.json", "nbytes": 812, "checksum": "5e884898..."}, ...],
     "tensors": [
      {"name": "lm_head.weight", "dtype": "BF16", "shape": [264, 128], "file": "model-00001-of-00001.safetensors",
       "checksum": "9f86d081..."}, ...],
     "sha256": "2c26b46b..."}

A checksum of a tensor is that of its bytes alone, so it is the same in a file, in memory and on a wire. The last field
is the checksum of all others: a manifest that was edited says so.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rl_jax.config import ConfigError
from rl_jax.models.fp8_rule import FORMATS, Format

FILE = "bridge_manifest.json"
INDEX_FILE = "model.safetensors.index.json"
_VERSION = 2
_OWN_SUM = "sha256"


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """One file. Example: FileEntry(file="config.json", nbytes=812, checksum="5e884898...")."""

    file: str
    nbytes: int
    checksum: str
    """Hexadecimal sha256 of the bytes; of a safetensors file, those before the first tensor: each tensor has its own."""


@dataclass(frozen=True, kw_only=True)
class ManifestEntry:
    """One tensor; see the module for an example."""

    name: str
    dtype: str
    """In the words of safetensors."""
    shape: tuple[int, ...]
    file: str
    checksum: str
    """Hexadecimal sha256 of the bytes."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a directory holds."""

    format: Format
    policy_step: int
    """Step of the checkpoint it was made from."""
    config: Mapping[str, object]
    """Content of config.json."""
    files: tuple[FileEntry, ...]
    """All files but the manifest."""
    tensors: tuple[ManifestEntry, ...]
    is_edited: bool = field(default=False, compare=False)
    """Whether it was read from a file that does not have the checksum it names for itself."""

    def to_json(self) -> str:
        """Return the text of the file."""
        head = {
            "version": _VERSION,
            "format": self.format,
            "policy_step": self.policy_step,
            "algorithm": "sha256",
            "config": dict(self.config),
        }
        lists = {"files": [asdict(entry) for entry in self.files], "tensors": [asdict(entry) for entry in self.tensors]}
        rows = {name: ",\n".join(map(json.dumps, entries)) for name, entries in lists.items()}
        texts = "".join(f', "{name}": [\n{text}\n]' for name, text in rows.items())
        return f'{json.dumps(head)[:-1]}{texts}, "{_OWN_SUM}": "{_sum_of({**head, **lists})}"}}\n'


def read_manifest(directory: Path) -> Manifest:
    """Read the manifest of a directory.

    Raises:
        ConfigError: there is none, or it is not one.
    """
    path = directory / FILE
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        if raw["version"] != _VERSION or raw["format"] not in FORMATS or raw["algorithm"] != "sha256":
            raise ValueError(f"version {raw['version']}, format {raw['format']}, algorithm {raw['algorithm']}")
        return Manifest(
            format=raw["format"],
            policy_step=raw["policy_step"],
            config=dict(raw["config"]),
            files=tuple(FileEntry(**entry) for entry in raw["files"]),
            tensors=tuple(ManifestEntry(**entry | {"shape": tuple(entry["shape"])}) for entry in raw["tensors"]),
            is_edited=raw.get(_OWN_SUM) != _sum_of({key: raw[key] for key in raw if key != _OWN_SUM}),
        )
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read ({error.strerror}); convert the checkpoint again"]) from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError([f"{path}: no manifest of this version ({error!r}); convert the checkpoint again"]) from error


def _sum_of(content: Mapping[str, object]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def index_json(files: Mapping[str, Sequence[str]], total_bytes: int) -> str:
    """Return the text of model.safetensors.index.json; `files` is file -> tensor names, total_bytes without headers."""
    weight_map = {name: file for file, names in files.items() for name in names}
    index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    return json.dumps(index, indent=1) + "\n"
