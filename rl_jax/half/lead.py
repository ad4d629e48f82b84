"""Process 0 of many: every call of the trainer's half is an order to the other processes first, then made here too.

With one process the same class only makes the calls. Knows what an order says, not what it does.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import numpy as np
from jax.sharding import Mesh

from bridge.export import Format
from rl_jax.checkpoint import Meta
from rl_jax.cli import RunConfig
from rl_jax.half.half import TrainerHalf, remove_word, write_word
from rl_jax.hosts.group import Hosts
from rl_jax.hosts.line import Message
from rl_jax.hosts.parts import cut
from rl_jax.models.architecture import Architecture
from rl_jax.models.schema import Params
from rl_jax.trainer.loop import StepResult
from rl_jax.types import Batch


class LeadingHalf(TrainerHalf):
    """See the module; one thread at a time."""

    def __init__(
        self, config: RunConfig, arch: Architecture, mesh: Mesh, hosts: Hosts, does: Literal["rl", "sft"] = "rl"
    ):
        super().__init__(config, arch, mesh, does)
        self._hosts = hosts

    def open(self, folder: Path, config_hash: str, word: str | None = None) -> None:
        """Open the checkpoints of a run folder that all hosts see."""
        if self._hosts.is_alone:
            return super().open(folder, config_hash)
        folder = folder.absolute()
        word = write_word(folder)
        self._order("open", folder=str(folder), config_hash=config_hash, word=word)
        super().open(folder, config_hash, word)
        self._hosts.settle({})
        remove_word(folder)

    def load(self) -> None:
        """Read or draw the weights that the run starts from."""
        self._order("load")
        super().load()
        self._hosts.settle({})

    def restore(self, step: int, rewinds: bool) -> tuple[Meta, bytes]:
        """Read the checkpoint of a step."""
        self._order("restore", step=step, rewinds=rewinds)
        found = super().restore(step, rewinds)
        self._hosts.settle({"step": found[0].step})
        return found

    def warm_up(self) -> None:
        """Start a trainer of the supervised steps before RL."""
        self._order("warm_up")
        super().warm_up()
        self._hosts.settle({})

    def end_warm_up(self) -> None:
        """Keep what the supervised steps made of the weights as the start."""
        self._order("end_warm_up")
        super().end_warm_up()
        self._hosts.settle({})

    def begin(self) -> None:
        """Start the trainer of the run."""
        self._order("begin")
        super().begin()
        self._hosts.settle({"step": self.trainer.version})

    def train(
        self,
        batches: Sequence[Batch],
        routes_BTLA: Sequence[np.ndarray] | None = None,
        rollout_ids: Sequence[int] | None = None,
    ) -> StepResult:
        """Take one step of the policy loss, each process on its rows."""
        self._send_batches("train", batches, routes_BTLA if self.config.trainer.router_replay else None)
        result = super().train(batches, routes_BTLA, rollout_ids)
        self._hosts.settle(facts_of(result))
        return result

    def train_sft(self, batches: Sequence[Batch]) -> StepResult:
        """Take one step of cross entropy, each process on its rows."""
        self._send_batches("train_sft", batches, None)
        result = super().train_sft(batches)
        self._hosts.settle(facts_of(result))
        return result

    def weights(self) -> Params:
        """Return a copy of the weights in the compute dtype for a sampler."""
        self._order("weights")
        found = super().weights()
        self._hosts.settle({})
        return found

    @contextmanager
    def exporting(self, fmt: Format) -> Iterator[Params]:
        """Give out a copy of the weights as they are sharded, for one bridge.export.export_arrays inside the block.

        That works on the whole mesh: the other processes make the same export meanwhile and drop what comes out.
        """
        self._order("export", fmt=fmt)
        yield self.trainer.weights()
        self._hosts.settle({})

    def master_weights(self) -> Params:
        """Return the float32 weights for an export."""
        self._order("master_weights")
        found = super().master_weights()
        self._hosts.settle({})
        return found

    def score(self, sequences: Sequence[np.ndarray], temperature: float = 1.0) -> list[np.ndarray]:
        """Return the log-probabilities of each sequence's tokens."""
        if not self._hosts.is_alone:
            facts: dict[str, object] = {"temperature": temperature}
            self._hosts.order(Message(kind="score", facts=facts, arrays=list(sequences)))
        found = super().score(sequences, temperature)
        self._hosts.settle({})
        return found

    def save(self, host: bytes) -> None:
        """Start to write the checkpoint of the current step, every process its shards."""
        self._order("save")
        super().save(host)
        self._hosts.settle({"step": self.trainer.version})

    def wait(self) -> None:
        """Wait until the last checkpoint is committed."""
        self._order("wait")
        super().wait()
        self._hosts.settle({})

    def _order(self, kind: str, **facts: object) -> None:
        if not self._hosts.is_alone:
            self._hosts.order(Message(kind=kind, facts=facts))

    def _send_batches(self, kind: str, batches: Sequence[Batch], routes_BTLA: Sequence[np.ndarray] | None) -> None:
        if not self._hosts.is_alone:
            others = range(1, self._hosts.num_processes)
            self._hosts.order({p: cut(kind, self.mesh, p, batches, routes_BTLA) for p in others})


def facts_of(result: StepResult) -> dict[str, object]:
    """Return what must be the same in all processes after a step, to the last bit."""
    names = ("loss/mean", "optim/grad_norm", "optim/param_norm")
    return {"step": result.step, **{name: result.metrics[name].hex() for name in names}}
