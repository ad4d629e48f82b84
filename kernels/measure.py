"""Takes the times of benchmark points on a GPU: CUDA graphs, cold L2, ceilings of the same run, one CSV row a provider.

For each point every provider is compared with the reference first; then calls over a ring of input copies larger than
the L2 cache are captured in one CUDA graph per provider, the graphs are replayed in turn, and the median is reported.
A point that fails, however it fails, is reported and costs no other. Points that have a bar come first.

Refuses to measure without a GPU. `--rehearse` walks the same path on a CPU, kernels interpreted, over the smallest point:
what it writes is no measurement and says so.
"""

import argparse
import csv
import math
import platform
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch
import triton
import triton.language as tl

from kernels import interpret
from kernels.harness import Arguments, Ceilings, Point, Times, append_rows, flatten, here, percentiles, row_of

RESULTS = Path(__file__).parent / "results.csv"
RING_BYTES = 3 * 60 * 2**20
"""Inputs that one graph walks over: three times the L2 cache of an H200, so that each call finds it cold."""
MAX_CALLS = 200
NUM_REPLAYS = 10
MAX_REHEARSED_BYTES = 2**20
REHEARSED = Ceilings(copy_bytes_per_s=4.3e12, matmul_flops=790e12, launch_us=2.0)
"""Stands for a card in a rehearsal, so that rows and bars are computed."""


def require_gpu() -> None:
    """Raise RuntimeError where there is no GPU, or where kernels are interpreted: a time would mean nothing."""
    if not torch.cuda.is_available():
        raise RuntimeError(
            "no CUDA device: benchmarks measure a GPU only; TRITON_INTERPRET=1 and --rehearse walk through them on a CPU"
        )
    if triton.knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET is set: kernels are interpreted; unset it to measure")


@triton.jit
def do_nothing(x_pointer):
    if tl.program_id(0) < 0:
        tl.store(x_pointer, 0)


def num_copies(member_bytes: int) -> int:
    """Return how many copies of inputs of this size make a ring that the L2 cache cannot hold; 4 to MAX_CALLS."""
    return max(4, min(MAX_CALLS, math.ceil(RING_BYTES / max(1, member_bytes))))


def make_ring(point: Point) -> list[Arguments]:
    """Return the ring of arguments. The first member tells the size of all."""
    first = point.make(0)
    member_bytes = sum(t.numel() * t.element_size() for t in flatten(first))
    return [first, *(point.make(i) for i in range(1, num_copies(member_bytes)))]


