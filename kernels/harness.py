"""What one benchmark of one shape is, its inputs, comparisons, bars and its row of the CSV file; measure.py takes the times.

An operation's bench.py yields `Point`s. Times are divided by what the card does in the same run (copy, matmul, an empty
launch), not by a data sheet.
"""

import csv
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

Arguments = tuple[Any, ...]


@dataclass(frozen=True, kw_only=True)
class Point:
    """One shape of one operation, with all that run it.

    Example: Point(op="gate", shape="T16384 E128 k8", dtype="bf16", routing="uniform", num_bytes=5_242_880,
    make=lambda i: (logits(seed=i),), providers={"triton": ours, "torch": theirs}, reference=gate_ref,
    compare=largest_difference(1e-6)).
    """

    op: str
    shape: str
    dtype: str
    routing: str = "none"
    """How tokens choose experts: uniform, zipf, one; none where it does not matter."""
    num_bytes: int
    """Bytes that must move, by the operation's formula: the floor is this over the measured copy."""
    num_flops: int = 0
    """Arithmetic that must happen; 0 where the operation moves only."""
    make: Callable[[int], Arguments]
    """Ring member -> fresh arguments on the GPU, seeded by the member."""
    providers: Mapping[str, Callable[..., Any]]
    """Name -> function of the arguments; allocates nothing that a graph could not. "triton" is ours."""
    reference: Callable[..., Any] | None = None
    """The specification, run once on the first member; None = only timed."""
    compare: Callable[[Any, Any], float] = field(default_factory=lambda: largest_difference(0.0))
    """(result, reference result) -> largest error; raises AssertionError above the tolerance."""
    bar: "Bar | None" = None
    """What our median must not be above."""

    @property
    def title(self) -> str:
        """Name of the point in one line."""
        return f"{self.op} {self.shape} {self.dtype} {self.routing}"


@dataclass(frozen=True)
class Times:
    """Median, 20th and 80th percentile of the time of one call, microseconds."""

    p50_us: float
    p20_us: float
    p80_us: float


@dataclass(frozen=True)
class Ceilings:
    """What the card does in this run."""

    copy_bytes_per_s: float
    """Device copy of 8 GB, reads and writes counted."""
    matmul_flops: float
    """bfloat16 matmul 8192^3 of random data (zeros draw less power and are faster)."""
    launch_us: float
    """One empty kernel in a graph replay: no operation is faster."""


Bar = Callable[[Mapping[str, float], Ceilings], float]
"""(median of every provider in us, ceilings) -> microseconds that "triton" may take."""


def at_most(us: float) -> Bar:
    """Return the bar of so many microseconds."""
    return lambda medians, ceilings: us


def share_of_copy(num_bytes: int, fraction: float) -> Bar:
    """Return the bar of moving `num_bytes` at this fraction of the measured copy."""
    return lambda medians, ceilings: num_bytes / (fraction * ceilings.copy_bytes_per_s) * 1e6


def a_launch_above(provider: str) -> Bar:
    """Return the bar of one empty launch above another provider of the same point."""
    return lambda medians, ceilings: medians[provider] + ceilings.launch_us


