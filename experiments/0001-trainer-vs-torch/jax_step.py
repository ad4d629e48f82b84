"""Our side: rl_jax.trainer, exactly as a run uses it."""

import statistics
import time
from pathlib import Path

from case import CASES, quick, read_batches, read_config

from bridge import hf
from experiments.worker import Values, serve
from rl_jax.mesh import MeshConfig, make_mesh
from rl_jax.trainer.loop import Trainer

loaded: dict[str, object] = {}


def load(folder: str, case: int, is_quick: bool) -> Values:
    """Read weights and batches of a case."""
    config, arch = read_config(quick(CASES[case]) if is_quick else CASES[case])
    mesh = make_mesh(MeshConfig())
    loaded["trainer"] = Trainer(
        config=config.trainer,
        arch=arch,
        forward=config.forward,
        loss=config.loss,
        optim=config.optim,
        mesh=mesh,
        start=hf.load_params(Path(folder) / "weights", arch, mesh),
    )
    loaded["batches"] = read_batches(Path(folder))
    return {}


def step(count: int) -> Values:
    """Take optimizer steps; returns the median time, and loss and gradient norm of each."""
    trainer, batches = loaded["trainer"], loaded["batches"]
    assert isinstance(trainer, Trainer) and isinstance(batches, list)
    seconds, losses, norms = [], [], []
    for _ in range(count):
        started = time.perf_counter()
        metrics = trainer.train(batches).metrics
        seconds.append(time.perf_counter() - started)
        losses.append(metrics["loss/mean"])
        norms.append(metrics["optim/grad_norm"])
    return {"seconds": statistics.median(seconds), "losses": losses, "norms": norms}


serve({"load": load, "step": step})
