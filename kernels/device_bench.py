"""Everything for one run on an H200, inside ten minutes: the benchmarks of all operations, then the tests on the GPU.

    TRITON_CACHE_DIR=cache python -m kernels.device_bench --library vllm/_moe_C_stable_libtorch.abi3.so
                                                    (a cache filled by python -m kernels.warm saves minutes of compiling)
    TRITON_INTERPRET=1 python -m kernels.device_bench --rehearse --output /tmp/rehearsal.csv       (on a CPU, no numbers)

Each operation is a process of its own with its share of the time, so that one that crashes or hangs costs no other, and
what it had measured is in results.csv. Every point compares all its providers with the reference before it times them;
points that have a bar come first. At the end: bars met and missed, what was wrong, what was left out; exits 1 when
something was wrong. Needs torch for CUDA, triton and pytest, nothing else.
"""

import argparse
import importlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from kernels import measure
from kernels.harness import Point

ROOM = Path(__file__).parent
TESTS = ROOM.parent / "tests/kernels"
FIRST = ("gate", "gate_align", "permute", "pages", "kv_write")
"""Operations with bars; the others follow."""
GRACE_S = 30.0
"""What a process may take over its share, to end the point that it is at, before it is killed."""
TESTS_S = 100.0


def benches() -> dict[str, Callable[[], Iterable[Point]]]:
    """Return the points of every operation that has a bench.py, those with bars first."""
    names = sorted(path.parent.name for path in ROOM.glob("*/bench.py"))
    names.sort(key=lambda name: FIRST.index(name) if name in FIRST else len(FIRST))
    return {name: importlib.import_module(f"kernels.{name}.bench").points for name in names}


def call(name: str, command: Sequence[str], seconds: float, **environment: str) -> list[str]:
    """Run a Python module in a process of its own; return a fault when it fails or does not end in time."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", *command], env={**os.environ, **environment}, cwd=ROOM.parent, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return [f"{name}: killed after {seconds:.0f} s"]
    return [f"{name}: returned {done.returncode}, see above"] if done.returncode else []


def main(argv: Sequence[str] | None = None) -> int:
    """Measure every operation, test, list the bars and every fault."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path, default=measure.RESULTS)
    parser.add_argument("--seconds", type=float, default=480, help="of everything; nothing starts after it")
    parser.add_argument("--rehearse", action="store_true", help="walk through the smallest points on a CPU")
    parser.add_argument(
        "--library", type=Path, action="append", default=[], help="shared library with peers' operators"
    )
    options = parser.parse_args(argv)
    if not options.rehearse:
        measure.require_gpu()
    deadline = time.monotonic() + options.seconds
    output = options.output.resolve()
    num_rows = len(output.read_text().splitlines()) - 1 if output.exists() else 0
    passed_on = ["--output", str(output), *(["--rehearse"] if options.rehearse else [])]
    passed_on += [word for library in options.library for word in ("--library", str(library.resolve()))]
    faults, names = [], list(benches())
    tests_s = 0.0 if options.rehearse or not TESTS.exists() else TESTS_S
    for done, name in enumerate(names):
        share = max(0.0, deadline - tests_s - time.monotonic()) / (len(names) - done)
        print(f"--- {name}, at most {share:.0f} s", flush=True)
        faults += call(name, [f"kernels.{name}.bench", "--seconds", f"{share:.0f}", *passed_on], share + GRACE_S)
    if tests_s:
        tests_s = max(0.0, deadline - time.monotonic())
        tests = ["pytest", str(TESTS), "-q", "--maxfail=20"]
        faults += call("tests", tests, tests_s, KERNELS_DEVICE="cuda")
    print("--- bars", *measure.bars_of(output, num_rows), f"--- {len(faults)} faults", *faults, sep="\n")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
