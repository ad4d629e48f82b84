"""Buffers between canary words: a kernel that stores past its buffer changes one and is found."""

import math

import torch

CANARY = 0x5A
MARGIN_BYTES = 512


class Guarded:
    """A tensor inside a larger block of canary bytes; `.tensor` starts at an address that divides by 16."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device):
        self.num_bytes = math.prod(shape) * dtype.itemsize
        self.memory = torch.full((2 * MARGIN_BYTES + self.num_bytes,), CANARY, dtype=torch.uint8, device=device)
        assert self.memory.data_ptr() % 16 == 0
        self.bytes = self.memory[MARGIN_BYTES : MARGIN_BYTES + self.num_bytes]
        self.tensor = self.bytes.view(dtype).view(shape)

    def margins_are_whole(self) -> bool:
        """Return whether no byte before or behind the tensor was changed."""
        before, behind = self.memory[:MARGIN_BYTES], self.memory[MARGIN_BYTES + self.num_bytes :]
        return bool((before == CANARY).all() and (behind == CANARY).all())


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's bit patterns as integers: equality of these is exact, NaN included."""
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
