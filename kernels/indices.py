"""Checks of lists of slots and pages, which live in memory that the host may not see.

A list on the host is read and checked for free. One on a GPU is read only with check=True: the read waits for the
device, so it is for tests and for debugging, never inside a CUDA graph. What is not read cannot be refused; the
kernels then stay inside their buffers all the same (each operation says what it does with such an entry).
"""

import torch


def is_read(indices: torch.Tensor, check: bool | None) -> bool:
    """Return whether to read the list: as `check` says; None means only where it costs no wait for a device."""
    return indices.device.type == "cpu" if check is None else check


def check_index_dtype(name: str, indices: torch.Tensor, rank: int = 1) -> None:
    """Raise ValueError unless these are int32 or int64 indices of this rank with unit stride."""
    if not isinstance(indices, torch.Tensor):
        raise ValueError(f"{name}: must be a torch.Tensor, got {type(indices).__name__}")
    if indices.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name}: dtype must be int32 or int64, got {indices.dtype}")
    if indices.dim() != rank:
        raise ValueError(f"{name}: must have {rank} dimension(s), got shape {tuple(indices.shape)}")
    if indices.shape[-1] > 1 and indices.stride(-1) != 1:
        raise ValueError(
            f"{name}: last dimension must have stride 1, got strides {indices.stride()}; call .contiguous()"
        )


def check_below(name: str, indices: torch.Tensor, limit: int, what: str) -> None:
    """Raise ValueError if an entry is limit or more; negative ones mean "none" and pass."""
    if indices.numel() and int(indices.max()) >= limit:
        at = int(indices.flatten().argmax())
        raise ValueError(f"{name}: entry {at} is {int(indices.max())}, outside the cache of {limit} {what}")


def check_distinct(name: str, indices: torch.Tensor, why: str) -> None:
    """Raise ValueError if two entries that are not negative are equal."""
    values, counts = indices[indices >= 0].unique(return_counts=True)
    if bool((counts > 1).any()):
        value = int(values[counts > 1][0])
        at = torch.nonzero(indices == value).flatten().tolist()
        raise ValueError(f"{name}: entries {at[:4]} are all {value}; {why}")
