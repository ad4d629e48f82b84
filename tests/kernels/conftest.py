"""Kernel tests run in the fleet environment: interpreted on a CPU, compiled for a GPU when KERNELS_DEVICE=cuda.

python -m pytest tests/kernels --confcutdir=tests/kernels -p no:cacheprovider
"""

import os
from collections.abc import Iterator

DEVICE = os.environ.get("KERNELS_DEVICE", "cpu")
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # read when @triton.jit runs, so before the first import of a kernel

import hypothesis  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
from guarded import Guarded  # noqa: E402

from kernels import interpret  # noqa: E402

if DEVICE == "cpu":
    interpret.install()
np.seterr(all="ignore")  # the hardware says nothing either when a masked lane overflows or a NaN is made
torch.set_num_threads(1)
hypothesis.settings.register_profile("kernels", deadline=None, derandomize=True, max_examples=20)
hypothesis.settings.load_profile("kernels")


@pytest.fixture
def device() -> torch.device:
    """Where the tensors of a test lie."""
    return torch.device(DEVICE)


@pytest.fixture
def rng() -> torch.Generator:
    """A generator on the CPU with a fixed seed: the same inputs on every device."""
    return torch.Generator().manual_seed(0)


@pytest.fixture
def canaries(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Surround every buffer that an operation allocates with canary bytes, fill it with them, and look after the test.

    The interpreter reads and writes past the end without a word, and an unwritten element must not look right.
    """
    buffers: list[Guarded] = []

    def empty(*size: int | tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        shape = torch.Size(size[0] if size and not isinstance(size[0], int) else size)
        buffers.append(Guarded(tuple(shape), dtype, device))
        return buffers[-1].tensor

    monkeypatch.setattr(torch, "empty", empty)
    yield
    assert buffers and all(buffer.margins_are_whole() for buffer in buffers), "wrote outside of a buffer"
