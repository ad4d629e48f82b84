"""Memory and compilations over 500 steps of a small run: python -m experiments 0004."""

import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import psutil
from matplotlib.figure import Figure
from rich.console import Console

from experiments.harness import Report, conditions, is_quick, publish
from rl_jax.cli import RunConfig
from rl_jax.config import load
from rl_jax.hosts.group import Hosts
from rl_jax.interrupt import Interrupt
from rl_jax.orchestrator.loop import StepBatch
from rl_jax.progress import Dashboard
from rl_jax.run_folder import RunFolder
from rl_jax.session import Session
from rl_jax.train import train

HERE = Path(__file__).parent
WARMUP_STEPS = 100
MIB = 2**20


class WatchedSession(Session):
    """A run that also notes its memory and the compilations of both sides after every step."""

    samples: list[dict[str, int]]

    def log(self, metrics: Mapping[str, float], batch: StepBatch | None, step_s: float) -> dict[str, float]:
        """Log as ever, and take a sample."""
        process = psutil.Process()
        workers = process.children(recursive=True)
        self.samples.append(
            {
                "step": self.trainer.version,
                "main": process.memory_info().rss,
                "workers": sum(worker.memory_info().rss for worker in workers),
                "trainer programs": self.trainer.num_compilations,
                "sampler programs": self.sampler.num_compilations,
            }
        )
        return super().log(metrics, batch, step_s)


def run(steps: int, folder: str) -> list[dict[str, int]]:
    """Run and return the samples."""
    overrides = [f"run.steps={steps}", f'run.dir="{folder}"']
    config = load(RunConfig, ["configs/reverse_text.toml", HERE / "run.toml"], overrides)
    dashboard = Dashboard(Console(soft_wrap=True))
    place = RunFolder.create(config.run.dir, config.run.name)
    session = WatchedSession(config, place, dashboard, Hosts(config.hosts))
    with Interrupt(dashboard) as interrupt, session:
        session.samples = []
        session.open()
        train(session, None, interrupt)
    return session.samples


def slope(samples: list[dict[str, int]], key: str) -> float:
    """Return MiB in 100 steps, by least squares."""
    steps = [sample["step"] for sample in samples]
    return 100 * float(np.polyfit(steps, [sample[key] / MIB for sample in samples], 1)[0])


def draw(samples: list[dict[str, int]]) -> Figure:
    """Draw memory and programs over the steps."""
    figure = Figure(figsize=(8.4, 3.2), layout="constrained")
    steps = [sample["step"] for sample in samples]
    memory, programs = figure.add_subplot(1, 2, 1), figure.add_subplot(1, 2, 2)
    for key in ("main", "workers"):
        memory.plot(steps, [sample[key] / MIB for sample in samples], label=f"{key}, MiB resident")
    for key in ("trainer programs", "sampler programs"):
        programs.plot(steps, [sample[key] for sample in samples], label=f"{key} compiled")
    for axes in (memory, programs):
        axes.set(xlabel="step", ylim=(0, None))
        axes.legend(frameon=False)
    return figure


def main() -> None:
    """Run, and report the time after the warm-up."""
    is_small = is_quick(__doc__)
    where = conditions()
    steps, warmup = (20, 5) if is_small else (500, WARMUP_STEPS)
    with tempfile.TemporaryDirectory() as folder:
        samples = run(steps, folder)
    steady = [sample for sample in samples if sample["step"] >= warmup]
    first, last = steady[0], steady[-1]
    rows = [
        [f"{name}, MiB resident", f"{first[key] / MIB:,.0f}", f"{last[key] / MIB:,.0f}", f"{slope(steady, key):+.2f}"]
        for name, key in (("main process", "main"), ("environment workers", "workers"))
    ]
    rows += [
        [
            f"{key} compiled",
            str(first[key]),
            str(last[key]),
            f"{100 * (last[key] - first[key]) / (steps - warmup):+.2f}",
        ]
        for key in ("trainer programs", "sampler programs")
    ]
    columns = ["", f"step {first['step']}", f"step {last['step']}", "slope in 100 steps"]
    report = Report(
        title=f"{steps} steps of a small run",
        columns=columns,
        rows=rows,
        notes=[f"slope: least squares over the steps from {warmup} on"],
        raw={"samples": samples},
        figure=draw(samples),
    )
    publish(HERE, report, where, is_small)


main()
