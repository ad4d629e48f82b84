"""metrics.jsonl survives kills and resumes; sinks get the same numbers; the plot draws what is there."""

import json
import math
import sys
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event

from rl_jax.config import ConfigError
from rl_jax.metrics import MetricsConfig, MetricsWriter, RolloutText, quantiles, read_metrics
from rl_jax.plot import plot_run

QUIET = MetricsConfig(tensorboard=False)


def write(folder: Path, steps: range, resumed_step: int | None = None) -> None:
    writer = MetricsWriter(folder, QUIET, {}, resumed_step)
    for step in steps:
        writer.log(step, {"reward": step / 10})
    writer.close()


def test_a_line_is_on_disk_when_log_returns(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, QUIET, {})
    writer.log(3, {"b": 1.5, "a": math.nan})
    line = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert (line["step"], line["b"], line["a"]) == (3, 1.5, None)
    writer.close()


def test_resuming_removes_later_lines_and_a_torn_one(tmp_path: Path) -> None:
    write(tmp_path, range(1, 6))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "rew')
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2, 3, 4, 5]
    write(tmp_path, range(4, 6), resumed_step=3)
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2, 3, 4, 5]
    assert [line["reward"] for line in read_metrics(tmp_path)] == [0.1, 0.2, 0.3, 0.4, 0.5]


def test_quantiles_are_those_of_the_values() -> None:
    values = np.random.default_rng(0).permutation(np.arange(101, dtype=np.float32))
    assert quantiles("kl", values) == {
        "kl/mean": 50,
        "kl/max": 100,
        "kl/p10": 10,
        "kl/p50": 50,
        "kl/p90": 90,
        "kl/p99": 99,
    }
    assert quantiles("kl", values[:0]) == {}


def test_tensorboard_gets_the_same_numbers(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, MetricsConfig(), {})
    writer.log(7, {"loss/mean": 0.25, "broken": math.inf})
    writer.close()
    (file,) = (tmp_path / "tensorboard").iterdir()
    values = {v.tag: (event.step, v.simple_value) for event in events(file) for v in event.summary.value}
    assert values == {"loss/mean": (7, 0.25)}


def events(file: Path) -> list[Event]:
    """Read TFRecords: length (8 bytes), its checksum (4), the event, its checksum (4)."""
    raw, found, start = file.read_bytes(), [], 0
    while start < len(raw):
        length = int.from_bytes(raw[start : start + 8], "little")
        found.append(Event.FromString(raw[start + 12 : start + 12 + length]))
        start += length + 16
    return found


def test_wandb_is_imported_only_when_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    MetricsWriter(tmp_path, QUIET, {}).close()
    with pytest.raises(ConfigError, match=r"pip install 'rl-jax\[wandb\]'"):
        MetricsWriter(tmp_path, MetricsConfig(wandb=True), {})


def test_wandb_continues_the_run_of_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "packages"
    package.mkdir()
    (package / "wandb.py").write_text(
        "calls = []\n"
        "def init(**options): calls.append(('init', options['id'], options['resume'], options['config']))\n"
        "def log(metrics, step): calls.append(('log', metrics, step))\n"
        "def finish(): calls.append(('finish',))\n"
    )
    monkeypatch.syspath_prepend(str(package))
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    writer = MetricsWriter(tmp_path / "my-run", MetricsConfig(tensorboard=False, wandb=True), {"seed": 1})
    writer.log(2, {"reward": 0.5, "broken": math.nan})
    writer.close()
    assert sys.modules["wandb"].calls == [
        ("init", "my-run", "allow", {"seed": 1}),
        ("log", {"reward": 0.5}, 2),
        ("finish",),
    ]
    monkeypatch.delitem(sys.modules, "wandb")


def test_rollouts_are_written_as_text(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, MetricsConfig(tensorboard=False, rollouts_per_step=2), {})
    shown = [
        RolloutText(title=f"task {i}", facts={"reward": 0.5, "finish": "stop"}, prompt="ab", completion="bä")
        for i in range(3)
    ]
    writer.rollouts(12, shown)
    writer.close()
    text = (tmp_path / "rollouts" / "step_000012.txt").read_text(encoding="utf-8")
    assert "task 0" in text and "task 1" in text and "task 2" not in text
    assert "reward=0.500  finish=stop\n--- prompt\nab\n--- completion\nbä\n" in text


def test_plot_draws_a_panel_for_what_is_there(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, QUIET, {})
    for step in range(1, 20):
        writer.log(step, {"train/agg/all/reward/mean": step / 20, "mismatch_kl/all/mean": 1e-3 / step, "other": 1.0})
    writer.close()
    path = plot_run(tmp_path, "a run")
    pixels = matplotlib.image.imread(path)
    assert path.name == "curves.png" and pixels.shape[1] > pixels.shape[0]  # two panels side by side
    assert len(np.unique(pixels.reshape(-1, pixels.shape[-1]), axis=0)) > 50


def test_plot_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no metrics\.jsonl in there"):
        plot_run(tmp_path)
    MetricsWriter(tmp_path, QUIET, {}).close()
    with pytest.raises(ValueError, match="0 lines of metrics hold nothing to plot"):
        plot_run(tmp_path)
