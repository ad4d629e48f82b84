"""Runs rl_jax/triton_ops.py on a CPU: Triton's interpreter takes the place of the launch, in a process of its own.

    TRITON_INTERPRET=1 python tests/rl_jax/triton_interpreted.py FILE     writes what test_triton_ops.py compares

Two things are replaced: jax_triton.triton_call, and the question which GPU it is. The bodies of the kernels, their grids,
constants and order of arguments, and the gradients are the real ones. float32 only: the stock interpreter computes bfloat16
wrongly, and its correction needs torch (tests/kernels proves the bodies in every dtype).
"""

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import triton_cases

from rl_jax import triton_launch, triton_ops

ONE_AT_A_TIME = threading.Lock()
"""The interpreter patches triton.language while a kernel runs, and each device calls from a thread of its own."""


class Memory:
    """A NumPy array as the interpreter asks a tensor: where it lies and what it holds."""

    def __init__(self, array: np.ndarray) -> None:
        self.array, self.dtype = array, array.dtype

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def untyped_storage(self) -> "Memory":
        return self

    cpu = untyped_storage

    def new_empty(self, *_: object, **__: object) -> "Memory":
        return self

    def set_(self, *_: object) -> None:
        """All is one memory."""

    copy_ = set_

    def storage_offset(self) -> int:
        return 0

    size = stride = storage_offset


def call(
    *inputs: jax.Array,
    kernel: Callable,
    out_shape: tuple[jax.ShapeDtypeStruct, ...],
    grid: tuple[int, ...],
    zeroed_outputs: tuple[int, ...] = (),
    **settings: object,
) -> tuple[jax.Array, ...]:
    """Stand in for jax_triton.triton_call; what a kernel does not write is garbage here too."""

    def run(*arrays: np.ndarray) -> tuple[np.ndarray, ...]:
        outputs = [np.full(out.shape, 0 if i in zeroed_outputs else 77, out.dtype) for i, out in enumerate(out_shape)]
        with ONE_AT_A_TIME:
            kernel[grid](*(Memory(np.array(x, order="C")) for x in arrays), *map(Memory, outputs), **settings)
        return tuple(outputs)

    return jax.pure_callback(run, out_shape, *inputs)


def main(file: Path) -> None:
    """Compute every case and write the arrays."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)
    triton_launch.jax_triton.triton_call = call
    triton_ops.capability_for = lambda op, given: 90
    found = {"TRITON_CACHE_DIR": np.array(os.environ["TRITON_CACHE_DIR"])}
    for name, case in triton_cases.CASES.items():
        arrays = jax.device_get(jax.tree.leaves(case("triton")))
        found |= {f"{name} {i}": array for i, array in enumerate(arrays)}
    np.savez(file, **found)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
