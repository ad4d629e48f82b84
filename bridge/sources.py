"""Where the files beside the weights come from: config.json, generation config, tokenizer, chat template."""

import json
import tomllib
from dataclasses import dataclass
from pathlib import Path

from rl_jax.config import ConfigError

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
)
"""Files that are carried along as they are."""
SOURCE_FOLDER = "source"
"""Folder in a converted checkpoint with the config.json that the model came with."""


@dataclass(frozen=True)
class Source:
    """The files beside the weights of a checkpoint."""

    config: dict[str, object] | None
    """The model's own config.json, None for a model that was made from scratch."""
    config_from: str
    """Where that is, for messages and the report."""
    copies: tuple[Path, ...]
    """Tokenizer and generation files."""


def find_source(checkpoint: Path, given: Path | None, without_tokenizer: bool) -> Source:
    """Find the files beside the weights of a checkpoint.

    The config is that of `given`, else of the checkpoint's folder `source`, else of the run's model.path; a run whose
    config names no path made its model from scratch. The tokenizer is that of `given`, else the run's own.

    Args:
        checkpoint: a folder step_....
        given: --source, a Hugging Face directory.
    Raises:
        ConfigError: something is not there.
    """
    run = checkpoint.parent.parent
    config, config_from = _find_config(run, given)
    if without_tokenizer:
        return Source(config, config_from, ())
    places = [place for place in (given, run / "tokenizer") if place is not None]
    folder = next((place for place in places if (place / "tokenizer.json").is_file()), None)
    if folder is None:
        looked = " and ".join(str(place) for place in places)
        fault = f"no tokenizer.json in {looked}; give --source HF_DIR, or --without-tokenizer for weights alone"
        raise ConfigError([fault])
    return Source(config, config_from, tuple(carried_files(folder)))


def carried_files(folder: Path) -> list[Path]:
    """Return the tokenizer and generation files of a directory."""
    return [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]


def read_config(folder: Path) -> dict[str, object]:
    """Return the content of a config.json.

    Raises:
        ConfigError: it cannot be read.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read ({error.strerror})"]) from error
    except ValueError as error:
        raise ConfigError([f"{path}: not valid JSON ({error})"]) from error
    if not isinstance(config, dict):
        raise ConfigError([f"{path}: expected a JSON object"])
    return config


def _find_config(run: Path, given: Path | None) -> tuple[dict[str, object] | None, str]:
    if given is not None:
        return read_config(given), str(given / "config.json")
    if (run / SOURCE_FOLDER / "config.json").is_file():
        return read_config(run / SOURCE_FOLDER), str(run / SOURCE_FOLDER / "config.json")
    path = _model_path(run / "config.toml")
    if not path:
        return None, "the architecture (the model was made from scratch)"
    folder = Path(path)
    if not (folder / "config.json").is_file():
        fault = f"{run / 'config.toml'}: model.path={path!r} has no config.json here; give --source HF_DIR"
        raise ConfigError([fault])
    return read_config(folder), str(folder / "config.json")


def _model_path(config: Path) -> str:
    if not config.is_file():
        return ""
    try:
        model = tomllib.loads(config.read_text(encoding="utf-8")).get("model", {})
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError([f"{config}: not valid TOML ({error})"]) from error
    return str(model.get("path", ""))