def capture(function: Callable[..., object], ring: Sequence[Arguments]) -> Callable[[], None]:
    """Compile, then record one call for each member of the ring; return what replays them. On a CPU it just calls."""

    def call_each() -> None:
        for arguments in ring:
            function(*arguments)

    if here().type == "cpu":
        return call_each
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for arguments in ring[:2]:
            function(*arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call_each()
    return graph.replay


def replay_us(replay: Callable[[], None], num_calls: int) -> float:
    """Return the time of one call in one replay, microseconds."""
    if here().type == "cpu":
        start_s = time.perf_counter()
        replay()
        return (time.perf_counter() - start_s) * 1e6 / num_calls
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / num_calls


def time_interleaved(
    functions: Mapping[str, Callable[..., object]], ring: Sequence[Arguments], num_replays: int = NUM_REPLAYS
) -> dict[str, Times]:
    """Return the times of every provider, replayed in turn so that drift of the clock meets all alike."""
    replays = {name: capture(function, ring) for name, function in functions.items()}
    for replay in (*replays.values(), *replays.values()):  # twice: clocks and page tables
        if num_replays > 1:
            replay_us(replay, len(ring))
    samples: dict[str, list[float]] = {name: [] for name in replays}
    for _ in range(num_replays):
        for name, replay in replays.items():
            samples[name].append(replay_us(replay, len(ring)))
    return {name: percentiles(values) for name, values in samples.items()}


def measure_ceilings() -> Ceilings:
    """Return what this card does now: copy, matmul, empty launch."""
    require_gpu()
    device = here()
    source = torch.randint(-(2**31), 2**31 - 1, (2**30,), dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    copy = time_interleaved({"copy": lambda a, b: b.copy_(a)}, [(source, target)] * 2)["copy"]
    del source, target
    a, b = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    matmul = time_interleaved({"matmul": lambda x, y, z: torch.matmul(x, y, out=z)}, [(a, b, torch.empty_like(a))] * 4)
    word = torch.zeros(1, device=device, dtype=torch.int32)
    empty = time_interleaved({"empty": lambda x: do_nothing[(1,)](x)}, [(word,)] * MAX_CALLS)["empty"]
    copied_bytes = 2 * 2**30 * 4
    return Ceilings(copied_bytes / copy.p50_us * 1e6, 2 * 8192**3 / matmul["matmul"].p50_us * 1e6, empty.p50_us)


def conditions() -> dict[str, str]:
    """Return what a number depends on: versions, card, driver, clocks, commit, time."""
    card = query("nvidia-smi", "--query-gpu=name,driver_version,clocks.sm,clocks.mem", "--format=csv,noheader")
    return {
        "card": card if here().type == "cuda" else "none: a rehearsal on a CPU, no measurement",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": query("git", "-C", str(RESULTS.parent), "rev-parse", "--short", "HEAD"),
        "date": time.strftime("%Y-%m-%dT%H:%M:%S"),
    }


def query(*command: str) -> str:
    """Return the output of a program in one line, or "unknown" where it is not there or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip().replace("\n", "; ")


def compared(point: Point) -> dict[str, float]:
    """Return the largest error of every provider; ours must agree, a peer that does not says so and is not timed.

    Raises:
        AssertionError: our result is not the reference's.
    """
    if point.reference is None:
        return dict.fromkeys(point.providers, math.nan)
    expected, errors = point.reference(*point.make(0)), {}
    for name, function in point.providers.items():
        try:
            errors[name] = point.compare(function(*point.make(0)), expected)
        except Exception as error:
            if name == "triton":
                raise
            print(f"{point.title}: {name} is left out, {type(error).__name__}: {str(error)[:200]}")
    return errors


def measure(point: Point, ceilings: Ceilings, is_rehearsal: bool = False) -> list[dict]:
    """Compare every provider with the reference, time all that agree, return one row for each."""
    errors = compared(point)
    functions = {name: function for name, function in point.providers.items() if name in errors}
    ring = [point.make(0)] if is_rehearsal else make_ring(point)
    times = time_interleaved(functions, ring, 1 if is_rehearsal else NUM_REPLAYS)
    medians = {name: t.p50_us for name, t in times.items()}
    rows = [row_of(point, name, t, medians, ceilings) for name, t in times.items()]
    return [
        {**row, "max_error": "" if math.isnan(errors[row["provider"]]) else errors[row["provider"]]} for row in rows
    ]


def run(points: Iterable[Point], path: Path, seconds: float = math.inf, is_rehearsal: bool = False) -> list[str]:
    """Measure all points until the time is up; append rows; return the faults: failures and points left out."""
    if not is_rehearsal:
        require_gpu()
    deadline = time.monotonic() + seconds
    where, ceilings = conditions(), REHEARSED if is_rehearsal else measure_ceilings()
    print(f"copy {ceilings.copy_bytes_per_s / 1e12:.2f} TB/s, matmul {ceilings.matmul_flops / 1e12:.0f} TFLOP/s, "
          f"empty launch {ceilings.launch_us:.2f} us")  # fmt: skip
    faults = []
    for point in sorted(points, key=lambda point: point.bar is None):  # stable: bars first
        if time.monotonic() > deadline:
            faults.append(f"{point.title}: not measured, the time was up")
            continue
        try:
            rows = measure(point, ceilings, is_rehearsal)
        except Exception as error:  # noqa: BLE001 - one point must not cost the others; it is reported, and fails the run
            faults.append(f"{point.title}: {type(error).__name__}: {str(error)[:300]}")
            continue
        append_rows([{**row, **where} for row in rows], path)
        print(point.title, *(f"{r['provider']} {r['p50_us']} us ({r['copy_percent']} % of copy) {r['bar']}" for r in rows),
              sep="  ", flush=True)  # fmt: skip
    return faults


def smallest(points: Iterable[Point]) -> list[Point]:
    """Return the point with the fewest bytes, and of those that have a bar as well if it is small: for a CPU."""
    every = sorted(points, key=lambda point: (point.num_bytes, point.num_flops))
    barred = [point for point in every if point.bar is not None and point.num_bytes < MAX_REHEARSED_BYTES]
    return list({id(point): point for point in (every[0], *barred[:1])}.values())


def bars_of(path: Path, first_row: int = 0) -> list[str]:
    """Return one line for each bar among the rows from `first_row` on: what was needed, what was measured."""
    if not path.exists():
        return []
    with path.open() as file:
        rows = [row for row in list(csv.DictReader(file))[first_row:] if row["bar"]]
    return [
        f"{row['bar']:6s} {row['op']} {row['shape']} {row['dtype']} {row['routing']}: "
        f"{row['p50_us']} us of {row['bar_us']} ({row['copy_percent']} % of copy)"
        for row in rows
    ]


def main(points: Callable[[], Iterable[Point]], argv: Sequence[str] | None = None) -> int:
    """Run one operation's bench.py: measure, print, append to results.csv; 1 when a result is wrong or left out."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop starting points after this long")
    parser.add_argument("--rehearse", action="store_true", help="walk through the smallest points on a CPU")
    parser.add_argument(
        "--library", type=Path, action="append", default=[], help="shared library with peers' operators"
    )
    options = parser.parse_args(argv)
    if options.rehearse:
        if torch.cuda.is_available() or options.output == RESULTS:
            parser.error("--rehearse is for a machine without a GPU, and needs --output: its rows are no measurements")
        interpret.install()
    else:
        require_gpu()
    for library in options.library:
        torch.ops.load_library(str(library))
    chosen = smallest(points()) if options.rehearse else points()
    faults = run(chosen, options.output, options.seconds, options.rehearse)
    print(*faults, sep="\n")
    return int(bool(faults))
