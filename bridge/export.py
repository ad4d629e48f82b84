"""What vLLM gets of a model: the name, dtype and shape of every tensor, its config.json, and the tensors of live weights.

The one source of names, dtypes, shapes and the list of what is not quantised, for files and for live weight sync alike
(step 14 of docs/walk.md). Knows neither files nor HTTP.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from bridge.fp8 import NonFiniteWeight, quantise
from bridge.names import hf_slices, to_hf
from rl_jax.axes import RULES
from rl_jax.config import ConfigError, refuse
from rl_jax.models.architecture import Architecture, from_hf_config, to_hf_config
from rl_jax.models.fp8_rule import BLOCK, Format, fp8_block
from rl_jax.models.schema import Param, Params, flat, flat_table

TensorType = Literal["F32", "BF16", "F8_E4M3"]
DTYPES: dict[TensorType, np.dtype] = {
    "F32": np.dtype(np.float32),
    "BF16": np.dtype(jnp.bfloat16),
    "F8_E4M3": np.dtype(jnp.float8_e4m3fn),
}
"""Safetensors word -> NumPy dtype."""


@dataclass(frozen=True, kw_only=True)
class ExportTensor:
    """One tensor of an export.

    Example: ExportTensor(name="model.layers.3.self_attn.q_proj.weight_scale_inv", dtype="F32", shape=(4, 2),
    param="layers/wq_LDKQH", index=(3,), role="scale") holds the block scales of layer 3's query projection.
    """

    name: str
    """Hugging Face name."""
    dtype: TensorType
    """Dtype in the words of safetensors."""
    shape: tuple[int, ...]
    param: str
    """Key of the parameter in flat_table."""
    index: tuple[int, ...]
    """Which slice of the parameter: layer, or layer and expert."""
    role: Literal["weight", "scale"]

    @property
    def nbytes(self) -> int:
        """Bytes in a file."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


def export_table(arch: Architecture, fmt: Format) -> tuple[ExportTensor, ...]:
    """Return every tensor of an export, a scale directly after its weight, in the order of the parameter table."""
    plain: TensorType = "F32" if fmt == "float32" else "BF16"
    tensors = []
    for key, param in flat_table(arch).items():
        is_fp8 = fp8_block(arch, fmt, key) is not None
        for index, name in hf_slices(param):
            one = ExportTensor(
                name=name,
                dtype="F8_E4M3" if is_fp8 else plain,
                shape=param.hf_shape,
                param=key,
                index=index,
                role="weight",
            )
            tensors.append(one)
            if is_fp8:
                tensors.append(_scale_of(one, fmt))
    return tuple(tensors)


def _scale_of(weight: ExportTensor, fmt: Format) -> ExportTensor:
    rows, columns = weight.shape
    shape = (-(-rows // BLOCK), -(-columns // BLOCK)) if fmt == "fp8-block" else (rows, 1)
    name = weight.name + ("_scale_inv" if fmt == "fp8-block" else "_scale")
    return dataclasses.replace(weight, name=name, dtype="F32", shape=shape, role="scale")


def ignore_list(arch: Architecture, fmt: Format) -> list[str]:
    """Return the modules that vLLM must not take for quantised: every matrix that has no scale."""
    table = export_table(arch, fmt)
    quantised = {tensor.name.rpartition("_scale")[0] for tensor in table if tensor.role == "scale"}
    weights = [tensor for tensor in table if tensor.role == "weight" and len(tensor.shape) == 2]
    ignored = [tensor.name.removesuffix(".weight") for tensor in weights if tensor.name not in quantised]
    # A tied head has no tensor of its own; vLLM still builds the module.
    return [*ignored, *(["lm_head"] if arch.tie_embeddings else [])]


def export_config(arch: Architecture, fmt: Format, source: Mapping[str, object] | None = None) -> dict[str, object]:
    """Return the content of config.json: the source's own fields, with dtype and quantization_config of the export.

    Args:
        source: config.json that the model came with; None = made from the architecture.
    Raises:
        ConfigError: the source lacks a field, or is of another architecture.
    """
    if source is None:
        config = to_hf_config(arch)
    else:
        config = {k: v for k, v in source.items() if k not in ("quantization_config", "torch_dtype")}
        refuse(_source_faults(arch, config))
    config["dtype"] = "float32" if fmt == "float32" else "bfloat16"
    if fmt in ("fp8-block", "fp8-channel"):
        config["quantization_config"] = _quantization_config(arch, fmt)
    return config


def _source_faults(arch: Architecture, source: Mapping[str, object]) -> list[str]:
    wanted, given = to_hf_config(arch)["architectures"], source.get("architectures")
    faults = [] if given == wanted else [f"architectures={given!r}: vLLM chooses the model class by it; use {wanted!r}"]
    try:
        found = from_hf_config(source)
    except KeyError as error:
        return [*faults, f"{error}: missing"]
    except ConfigError as error:
        return [*faults, *error.faults]
    names = [f.name for f in dataclasses.fields(Architecture) if getattr(found, f.name) != getattr(arch, f.name)]
    differ = [f"{n}={getattr(found, n)!r}, the checkpoint has {getattr(arch, n)!r}" for n in names]
    return [*faults, *differ]


def _quantization_config(arch: Architecture, fmt: Format) -> dict[str, object]:
    if fmt == "fp8-block":
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            "scale_fmt": "ue8m0",
            "modules_to_not_convert": ignore_list(arch, fmt),
        }
    eight_bits = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": eight_bits | {"dynamic": False, "strategy": "channel"},
        "input_activations": eight_bits | {"dynamic": True, "strategy": "token"},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ignore_list(arch, fmt),
    }


