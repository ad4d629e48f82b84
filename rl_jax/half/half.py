"""The trainer's half of a run: what every process of it does, each on its own devices (steps 11 and 13 of docs/walk.md).

    load -> (warm_up -> train_sft ... -> end_warm_up)? or restore -> begin -> train, weights, score, save ...

A call computes something on the mesh, so on many hosts all processes make it in the same order: lead.py sends each
call of process 0 to the others, follow.py makes it there. Knows no sampler, orchestrator or metrics.
"""

import logging
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from jax.sharding import Mesh

from bridge.export import Format, export_arrays
from rl_jax import rooms
from rl_jax.checkpoint import Checkpointer, Meta
from rl_jax.cli import RunConfig
from rl_jax.config import ConfigError
from rl_jax.mesh import to_first_host
from rl_jax.models.architecture import Architecture
from rl_jax.models.schema import Params
from rl_jax.optim import OptimConfig, make_optimizer
from rl_jax.trainer.loop import StepResult, Trainer
from rl_jax.trainer.state import TrainState, abstract_state, weight_roles
from rl_jax.types import Batch

logger = logging.getLogger(__name__)

SEEN_FILE = ".seen-by-all-hosts"
"""Holds a random word for the time of a start: a host that reads another one has another folder."""


class TrainerHalf:
    """See the module; `trainer` is there from warm_up or begin on."""

    trainer: Trainer
    checkpoints: Checkpointer

    def __init__(self, config: RunConfig, arch: Architecture, mesh: Mesh, does: Literal["rl", "sft"] = "rl"):
        self.config = config
        self.does = does
        self.arch = arch
        self.mesh = mesh
        self._start: Params | TrainState | None = None

    def open(self, folder: Path, config_hash: str, word: str | None = None) -> None:
        """Open the checkpoints of a run folder; a `word` must be what process 0 has written into it.

        Raises:
            ConfigError: this host does not see the folder of process 0.
        """
        if word is not None and _word_in(folder) != word:
            raise ConfigError(
                [
                    f"run.dir={self.config.run.dir!r}: this host does not see the run folder {folder} of process 0; all "
                    "hosts write checkpoints into it, so it must be on a file system that they share"
                ]
            )
        self.checkpoints = Checkpointer(folder, self.config.checkpoint, self.arch, config_hash)

    # ---- what the trainer starts from

    def load(self) -> None:
        """Read or draw the weights that the run starts from."""
        self._start = rooms.load_start(self.config, self.arch, self.mesh)

    def restore(self, step: int, rewinds: bool) -> tuple[Meta, bytes]:
        """Read the checkpoint of a step; return what it says of itself and the orchestrator's bytes.

        Args:
            rewinds: set those after it aside.
        Raises:
            ConfigError: it is damaged, or of another model or optimizer.
        """
        optimizer = make_optimizer(self._optim, weight_roles(self.arch))
        found = self.checkpoints.restore(abstract_state(self.arch, optimizer, self.mesh), step)
        if rewinds:
            self.checkpoints.rewind(step)
        self._start = found.state
        return found.meta, found.host

    def warm_up(self) -> None:
        """Start a trainer of the supervised steps before RL."""
        self.trainer = self._trainer(self.config.sft.optim)

    def end_warm_up(self) -> None:
        """Keep what the supervised steps made of the weights as the start."""
        self._start = self.trainer.state.params

    def begin(self) -> None:
        """Start the trainer of the run."""
        needs_reference = self.does == "rl" and self.config.loss.ref_kl_coef
        reference = rooms.load_start(self.config, self.arch, self.mesh) if needs_reference else None
        self.trainer = self._trainer(self._optim, reference)

    @property
    def entry(self) -> str:
        """The module of rl_jax that starts such a run."""
        return "train" if self.does == "rl" else "sft"

    @property
    def _optim(self) -> OptimConfig:
        return self.config.optim if self.does == "rl" else self.config.sft.optim

    def _trainer(self, optim: OptimConfig, reference: Params | None = None) -> Trainer:
        start, self._start = self._start, None
        assert start is not None, "load() or restore() first"
        config = self.config
        return Trainer(
            config=config.trainer,
            arch=self.arch,
            forward=config.forward,
            loss=config.loss,
            optim=optim,
            mesh=self.mesh,
            start=start,
            reference=reference,
        )

    # ---- steps

    def train(
        self,
        batches: Sequence[Batch],
        routes_BTLA: Sequence[np.ndarray] | None = None,
        rollout_ids: Sequence[int] | None = None,
    ) -> StepResult:
        """Take one step of the policy loss."""
        return self.trainer.train(batches, routes_BTLA=routes_BTLA, rollout_ids=rollout_ids)

    def train_sft(self, batches: Sequence[Batch]) -> StepResult:
        """Take one step of cross entropy."""
        return self.trainer.train_sft(batches)

    # ---- what others need of the weights

    def weights(self) -> Params:
        """Return a copy of the weights in the compute dtype for a sampler; on many hosts whole, in process 0 alone."""
        return to_first_host(self.trainer.weights(), self.mesh)

    def export(self, fmt: Format) -> None:
        """Take part in an export of the weights whose tensors process 0 writes; every process sees one at a time."""
        for _ in export_arrays(self.arch, self.trainer.weights(), fmt):
            pass

    def master_weights(self) -> Params:
        """Return the float32 weights for an export; on many hosts whole, in process 0 alone."""
        return to_first_host(self.trainer.state.params, self.mesh)

    def score(self, sequences: Sequence[np.ndarray], temperature: float = 1.0) -> list[np.ndarray]:
        """Return the log-probabilities of each sequence's tokens."""
        return self.trainer.score(sequences, temperature)

    # ---- checkpoints

    def save(self, host: bytes) -> None:
        """Start to write the checkpoint of the current step; the one before it is committed when this returns."""
        self.checkpoints.save(self.trainer.version, self.trainer.state, host)

    def wait(self) -> None:
        """Wait until the last checkpoint is committed."""
        self.checkpoints.wait()

    def close(self) -> None:
        """Wait for the last checkpoint and close them; idempotent."""
        if hasattr(self, "checkpoints"):
            self.checkpoints.close()


def write_word(folder: Path) -> str:
    """Write a random word into the folder and return it."""
    word = secrets.token_hex(8)
    (folder / SEEN_FILE).write_text(word)
    return word


def remove_word(folder: Path) -> None:
    """Remove what write_word wrote."""
    (folder / SEEN_FILE).unlink(missing_ok=True)


def _word_in(folder: Path) -> str | None:
    try:
        return (folder / SEEN_FILE).read_text()
    except OSError:
        return None
