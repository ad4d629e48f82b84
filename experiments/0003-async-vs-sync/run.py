"""Asynchronous against synchronous RL on a long tail of lengths, same program, same cores: python -m experiments 0003."""

import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from experiments.harness import TRAINER_PYTHON, Report, conditions, is_quick, publish
from experiments.worker import ROOT
from rl_jax.metrics import read_metrics

HERE = Path(__file__).parent
BOUNDS = (0, 1, 2)
"""max_staleness of the runs; 0 is the synchronous mode of the same loop."""
SMOOTH_STEPS = 10
KEPT = ("step", "time/step", "train/agg/all/reward/mean", "off_policy/mean", "off_policy/max")
KEPT += ("perf/trainer_idle_frac", "inference/agg/idle_frac", "perf/throughput", "inference/agg/tokens_per_s")
"""Metrics that go into results.json."""
QUICK = ("run.steps=4", "sft.steps=4", "evaluate.num_tasks=4")
STEADY_STEPS = 20
"""Idle fractions and times of a step are means over the steps after these."""
Lines = list[dict[str, float | None]]


def train(max_staleness: int, folder: Path, overrides: Sequence[str]) -> Lines:
    """Run the training command and return its metrics."""
    settings = [f"orchestrator.max_staleness={max_staleness}", f'run.dir="{folder}"', *overrides]
    command = [TRAINER_PYTHON, "-m", "rl_jax.train", "--config", "configs/reverse_text.toml"]
    command += ["--config", HERE / "run.toml", *(part for setting in settings for part in ("--set", setting))]
    print(f"training with max_staleness = {max_staleness} ...", flush=True)
    with (folder / "output.txt").open("w") as output:
        done = subprocess.run(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, check=False)
    if done.returncode:
        raise SystemExit(f"it ended with exit code {done.returncode}:\n{(folder / 'output.txt').read_text()}")
    (run_folder,) = (path for path in folder.iterdir() if path.is_dir())
    return read_metrics(run_folder)


def curve(lines: Lines) -> tuple[np.ndarray, np.ndarray]:
    """Return seconds since the start of RL and the reward, a mean over the last SMOOTH_STEPS steps.

    An asynchronous step has no reward where everything it trains on had arrived before.
    """
    seconds = np.cumsum([line["time/step"] for line in lines[1:]])
    rewards = np.array([line.get("train/agg/all/reward/mean") for line in lines[1:]], np.float64)
    window = np.ones(min(SMOOTH_STEPS, len(rewards)))
    counts = np.convolve(np.isfinite(rewards), window, "valid")
    return seconds[len(window) - 1 :], np.convolve(np.nan_to_num(rewards), window, "valid") / np.maximum(counts, 1)


def mean(lines: Lines, name: str) -> float:
    """Return the mean of a metric over the steady steps."""
    values = [line[name] for line in lines[min(STEADY_STEPS, len(lines) // 2) :] if line.get(name) is not None]
    return float(np.mean(np.array(values, float)))


def draw(curves: dict[int, tuple[np.ndarray, np.ndarray]], target: float) -> Figure:
    """Draw the reward over the time."""
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.add_subplot()
    for bound, (seconds, rewards) in curves.items():
        axes.plot(seconds, rewards, label=f"max_staleness {bound}")
    axes.axhline(target, color="0.7", linewidth=1)
    axes.set(xlabel="seconds of RL", ylabel=f"reward, mean of {SMOOTH_STEPS} steps")
    axes.legend(frameon=False)
    return figure


def main() -> None:
    """Run all and report the time to the highest reward that all of them reach."""
    is_small = is_quick(__doc__)
    where = conditions()
    found: dict[int, Lines] = {}
    for bound in BOUNDS[:2] if is_small else BOUNDS:
        with tempfile.TemporaryDirectory() as folder:
            found[bound] = train(bound, Path(folder), QUICK if is_small else ())
    curves = {bound: curve(lines) for bound, lines in found.items()}
    target = min(float(rewards.max()) for _, rewards in curves.values())
    reached = {bound: float(seconds[np.argmax(rewards >= target)]) for bound, (seconds, rewards) in curves.items()}
    steps = {bound: int(np.argmax(rewards >= target)) + SMOOTH_STEPS for bound, (_, rewards) in curves.items()}
    rows = [
        [
            str(bound),
            f"{reached[bound]:.0f} s",
            f"{reached[0] / reached[bound]:.2f}x",
            str(steps[bound]),
            f"{1000 * mean(lines, 'time/step'):.0f} ms",
            f"{mean(lines, 'perf/trainer_idle_frac'):.0%}",
            f"{mean(lines, 'inference/agg/idle_frac'):.0%}",
            f"{mean(lines, 'off_policy/mean'):.2f}",
        ]
        for bound, lines in found.items()
    ]
    columns = ["max_staleness", f"time to reward {target:.2f}", "speed-up", "steps to it", "time of a step"]
    columns += ["trainer idle", "sampler idle", "mean staleness"]
    report = Report(
        title="Asynchronous against synchronous",
        columns=columns,
        rows=rows,
        notes=[f"reward: mean of {SMOOTH_STEPS} steps; the target is the highest that all runs reach"],
        raw={
            "runs": {str(bound): [{name: line.get(name) for name in KEPT} for line in found[bound]] for bound in found}
        },
        figure=draw(curves, target),
    )
    publish(HERE, report, where, is_small)


main()
