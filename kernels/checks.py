"""Checks of arguments before a launch: a kernel that reads past a buffer says nothing, so its door does.

ValueError: the caller can change the argument. NotImplementedError: the kernel does not do that; use impl="ref".
Every message names the argument, what it is and what it must be. Nothing here reads the contents of a device tensor,
which would make the host wait; what ids or slots out of range do is in each operation's docstring.
"""

from collections.abc import Sequence
from typing import Literal

import torch
import triton

Impl = Literal["ref", "triton"]


def check_impl(op: str, impl: str, *tensors: torch.Tensor | None) -> None:
    """Raise unless `impl` is known and can run on these: triton on the current GPU, or on the host when interpreted.

    Triton launches on the current device whatever the tensors say, and what it returns has no history for autograd.
    """
    if impl not in ("ref", "triton"):
        raise ValueError(f"{op}: impl={impl!r}: must be 'ref' or 'triton'")
    if impl == "ref":
        return
    for tensor in tensors:
        if tensor is None:
            continue
        check_place(op, tensor.device)
        if tensor.requires_grad and torch.is_grad_enabled():
            refuse(op, "tensors without gradients, as it has no backward: call it under torch.no_grad()")


def check_place(op: str, device: torch.device) -> None:
    """Raise ValueError unless a kernel launched now runs where `device` is."""
    interpreted = triton.knobs.runtime.interpret
    if device.type != "cuda" and not (interpreted and device.type == "cpu"):
        raise ValueError(
            f"{op}: impl='triton' got a tensor on {device}; needs one on cuda, or on cpu with TRITON_INTERPRET=1 "
            f"before the first import of triton; impl='ref' runs anywhere"
        )
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        raise ValueError(
            f"{op}: impl='triton' got a tensor on {device}, but kernels start on the current device, "
            f"{torch.cuda.current_device()}; call it inside torch.cuda.device({device.index})"
        )


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    *,
    shape: Sequence[int | None],
    dtypes: Sequence[torch.dtype],
    device: torch.device | None = None,
    layout: Literal["contiguous", "rows", "last", "apart"] = "contiguous",
) -> None:
    """Raise ValueError unless `tensor` has this shape (None = any size), one of these dtypes, device and layout.

    Args:
        layout: "last" = the last dimension has stride 1, the others any; "rows" = they also step over what is inside
            them, so that rows may lie apart; "apart" = as "last", in any order, but no two elements share memory:
            what is written.
    """
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{name}: got {type(tensor).__name__}; must be a torch.Tensor")
    sizes = tuple(tensor.shape)
    if len(sizes) != len(shape) or any(b is not None and a != b for a, b in zip(sizes, shape, strict=False)):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name}: shape {sizes}; must be ({wanted})")
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name}: dtype {tensor.dtype}; must be {' or '.join(map(str, dtypes))}")
    if device is not None and tensor.device != device:
        raise ValueError(f"{name}: on {tensor.device}; must be on {device} like the first argument")
    if layout == "contiguous" and not tensor.is_contiguous():
        raise ValueError(f"{name}: strides {tensor.stride()} of shape {sizes}; must be contiguous")
    if layout == "rows" and tensor.numel() and not has_rows(tensor):
        raise ValueError(f"{name}: strides {tensor.stride()}; the last must be 1 and rows must not overlap")
    if layout in ("last", "apart") and sizes and sizes[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name}: strides {tensor.stride()}; the last must be 1")
    if layout == "apart" and not is_apart(tensor):
        raise ValueError(f"{name}: strides {tensor.stride()} of shape {sizes}; elements must not share memory")


def check_scale(name: str, scale: torch.Tensor, num_heads: int, device: torch.device) -> None:
    """Raise ValueError unless `scale` is one float32 number (with a dimension or without) or one for each head."""
    rank = scale.dim() if isinstance(scale, torch.Tensor) else 1
    check_tensor(name, scale, shape=(None,) * min(rank, 1), dtypes=(torch.float32,), device=device)
    if scale.numel() not in (1, num_heads):
        raise ValueError(f"{name}: {scale.numel()} numbers; must be 1 or one for each of the {num_heads} heads")


def has_rows(tensor: torch.Tensor) -> bool:
    """Return whether the last dimension is contiguous and each other stride steps over all that is inside it."""
    sizes, strides = tensor.shape, tensor.stride()
    inside = 1
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size > 1 and stride < inside:
            return False
        inside = max(inside, stride * size) if size > 1 else inside
    return sizes[-1] <= 1 or strides[-1] == 1


def is_apart(tensor: torch.Tensor) -> bool:
    """Return whether, from the smallest stride up, each steps over all that is inside it: no element is another."""
    inside = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride < inside:
            return False
        inside = max(inside, stride * size) if size > 1 else inside
    return True


def refuse(op: str, constraint: str) -> None:
    """Raise NotImplementedError: the Triton kernel of `op` lacks a case that the reference may have."""
    raise NotImplementedError(f"{op}: impl='triton' needs {constraint}; impl='ref' has no such limit")
