"""Orbax checkpoint -> Hugging Face directory that vLLM loads, through bounded memory; resumable, on one host or many."""

import contextlib
import dataclasses
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from bridge.export import export_config, export_table
from bridge.export_folder import ExportFolder
from bridge.fp8 import NonFiniteWeight
from bridge.orbax_reader import WeightStore, refuse_damaged
from bridge.out_folder import failed, refuse_full
from bridge.serving import tensor_parallel_faults
from bridge.shard_writer import ShardPlan, plan_shards
from bridge.sources import Source
from bridge.stream import ShardStream, Tally, read_totals
from rl_jax.config import ConfigError, refuse
from rl_jax.models.architecture import Architecture
from rl_jax.models.fp8_rule import Format


@dataclass(frozen=True, kw_only=True)
class ToHf:
    """What to convert, and how."""

    checkpoint: Path
    """Folder of one checkpoint."""
    arch: Architecture
    step: int
    """Step of the policy."""
    source: Source
    out: Path
    fmt: Format
    max_shard_bytes: int
    threads: int
    host: int = 0
    """Which of num_hosts this is; each writes every num_hosts-th file."""
    num_hosts: int = 1
    tensor_parallel: int = 1
    """Devices that will share the model."""
    is_trusted: bool = False
    """Do not compare the files of the checkpoint with its checksums: they are then read once, not twice."""
    budget_bytes: int = 512 << 20
    """Memory for slices under way."""


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What was done."""

    tally: Tally
    missing: tuple[str, ...]
    """Files that other hosts have not finished; empty = the directory is there."""
    resumed: int
    """Files that an earlier attempt had finished."""
    checked: int
    """Files of the checkpoint that this host has compared with the checksums which the run wrote: its share of all."""


class ToHfConversion:
    """A checked conversion: everything that can be refused is refused before a byte is written.

    Raises:
        ConfigError: with every fault.
    """

    def __init__(self, job: ToHf):
        self._job = job
        refuse(tensor_parallel_faults(job.arch, job.fmt, job.tensor_parallel))
        self._config = _config(job)
        self._store = _opened(job)
        self._plans = plan_shards(export_table(job.arch, job.fmt), job.max_shard_bytes)
        self._mine = self._plans[job.host :: job.num_hosts]
        self._folder = ExportFolder(job.out, self._plans, _identity(job))
        self._left: list[ShardPlan] = []
        self._checked = 0

    @property
    def num_files(self) -> int:
        """Files of the whole directory."""
        return len(self._plans)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Open the folder and hold the files of this host, around both steps below.

        Raises:
            ConfigError: the output exists or cannot be made, or another process holds it.
            OSError: the disk is full.
        """
        with self._folder.held(self._job.host):
            yield

    def prepare(self) -> int:
        """Look what an earlier attempt left, check the disk and the checkpoint; return the bytes to read.

        Raises:
            ConfigError: the disk is too full, or a file of the checkpoint is damaged; nothing is left behind.
        """
        job = self._job
        self._left = self._folder.unfinished(self._mine)
        try:
            refuse_full(job.out, self._folder.model, sum(plan.nbytes for plan in self._left))
            if self._left and not job.is_trusted:
                # Who writes a file looks at a share of the checkpoint first, so that no directory appears before all
                # of it was looked at.
                self._checked = refuse_damaged(job.checkpoint, (job.host, min(job.num_hosts, self.num_files)))
        except ConfigError:
            self._folder.discard(self._mine)
            raise
        return read_totals(self._left, {key: self._store.itemsize(key) for key in self._store.table})

    def run(self, on_bytes: Callable[[int], None]) -> Exported:
        """Write the files of this host, and the directory if it is the last host to finish.

        Raises:
            ConfigError: a weight is not finite, or the checkpoint is damaged; nothing is left behind.
            OSError: the disk is full; nothing is left behind.
        """
        job = self._job
        stream = ShardStream(
            self._store, job.arch, job.fmt, self._left, self._folder.model, self._folder.marks, job.budget_bytes
        )
        try:
            stream.run(job.threads, on_bytes)
            missing = self._folder.missing()
            if not missing:
                self._folder.commit(job.fmt, job.step, self._config, job.source.copies)
        except NonFiniteWeight as error:
            self._folder.discard(self._mine)
            raise ConfigError([f"{job.checkpoint}: {error}"]) from error
        except ConfigError:
            self._folder.discard(self._mine)
            raise
        except OSError as error:
            self._folder.discard(self._mine)
            raise failed(job.out, error) from error
        resumed = len(self._mine) - len(self._left)
        return Exported(tally=stream.tally, missing=tuple(missing), resumed=resumed, checked=self._checked)


def _opened(job: ToHf) -> WeightStore:
    try:
        return WeightStore(job.checkpoint / "params", job.arch)
    except ConfigError:
        if not job.is_trusted:
            refuse_damaged(job.checkpoint)  # then the file is named, not what could not be read of it
        raise


def _config(job: ToHf) -> dict[str, object]:
    try:
        return export_config(job.arch, job.fmt, job.source.config)
    except ConfigError as error:
        raise ConfigError([f"{job.source.config_from}: {fault}" for fault in error.faults]) from error


def _identity(job: ToHf) -> dict[str, object]:
    """Return what tells this conversion from another to the same directory."""
    params = job.checkpoint / "params"
    index = next(p for p in (params / "manifest.ocdbt", params / "_METADATA") if p.is_file())
    return {
        "checkpoint": job.checkpoint.name,
        "checkpoint_index": hashlib.sha256(index.read_bytes()).hexdigest(),
        "step": job.step,
        "format": job.fmt,
        "max_shard_bytes": job.max_shard_bytes,
        "num_hosts": job.num_hosts,
        "architecture": dataclasses.asdict(job.arch),
    }
