"""Where the numbers of a run go: metrics.jsonl, TensorBoard, Weights & Biases, sampled rollouts as text. No JAX.

Knows no metric by name; rooms name their own. One writer for a run.
"""

import importlib
import itertools
import json
import math
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np
import tensorboardX

from rl_jax.config import ConfigError, refuse

METRICS_FILE = "metrics.jsonl"
MAX_QUEUED_SCALARS = 4096
"""More than a step has: a writer whose queue is full waits for its thread after every scalar."""
NO_WANDB = "metrics.wandb=true: the package wandb is not installed; pip install 'rl-jax[wandb]' or set it to false"


@dataclass(frozen=True, kw_only=True)
class MetricsConfig:
    """Sinks beside metrics.jsonl, which is always written."""

    tensorboard: bool = True
    """Write TensorBoard events into the folder tensorboard of the run."""
    wandb: bool = False
    """Send metrics to Weights & Biases; needs the extra wandb and its login."""
    wandb_project: str = "rl_jax"
    """Project of the run there."""
    rollouts_per_step: int = 4
    """Rollouts of each step written as readable text into the folder rollouts; 0 = none."""

    def __post_init__(self) -> None:
        is_negative = self.rollouts_per_step < 0
        refuse([f"rollouts_per_step={self.rollouts_per_step}: expected at least 0" if is_negative else None])


@dataclass(frozen=True, kw_only=True)
class RolloutText:
    """One rollout for people.

    Example: RolloutText(title="reverse_text task 1041, group 7 member 2", facts={"reward": 1.0}, prompt="ab",
    completion="ba").
    """

    title: str
    facts: Mapping[str, object]
    """What to show above the text: reward, its parts, finish reason, policy versions."""
    prompt: str
    completion: str


class MetricsWriter:
    """Writes the metrics of one run; every line is on disk when `log` returns."""

    def __init__(
        self, folder: Path, config: MetricsConfig, run_config: Mapping[str, object], resumed_step: int | None = None
    ):
        """Open the sinks.

        Args:
            run_config: resolved config of the run, shown by Weights & Biases.
            resumed_step: the step that the run continues after: later lines are removed; None = a new run.
        Raises:
            ConfigError: Weights & Biases is asked for and not installed.
        """
        self._folder = folder
        self._config = config
        self._wandb = _import_wandb() if config.wandb else None
        folder.mkdir(parents=True, exist_ok=True)
        if resumed_step is not None:
            _truncate(folder / METRICS_FILE, resumed_step)
        self._file = (folder / METRICS_FILE).open("a", encoding="utf-8")
        self._events = None
        if config.tensorboard:
            purge_step = None if resumed_step is None else resumed_step + 1
            self._events = tensorboardX.SummaryWriter(
                str(folder / "tensorboard"), purge_step=purge_step, max_queue=MAX_QUEUED_SCALARS
            )
        if self._wandb is not None:
            # The folder's name as id: a resumed run continues its own curves.
            project, name = config.wandb_project, folder.resolve().name
            self._wandb.init(
                project=project, name=name, id=name, resume="allow", dir=str(folder), config=dict(run_config)
            )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a step; a number that is not finite becomes null in the file and is left out elsewhere."""
        line = {"step": step, "unix_time_s": round(time.time(), 3)}
        finite = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
        self._file.write(json.dumps(line | {name: finite.get(name) for name in metrics}, allow_nan=False) + "\n")
        self._file.flush()
        if self._events is not None:
            for name, value in finite.items():
                self._events.add_scalar(name, value, step)
            self._events.flush()
        if self._wandb is not None:
            self._wandb.log(finite, step=step)

    def rollouts(self, step: int, rollouts: Iterable[RolloutText]) -> None:
        """Write the first `rollouts_per_step` of them to rollouts/step_000012.txt; the others are never asked for."""
        shown = list(itertools.islice(rollouts, self._config.rollouts_per_step))
        if not shown:
            return
        file = self._folder / "rollouts" / f"step_{step:06d}.txt"
        file.parent.mkdir(exist_ok=True)
        file.write_text("\n".join(_readable(rollout) for rollout in shown), encoding="utf-8")

    def close(self) -> None:
        """Flush and close all sinks."""
        self._file.close()
        if self._events is not None:
            self._events.close()
        if self._wandb is not None:
            self._wandb.finish()


def quantiles(name: str, values: np.ndarray) -> dict[str, float]:
    """Return mean, max, p10, p50, p90, p99 of the values under name/mean, name/max ...; nothing for no values."""
    if not values.size:
        return {}
    exact = np.asarray(values, np.float64)
    found = {"mean": exact.mean(), "max": exact.max()}
    found |= {f"p{q}": np.percentile(exact, q) for q in (10, 50, 90, 99)}
    return {f"{name}/{key}": float(value) for key, value in found.items()}


def read_metrics(folder: Path) -> list[dict[str, float | None]]:
    """Return the lines of metrics.jsonl in order; a last line cut off by a kill is left out.

    Raises:
        ConfigError: there is no metrics.jsonl.
    """
    file = folder / METRICS_FILE
    if not file.is_file():
        raise ConfigError([f"{folder}: no {METRICS_FILE} in there; give the folder of a run"])
    lines = file.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1]]  # a whole line ends with a newline


def _truncate(file: Path, last_step: int) -> None:
    """Keep the lines of steps up to `last_step`; written aside and renamed, so a kill leaves the old or the new file."""
    if not file.exists():
        return
    kept = [line for line in read_metrics(file.parent) if (line["step"] or 0) <= last_step]
    aside = file.with_suffix(".tmp")
    aside.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
    os.replace(aside, file)


def _readable(rollout: RolloutText) -> str:
    facts = "  ".join(f"{k}={v:.3f}" if isinstance(v, float) else f"{k}={v}" for k, v in rollout.facts.items())
    rule = "=" * 100
    return f"{rule}\n{rollout.title}\n{facts}\n--- prompt\n{rollout.prompt}\n--- completion\n{rollout.completion}\n"


def _import_wandb() -> ModuleType:
    try:
        return importlib.import_module("wandb")
    except ModuleNotFoundError as error:
        raise ConfigError([NO_WANDB]) from error
