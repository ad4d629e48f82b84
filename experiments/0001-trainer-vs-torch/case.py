"""The cases: a model, a batch and an optimizer, written to a folder that both programs read."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

from bridge import hf
from rl_jax.cli import RunConfig
from rl_jax.config import load
from rl_jax.mesh import MeshConfig, make_mesh
from rl_jax.models.architecture import Architecture, Rope
from rl_jax.models.schema import init_params, num_active_params, num_params
from rl_jax.packing import pack
from rl_jax.types import Batch, FinishReason, Rollout

SMOLLM2 = Architecture(
    family="llama",
    vocab_size=49152,
    width=576,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_width=64,
    mlp_width=1536,
    qk_norm=False,
    norm_eps=1e-5,
    max_positions=8192,
    rope=Rope(theta=100_000.0),
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One comparison; the rest of its numbers is in the config file."""

    name: str
    config: str
    arch: Architecture | None
    """None = that of the config file."""
    rollouts: int
    lengths: tuple[int, int]
    """Shortest and longest rollout in tokens; the second half of each is trained."""
    repeats: int
    steps: int
    """Steps of one turn, of which the median counts."""


CASES = (
    Case(
        name="demo, 2.5 M",
        config="configs/reverse_text.toml",
        arch=None,
        rollouts=128,
        lengths=(10, 28),
        repeats=8,
        steps=5,
    ),
    Case(
        name="SmolLM2-135M",
        config="configs/smollm2_reverse_text.toml",
        arch=SMOLLM2,
        rollouts=16,
        lengths=(40, 48),
        repeats=5,
        steps=1,
    ),
)


def quick(case: Case) -> Case:
    """Return the case with a small model and one turn."""
    small = None if case.arch is None else dataclasses.replace(case.arch, num_layers=2, vocab_size=1024)
    return dataclasses.replace(case, arch=small, repeats=1, steps=2)


def read_config(case: Case) -> tuple[RunConfig, Architecture]:
    """Return the config file and the shape of a case."""
    config = load(RunConfig, [case.config])
    return config, case.arch or config.model.resolve()


def write(case: Case, folder: Path) -> dict[str, int]:
    """Write weights (a Hugging Face directory), batches and the optimizer's numbers; return the sizes."""
    config, arch = read_config(case)
    params = init_params(arch, make_mesh(MeshConfig()), jax.random.key(0))
    hf.save_params(folder / "weights", arch, params)
    rollouts, advantages = _rollouts(case, arch)
    batches = pack(rollouts, advantages, config.packing)
    for i, batch in enumerate(batches):
        np.savez(folder / f"batch{i}.npz", **{f.name: getattr(batch, f.name) for f in dataclasses.fields(Batch)})
    numbers = {"optim": dataclasses.asdict(config.optim), "loss": dataclasses.asdict(config.loss)}
    (folder / "numbers.json").write_text(json.dumps(numbers))
    return {
        "parameters": num_params(arch),
        "active parameters": num_active_params(arch),
        "tokens": sum(int((batch.segments_BT > 0).sum()) for batch in batches),
        "slots": sum(batch.tokens_BT.size for batch in batches),
    }


def read_batches(folder: Path) -> list[Batch]:
    """Read the batches that `write` wrote."""
    return [Batch(**np.load(file)) for file in sorted(folder.glob("batch*.npz"))]


def _rollouts(case: Case, arch: Architecture) -> tuple[list[Rollout], np.ndarray]:
    """Draw rollouts with log-probabilities near those of random weights, so that some tokens are masked, most not."""
    chance = np.random.default_rng(0)
    rollouts = []
    for i in range(case.rollouts):
        length = int(chance.integers(case.lengths[0], case.lengths[1] + 1))
        sampled_T = np.arange(length) >= length // 2
        logprobs_T = -np.log(arch.vocab_size) + 0.3 * chance.standard_normal(length)
        rollouts.append(
            Rollout(
                rollout_id=i,
                group_id=i // 8,
                member=i % 8,
                env="none",
                task_id=i,
                tokens_T=chance.integers(0, min(256, arch.vocab_size), length).astype(np.int32),
                sampled_T=sampled_T,
                logprobs_T=np.where(sampled_T, logprobs_T, 0).astype(np.float32),
                versions_T=np.where(sampled_T, 0, -1).astype(np.int32),
                temperature=1.0,
                finish=FinishReason.STOP,
                reward=0.0,
            )
        )
    return rollouts, chance.standard_normal(case.rollouts)
