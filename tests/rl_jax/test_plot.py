"""The curves of a run: whatever its numbers are, they are drawn without a complaint."""

import json
from pathlib import Path

from rl_jax.metrics import METRICS_FILE
from rl_jax.plot import plot_run


def test_a_run_that_sampled_nothing_is_drawn(tmp_path: Path) -> None:
    line = {"step": 0, "inference/agg/tokens_per_s": 0.0, "optim/grad_norm": None, "eval/a/avg@1": 0.25}
    (tmp_path / METRICS_FILE).write_text(json.dumps(line) + "\n")
    file = plot_run(tmp_path)  # warnings are errors here: a logarithm of 0 would be one
    assert file.read_bytes().startswith(b"\x89PNG")
    assert file.stat().st_size > 5000
