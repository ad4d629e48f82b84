"""Speed of the bridge against a plain copy and a torch script on the same disk: python -m experiments 0005."""

import shutil
import statistics
import tempfile
from pathlib import Path

import synthetic
from matplotlib.figure import Figure

from experiments.harness import FLEET_PYTHON, TRAINER_PYTHON, Report, conditions, is_quick, publish
from experiments.worker import Worker
from rl_jax.models.architecture import Architecture

HERE = Path(__file__).parent
SHARD_BYTES = 1_000_000_000
COPY, TORCH = "plain copy", "torch script"
OURS: dict[str, dict[str, object]] = {
    "bridge, fp8-block": {"fmt": "fp8-block"},
    "bridge, fp8-block, --trust-checkpoint": {"fmt": "fp8-block", "is_trusted": True},
    "bridge, fp8-block, checkpoint compressed by zstd": {"fmt": "fp8-block", "run": "zstd"},
    "bridge, fp8-channel": {"fmt": "fp8-channel"},
    "bridge, bf16": {"fmt": "bf16"},
}
"""Way -> how it differs from the others; `run` is a folder of `measure`."""


def measure(place: Path, arch: Architecture, rounds: int) -> dict[str, list[float]]:
    """Return GB/s of bfloat16 weights read, by way and round; the ways take turns."""
    synthetic.write(place / "run", arch)
    synthetic.write(place / "zstd", arch, compress=True)
    speeds: dict[str, list[float]] = {name: [] for name in (COPY, *OURS, TORCH)}
    ours = Worker(TRAINER_PYTHON, HERE / "ours.py", place / "ours.log", {"JAX_PLATFORMS": "cpu"})
    torch = Worker(FLEET_PYTHON, HERE / "torch_quantise.py", place / "torch.log")
    with ours, torch:

        def timed(name: str, worker: Worker, command: str, **arguments: object) -> None:
            answer = worker.ask(command, out=str(place / "out"), **arguments)
            speeds[name].append(float(str(answer["bytes"])) / 1e9 / float(str(answer["seconds"])))
            shutil.rmtree(place / "out")

        def converted(way: dict[str, object]) -> dict[str, object]:
            return {"shard_bytes": SHARD_BYTES, **way, "run": str(place / str(way.get("run", "run")))}

        ours.ask("convert", out=str(place / "bf16"), **converted(OURS["bridge, bf16"]))  # what copy and torch read
        for way in OURS.values():  # compiles, and brings the inputs into the page cache
            ours.ask("convert", out=str(place / "out"), **converted(way))
            shutil.rmtree(place / "out")
        for _ in range(rounds):
            timed(COPY, ours, "copy", source=str(place / "bf16"))
            for name, way in OURS.items():
                timed(name, ours, "convert", **converted(way))
            timed(TORCH, torch, "convert", source=str(place / "bf16"), max_files=1)
    return speeds


def draw(speeds: dict[str, list[float]]) -> Figure:
    """Draw the median speed of each way, and its range."""
    figure = Figure(figsize=(7.2, 2.8), layout="constrained")
    axes = figure.add_subplot()
    names = list(reversed(speeds))
    medians = [statistics.median(speeds[name]) for name in names]
    spans = [[m - min(speeds[n]) for n, m in zip(names, medians, strict=True)]]
    spans.append([max(speeds[n]) - m for n, m in zip(names, medians, strict=True)])
    axes.barh(names, medians, xerr=spans)
    axes.set(xlabel="GB/s of bfloat16 weights read")
    return figure


def main() -> None:
    """Measure in turns and report medians."""
    is_small = is_quick(__doc__)
    where = conditions()
    arch = synthetic.architecture(1, num_experts=8) if is_small else synthetic.architecture(2)
    rounds = 1 if is_small else 3
    with tempfile.TemporaryDirectory() as folder:
        speeds = measure(Path(folder), arch, rounds)
    copy = statistics.median(speeds[COPY])
    rows = []
    for name, found in speeds.items():
        speed = statistics.median(found)
        rows.append([name, f"{speed:.2f}", f"{min(found):.2f}-{max(found):.2f}", f"{speed / copy:.2f}"])
    gigabytes = synthetic.weight_bytes(arch) / 1e9
    report = Report(
        title=f"{gigabytes:.1f} GB of bfloat16 weights",
        columns=["way", "GB/s read", "range", "of the copy"],
        rows=rows,
        notes=[
            f"{gigabytes:.1f} GB of weights, medians of {rounds} rounds, the ways took turns; inputs in the page cache",
            "copy and bridge end with fsync; the bridge also compares the checkpoint with its checksums before, and what it "
            "wrote with its own; torch does none of it",
        ],
        raw={"speeds": speeds, "gigabytes": gigabytes},
        figure=draw(speeds),
    )
    publish(HERE, report, where, is_small)


main()
