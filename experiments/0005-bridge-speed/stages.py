"""Where a conversion spends its time: processor seconds per GB of bfloat16 read, one stage after the other.

    PYTHONPATH=. python experiments/0005-bridge-speed/stages.py --dir /some/disk

Processor time depends little on what else the machine does; 3 GB of disk, removed at the end.
"""

import argparse
import functools
import hashlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
import numpy as np
import synthetic

from bridge.allocator import keep_freed_memory
from bridge.host_tensors import host_tensor
from bridge.orbax_reader import Unit, WeightStore
from rl_jax.models.architecture import Architecture
from rl_jax.models.fp8_rule import FORMATS, fp8_block
from rl_jax.models.schema import flat_table

KEY = "layers/up_LEDF"
REPEATS = 40
PAGES = np.ones(64 << 20, np.uint8)


def report(what: str, num_bytes: int, work: Callable[[], object]) -> None:
    """Print the processor time of `work`, which was done once before."""
    before = time.process_time()
    work()
    print(f"{what:52} {(time.process_time() - before) / (num_bytes / 1e9):6.2f} s/GB", flush=True)


@contextmanager
def opened(place: Path, arch: Architecture, compress: bool) -> Iterator[WeightStore]:
    """Write a checkpoint, and open it."""
    run = place / f"compress-{compress}"
    checkpoint = synthetic.write(run, arch, compress=compress)
    stored = sum(path.stat().st_size for path in (checkpoint / "params").rglob("*") if path.is_file())
    print(
        f"compressed by zstd: {compress}; stored bytes of those in memory: {stored / synthetic.weight_bytes(arch):.3f}"
    )
    yield WeightStore(checkpoint / "params", arch)


def measure_reads(store: WeightStore, num_experts: int) -> np.ndarray:
    """Read the experts of one matrix; return one of them."""
    units = [Unit(KEY, ((0, expert),)) for expert in range(num_experts)]

    def read() -> list[np.ndarray]:
        return [values for unit in units for _, values in store.results((unit,), store.read(unit))]

    pieces = read()  # into the page cache
    report("  read and decode", sum(piece.nbytes for piece in pieces), read)
    return pieces[0][0, 0]


def main() -> int:
    """Measure the stages one by one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=None, help="where to write")
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    keep_freed_memory()
    arch = synthetic.architecture(1, vocab_size=1000)
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        place = Path(folder)
        for compress in (True, False):
            with opened(place, arch, compress) as store:
                piece = measure_reads(store, arch.num_experts)
        for fmt in FORMATS:
            block = fp8_block(arch, fmt, KEY)
            param = flat_table(arch)[KEY]
            convert = functools.partial(host_tensor, param, piece, block, fmt)
            convert()  # compiles
            report(f"convert an expert, {fmt}", REPEATS * piece.nbytes, lambda c=convert: [c() for _ in range(REPEATS)])
        report("per GB of its input: sha256", PAGES.nbytes, lambda: hashlib.sha256(PAGES.data).digest())
        with (place / "file").open("wb", buffering=0) as file:
            report("per GB of its input: write, into fresh page cache", PAGES.nbytes, lambda: file.write(PAGES.data))
            report("per GB of its input: fsync", PAGES.nbytes, lambda: os.fsync(file.fileno()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