def export_arrays(arch: Architecture, params: Params, fmt: Format) -> Iterator[tuple[ExportTensor, np.ndarray]]:
    """Yield every tensor of live weights in the order of export_table; the bytes are those of a converted checkpoint.

    Quantised on the device inside jit, one layer of one parameter at a time; the host holds that much. On several
    hosts all of them must run this together.

    Args:
        params: float32, sharded on a mesh or on one device.
    Raises:
        NonFiniteWeight: naming the tensor.
    """
    values = flat(params)
    rows = {(t.param, t.index, t.role): t for t in export_table(arch, fmt)}
    for key, param in flat_table(arch).items():
        block = fp8_block(arch, fmt, key)
        for layer in range(param.dims.get("L", 1)):
            arrays = [np.asarray(a) for a in _device_layer(values[key], layer, param, block, fmt)]
            for index, name in hf_slices(param):
                if index and index[0] != layer:
                    continue
                one = tuple(a[index[1:]] for a in arrays)
                if not one[-1].all():
                    raise NonFiniteWeight(name)
                for role, array in zip(("weight", "scale"), one[:-1], strict=False):
                    yield rows[key, index, role], array


@functools.partial(jax.jit, static_argnames=("param", "block", "fmt"))
def _device_layer(
    value: jax.Array, layer: int | jax.Array, param: Param, block: tuple[int, int] | None, fmt: Format
) -> tuple[jax.Array, ...]:
    """Return one layer of a parameter as Hugging Face stores it: weight, scale if quantised, and is it finite."""
    piece = jax.lax.dynamic_index_in_dim(value, layer, 0, keepdims=False) if "L" in param.stacked else value
    has_experts = "E" in param.stacked
    one = functools.partial(_as_stored, param=param, block=block, fmt=fmt)
    convert = jax.vmap(one) if has_experts else one
    mesh = jax.typeof(value).sharding.mesh
    if mesh.empty:
        return convert(piece)
    # Blocks reach across shards: each device gets the whole matrices of its experts, 4 bytes an element.
    experts = PartitionSpec(*([RULES["E"]] if has_experts else []))
    piece = jax.sharding.reshard(piece, NamedSharding(mesh, experts))
    out = jax.shard_map(convert, mesh=mesh, in_specs=experts, out_specs=experts)(piece)
    # Every host gets all of it, 1 byte an element if quantised.
    return tuple(jax.sharding.reshard(a, NamedSharding(mesh, PartitionSpec())) for a in out)


def _as_stored(piece: jax.Array, param: Param, block: tuple[int, int] | None, fmt: Format) -> tuple[jax.Array, ...]:
    tensor = to_hf(param, piece)
    if block is None:
        value = tensor.astype(jnp.float32 if fmt == "float32" else jnp.bfloat16)
        return value, jnp.isfinite(value).all()
    weight, scale = quantise(tensor, block)
    return weight, scale, jnp.isfinite(scale).all()
