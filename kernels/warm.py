"""Fills a Triton cache with every kernel that ships, on a machine without a GPU.

    TRITON_CACHE_DIR=cache python -m kernels.warm

Copied to a machine with the same triton wheel and Python, the cache saves its first launches the compiler: minutes of
a rented GPU. The key holds wheel, ptxas, source with line numbers, types and options, but no paths.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor

import triton

from kernels import aot


def fill(op: str, index: int) -> str:
    """Compile one variant for sm_90 into the cache; return its key."""
    return aot.compile_variant(aot.variants_of(op)[index], "sm_90").hash


def main(argv: Sequence[str] | None = None) -> int:
    """Compile all variants of the named operations, or of all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("ops", nargs="*", help="operations; none = all")
    ops = parser.parse_args(argv).ops or aot.operations()
    if triton.knobs.runtime.interpret:
        raise ValueError("TRITON_INTERPRET is set: kernels are interpreted, not compiled; unset it")
    jobs = [(op, index) for op in ops for index in range(len(aot.variants_of(op)))]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        keys = set(pool.map(fill, *zip(*jobs, strict=True)))
    print(f"{len(keys)} kernels of {len(jobs)} variants in {triton.knobs.cache.dir}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
