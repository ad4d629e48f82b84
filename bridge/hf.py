"""Hugging Face directories: read one into sharded parameters, write one from them.

The parameter table decides every name and shape; a missing, extra or mis-shaped tensor is an error that names it.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
from jax.sharding import Mesh
from safetensors.numpy import save_file

from bridge.host_tensors import is_finite
from bridge.names import from_hf, hf_shapes, hf_slices, to_hf
from bridge.safetensors_reader import TensorFiles
from bridge.sources import carried_files
from rl_jax.config import ConfigError
from rl_jax.models.architecture import Architecture, to_hf_config
from rl_jax.models.schema import Param, Params, abstract_params, flat, flat_table, nested

_MAX_LISTED = 8


def load_params(directory: str | Path, arch: Architecture, mesh: Mesh) -> Params:
    """Read float32 parameters from a directory with one or many safetensors files, sharded on `mesh`.

    Each device's shard reads only the tensors of its own layers and experts. FP8 is dequantised.

    Raises:
        ConfigError: with every missing, extra or mis-shaped tensor; or the first one with a weight that is not finite.
    """
    files = check_tensors(directory, arch)
    table = flat_table(arch)
    abstract = flat(abstract_params(arch, mesh))
    params = {}
    for key, param in table.items():
        read = _reader(param, files)
        params[key] = jax.make_array_from_callback(param.sizes, abstract[key].sharding, read)
    return nested(params)


def save_params(
    directory: str | Path,
    arch: Architecture,
    params: Params,
    tokenizer_dir: str | Path | None = None,
    *,
    replace: bool = False,
) -> None:
    """Write config.json and one bfloat16 model.safetensors; the directory appears whole or not at all.

    Args:
        replace: an earlier directory of that name gives way to the new one.
    Raises:
        ConfigError: the directory exists, and replace is false.
    """
    target = Path(directory)
    if target.exists() and not replace:
        raise ConfigError([f"{target}: exists already; remove it, or name another directory"])
    aside = target.with_name(f".{target.name}.writing-{os.getpid()}")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    tensors = {}
    values = flat(params)
    for key, param in flat_table(arch).items():
        value = np.asarray(values[key])
        for index, name in hf_slices(param):
            tensors[name] = np.ascontiguousarray(to_hf(param, value[index])).astype(ml_dtypes.bfloat16)
    save_file(tensors, aside / "model.safetensors", metadata={"format": "pt"})
    (aside / "config.json").write_text(json.dumps(to_hf_config(arch) | {"dtype": "bfloat16"}, indent=1))
    for path in carried_files(Path(tokenizer_dir)) if tokenizer_dir is not None else ():
        shutil.copy(path, aside / path.name)
    if target.exists():
        before = target.with_name(f".{target.name}.replaced-{os.getpid()}")
        target.rename(before)
        aside.rename(target)
        shutil.rmtree(before)
    else:
        aside.rename(target)


def check_tensors(directory: str | Path, arch: Architecture) -> TensorFiles:
    """Return the files of a directory that holds the tensors of `arch`, by its headers alone.

    Raises:
        ConfigError: with every missing, extra or mis-shaped tensor.
    """
    files = TensorFiles(directory)
    expected = hf_shapes(arch)
    ignored = {"lm_head.weight"} if arch.tie_embeddings else set()
    known = [n for n in files.weights() if n not in ignored and not n.endswith("rotary_emb.inv_freq")]
    faults = _listed(directory, "missing tensor", [name for name in expected if name not in files])
    faults += _listed(directory, "extra tensor", [name for name in known if name not in expected])
    wrong = []
    for name, shape in expected.items():
        if name in files:
            got = files.tensors[name].shape
            if got != shape:
                wrong.append(f"{name} has shape {got}, config.json says {shape}")
            elif fault := files.fault(name):
                wrong.append(fault)
    faults += _listed(directory, "wrong tensor", wrong)
    if faults:
        raise ConfigError(faults)
    return files


def _listed(directory: str | Path, what: str, names: list[str]) -> list[str]:
    shown = [f"{directory}: {what} {name}" for name in names[:_MAX_LISTED]]
    more = len(names) - _MAX_LISTED
    return [*shown, f"{directory}: and {more} more of this kind"] if more > 0 else shown


def _finite(files: TensorFiles, name: str) -> np.ndarray:
    """Read a weight in float32.

    Raises:
        ConfigError: it holds NaN or infinity.
    """
    value = files.read(name).astype(np.float32)
    if not is_finite(value):
        where = f"{files.tensors[name].file}: {name}"
        raise ConfigError([f"{where}: holds NaN or infinity; fetch the model again, or use another"])
    return value


def _reader(param: Param, files: TensorFiles) -> Callable[[tuple[slice, ...] | None], np.ndarray]:
    """Return the callback that reads one device's slice of a parameter."""
    letters = param.axes.split()
    stacked = [letters.index(letter) for letter in param.stacked]

    def read(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None, "JAX asks for slices of a sharded array"
        inner = tuple(part for dim, part in enumerate(index) if dim not in stacked)
        ranges = [range(*index[dim].indices(param.sizes[dim])) for dim in stacked]
        pieces = [
            from_hf(param, _finite(files, name))[inner]
            for position, name in hf_slices(param)
            if all(at in wanted for at, wanted in zip(position, ranges, strict=True))
        ]
        shape = [len(range(*part.indices(size))) for part, size in zip(index, param.sizes, strict=True)]
        return np.stack(pieces).reshape(shape)

    assert stacked == list(range(len(stacked))), f"{param.axes}: stacked dimensions must come first"
    return read
