"""Reads the weights that a model computes with back into the tensors of the checkpoint, by vLLM's own name maps.

A checkpoint tensor is a parameter of the same name, rows of a fused one (qkv_proj, gate_up_proj), or a slice of the
stacked experts. Comparing happens in the dtype that is served; what a kernel keeps in a layout of its own cannot be
read back, and is listed as such.
"""

import re
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.platforms import current_platform

from bridge.wire import Shadow, Spec

_TORCH = {
    **{"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "BOOL": torch.bool},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8},
}
_SIGNED = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.(\w+)")


@dataclass(frozen=True)
class ReadBack:
    """What the comparison of served weights with a version's checkpoint found.

    Attributes:
        version, digest: of the checkpoint bytes compared with; equal to the sender's where they are the same.
        num_equal: tensors that are served as they are.
        different: names of tensors that are not.
        unreadable: names of tensors that a kernel keeps in a layout of its own, or that TP has cut.

    Example: ReadBack(17, "9f3c..", num_tensors=136, num_equal=136, different=[], unreadable=[]).
    """

    version: int | None
    digest: str
    num_tensors: int
    num_equal: int
    different: list[str]
    unreadable: list[str]


def as_torch(spec: Spec, bits: np.ndarray) -> torch.Tensor:
    """Return a checkpoint tensor without copying; the caller must not write to it."""
    if spec.num_elements == 0:
        return torch.empty(spec.shape, dtype=_TORCH[spec.dtype])
    return torch.from_numpy(bits.view(_SIGNED[bits.itemsize])).view(_TORCH[spec.dtype]).reshape(spec.shape)


def read_back(model: nn.Module, shadow: Shadow) -> ReadBack:
    """Compare every tensor of the shadow with what the model serves."""
    served = Served(model, [spec for spec, _ in shadow.tensors()])
    different, unreadable, num_equal, num_tensors = [], [], 0, 0
    for spec, bits in shadow.tensors():
        num_tensors += 1
        tensor = served.find(spec)
        if tensor is None:
            unreadable.append(spec.name)
        elif torch.equal(_bytes(tensor.cpu()), _bytes(as_torch(spec, bits).to(tensor.dtype))):
            num_equal += 1
        else:
            different.append(spec.name)
    return ReadBack(shadow.version, shadow.digest, num_tensors, num_equal, different, unreadable)


class Served:
    """The parameters of a model by the names of its checkpoint."""

    def __init__(self, model: nn.Module, specs: list[Spec]) -> None:
        self._tensors = dict(model.named_parameters()) | dict(model.named_buffers())
        self._specs = {spec.name: spec for spec in specs}
        self._fused = {
            part: (whole, parts)
            for whole, parts in {**_FUSED, **getattr(model, "packed_modules_mapping", {})}.items()
            for part in parts
        }
        self._packed = {
            name
            for name, module in model.named_modules()
            if current_platform.is_cpu()
            and isinstance(getattr(module, "quant_method", None), UnquantizedFusedMoEMethod)
        }

    def find(self, spec: Spec) -> torch.Tensor | None:
        """Return the served values of one checkpoint tensor, in the served dtype; None: not readable."""
        expert = self._slice_of_experts(spec)
        if expert is not None:
            return _fitted(expert, spec.shape)
        found = self._tensors.get(spec.name)
        found = self._rows_of_fused(spec) if found is None else self._turned(spec, found)
        return None if found is None else _fitted(found, spec.shape)

    def _turned(self, spec: Spec, served: torch.Tensor) -> torch.Tensor:
        """Undo the transpose of a linear layer's FP8 weights with a scale for each row: vLLM keeps them [K, N]."""
        scale = self._specs.get(f"{spec.name}_scale")
        return served.T if scale is not None and scale.shape == (spec.shape[0], 1) else served

    def _rows_of_fused(self, spec: Spec) -> torch.Tensor | None:
        _, module, leaf = ["", "", *spec.name.split(".")][-3:]
        if module not in self._fused:
            return None
        whole, parts = self._fused[module]
        prefix = spec.name[: -len(f"{module}.{leaf}")]
        fused = self._tensors.get(f"{prefix}{whole}.{leaf}")
        if fused is None:
            return None
        sizes = [self._specs[f"{prefix}{part}.{leaf}"].shape[0] for part in parts]
        fused = self._turned(spec, fused)
        if fused.shape[0] != sum(sizes):
            return None
        return fused.split(sizes)[list(parts).index(module)]

    def _slice_of_experts(self, spec: Spec) -> torch.Tensor | None:
        match = _EXPERT.fullmatch(spec.name)
        if match is None:
            return None
        prefix, expert, module, leaf = match.groups()
        stacked = "w2" if module in ("down_proj", "w2") else "w13"
        for name, tensor in self._tensors.items():
            if name.startswith(prefix) and name.endswith(f".{stacked}_{leaf}"):
                is_packed = name.rsplit(".", 1)[0] in self._packed
                return None if is_packed else _of_expert(tensor, int(expert), module)
        return None


def _of_expert(tensor: torch.Tensor, expert: int, module: str) -> torch.Tensor | None:
    if expert >= tensor.shape[0]:
        return None
    if module in ("down_proj", "w2"):
        return tensor[expert]
    gate, up = tensor[expert].chunk(2)
    return gate if module in ("gate_proj", "w1") else up


def _fitted(tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor | None:
    """Undo the padding of a vocabulary with rows; None: cut by tensor parallelism, or packed."""
    if tensor.shape == shape:
        return tensor
    if tensor.dim() == len(shape) and tensor.shape[1:] == shape[1:] and tensor.shape[0] > shape[0]:
        return tensor[: shape[0]]
    return None


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