def here() -> torch.device:
    """Return where inputs are made: the GPU, or the host where a run is only rehearsed."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def generator(seed: int) -> torch.Generator:
    """Return a seeded generator of random numbers on `here`."""
    return torch.Generator(here()).manual_seed(seed)


def percentiles(times_us: Sequence[float]) -> Times:
    """Return p50, p20 and p80 by linear interpolation between the ordered times."""
    ordered = sorted(times_us)
    if not ordered or not all(math.isfinite(t) and t >= 0 for t in ordered):
        raise ValueError(f"times_us={list(times_us)[:5]}...: must be finite, >= 0, at least one")

    def at(fraction: float) -> float:
        position = fraction * (len(ordered) - 1)
        low = math.floor(position)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (position - low) * (ordered[high] - ordered[low])

    return Times(statistics.median(ordered), at(0.2), at(0.8))


def row_of(point: Point, provider: str, times: Times, best_us: Mapping[str, float], ceilings: Ceilings) -> dict:
    """Return the CSV row of one measurement, without the conditions of the run.

    Args:
        best_us: median of every provider of this point, microseconds.
    """
    seconds = times.p50_us * 1e-6
    memory_us = point.num_bytes / ceilings.copy_bytes_per_s * 1e6
    compute_us = point.num_flops / ceilings.matmul_flops * 1e6
    peers = [us for name, us in best_us.items() if name not in (provider, "torch")]
    bar_us = point.bar(best_us, ceilings) if point.bar is not None and provider == "triton" else None
    return {
        "op": point.op,
        "shape": point.shape,
        "dtype": point.dtype,
        "routing": point.routing,
        "provider": provider,
        "p50_us": round(times.p50_us, 3),
        "p20_us": round(times.p20_us, 3),
        "p80_us": round(times.p80_us, 3),
        "bytes": point.num_bytes,
        "gb_per_s": round(point.num_bytes / seconds / 1e9, 1),
        "copy_percent": round(100 * memory_us / times.p50_us, 1),
        "tflops": round(point.num_flops / seconds / 1e12, 1),
        "floor_us": round(max(memory_us, compute_us, ceilings.launch_us), 3),
        "vs_torch": round(best_us["torch"] / times.p50_us, 2) if "torch" in best_us else "",
        "vs_best_peer": round(min(peers) / times.p50_us, 2) if peers else "",
        "bar_us": "" if bar_us is None else round(bar_us, 3),
        "bar": "" if bar_us is None else "met" if times.p50_us <= bar_us else "missed",
    }


def largest_difference(tolerance: float) -> Callable[[Any, Any], float]:
    """Return a comparison of tensors or tuples of tensors: largest |a - b| over max(1, |b|), at most `tolerance`.

    Integers and bytes must be equal whatever the tolerance.
    """

    def compare(ours: Any, theirs: Any) -> float:
        pairs = zip(flatten(ours), flatten(theirs), strict=True)
        worst = max((difference(a, b) for a, b in pairs), default=0.0)
        assert worst <= tolerance, f"largest difference {worst} > {tolerance}"
        return worst

    return compare


def flatten(value: Any) -> list[torch.Tensor]:
    """Return the tensors inside a value, in order: of tuples, lists and dataclasses; numbers and names have none."""
    if isinstance(value, torch.Tensor):
        return [value]
    parts = list(vars(value).values()) if hasattr(value, "__dataclass_fields__") else value
    return [tensor for part in parts for tensor in flatten(part)] if isinstance(parts, list | tuple) else []


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Return max |a - b| / max(1, |b|); infinite where integers, raw bytes or NaNs differ."""
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return math.inf
    if ours.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        ours, theirs = ours.view(torch.uint8), theirs.view(torch.uint8)
    if not ours.is_floating_point():
        return 0.0 if torch.equal(ours, theirs) else math.inf
    if not torch.equal(ours.isnan(), theirs.isnan()):
        return math.inf
    a, b = ours.double().nan_to_num(), theirs.double().nan_to_num()
    return float(((a - b).abs() / b.abs().clamp(min=1)).max()) if a.numel() else 0.0


def routed_ids(
    num_tokens: int, num_active: int, num_experts: int, routing: str, seed: int, device: torch.device | None = None
) -> torch.Tensor:
    """Return int32 ids_TA, distinct inside a token, under a named skew, drawn and left on `device` (None = CPU).

    uniform: every expert alike. zipf: expert e with weight 1 / (e + 1). one: expert 0 in every token, others alike.
    """
    if routing not in ("uniform", "zipf", "one"):
        raise ValueError(f"routing={routing!r}: must be uniform, zipf or one")
    device = device or torch.device("cpu")
    rand_TE = torch.rand(num_tokens, num_experts, device=device, generator=torch.Generator(device).manual_seed(seed))
    # the largest A of log(weight) + Gumbel noise are a draw without replacement by these weights
    noise_TE = -torch.log(-torch.log(rand_TE.clamp(1e-20, 1 - 1e-7)))
    if routing == "zipf":
        noise_TE -= torch.log(torch.arange(1, num_experts + 1, device=device).float())
    if routing == "one":
        noise_TE[:, 0] = math.inf
    return noise_TE.topk(num_active, dim=1).indices.to(torch.int32)


def append_rows(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Append rows to the CSV file at `path`; a new file gets the heading.

    Raises:
        ValueError: the file has other columns.
    """
    columns = list(rows[0])
    if path.exists():
        heading = path.read_text().splitlines()[0].split(",")
        if heading != columns:
            raise ValueError(f"{path}: has columns {heading}, the rows {columns}; move the old file away")
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerows(rows)
