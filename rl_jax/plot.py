"""The curves of a run as one PNG, drawn from its metrics.jsonl."""

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rl_jax.metrics import read_metrics

Lines = Sequence[dict[str, float | None]]


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One small plot: every metric that matches one of the patterns is a curve of it."""

    title: str
    patterns: tuple[str, ...]
    is_log: bool = False
    is_fraction: bool = False


PANELS = (
    Panel(title="Reward", patterns=("train/agg/all/reward/mean", "eval/*/avg@*"), is_fraction=True),
    Panel(title="Exact match", patterns=("train/agg/all/exact/mean", "eval/*/exact"), is_fraction=True),
    Panel(title="Mismatch KL", patterns=("mismatch_kl/all/mean", "mismatch_kl/all/p99"), is_log=True),
    Panel(title="Staleness, policy versions", patterns=("off_policy/mean", "off_policy/max")),
    Panel(title="Entropy, nats", patterns=("entropy/all/mean", "entropy/all/p10", "entropy/all/p90")),
    Panel(title="Tokens a second", patterns=("perf/throughput", "inference/agg/tokens_per_s"), is_log=True),
    Panel(title="Loss", patterns=("loss/policy", "loss/cross_entropy")),
    Panel(title="Gradient norm", patterns=("optim/grad_norm",), is_log=True),
)
"""Metrics by name, as shell patterns. A panel without a matching metric is not drawn."""


def plot_run(folder: Path, title: str = "") -> Path:
    """Draw the curves of the run in `folder` to curves.png there and return its path.

    Raises:
        ConfigError: there is no metrics.jsonl.
        ValueError: it holds no metric of any panel.
    """
    lines = read_metrics(folder)
    curves = [(panel, names) for panel in PANELS if (names := _matching(panel, lines))]
    if not curves:
        raise ValueError(f"{folder}: its {len(lines)} lines of metrics hold nothing to plot")
    num_columns = min(2, len(curves))
    num_rows = -(-len(curves) // num_columns)
    figure = Figure(figsize=(5.6 * num_columns, 2.7 * num_rows + 0.5), layout="constrained")
    with matplotlib.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        for i, (panel, names) in enumerate(curves):
            _draw(figure.add_subplot(num_rows, num_columns, i + 1), panel, names, lines)
        figure.suptitle(title or folder.resolve().name, fontweight="bold")
        figure.savefig(folder / "curves.png", dpi=130)
    return folder / "curves.png"


def _matching(panel: Panel, lines: Lines) -> list[str]:
    names = sorted({name for line in lines for name, value in line.items() if value is not None})
    return [name for pattern in panel.patterns for name in names if fnmatch.fnmatchcase(name, pattern)]


def _draw(axes: Axes, panel: Panel, names: Sequence[str], lines: Lines) -> None:
    for name in dict.fromkeys(names):
        points = [(line["step"] or 0.0, value) for line in lines if (value := line.get(name)) is not None]
        marker = "o" if len(points) < 30 else ""
        axes.plot(
            [x for x, _ in points], [y for _, y in points], label=name, linewidth=1.6, marker=marker, markersize=3
        )
    axes.set_title(panel.title, loc="left")
    axes.grid(True, color="0.9")
    axes.set_axisbelow(True)
    axes.legend(frameon=False, fontsize=7)
    values = [value for line in lines for name in names if (value := line.get(name)) is not None]
    if panel.is_log and all(value > 0 for value in values):
        axes.set_yscale("log")
    if panel.is_fraction and axes.get_ylim()[0] > -0.2 and axes.get_ylim()[1] < 1.2:
        axes.set_ylim(-0.02, 1.02)
    axes.set_xlabel("step")
