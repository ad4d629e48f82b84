"""Checkpoints through Orbax: written aside, committed by a rename, verified, restored on any mesh (walk: step 12).

Layout, one folder a step:

    checkpoints/step_000012/params/     float32 weights, one OCDBT store, leaf names as in the parameter table
                           /rest/       optimizer state and step count
                           /host/       bytes of the orchestrator: queue, cursors, ledger position
                           /meta/       JSON: step, architecture, config hash, versions

A folder without readable meta is no checkpoint: a killed writer leaves only folders that are never looked at. Knows
neither the optimizer nor what the bytes mean.
"""

import contextlib
import dataclasses
import importlib.metadata
import json
import logging
import re
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Generic, Protocol, Self, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh

from rl_jax.config import ConfigError, refuse
from rl_jax.models.architecture import Architecture, Rope
from rl_jax.models.schema import Params, abstract_params

log = logging.getLogger(__name__)

FOLDER = "checkpoints"
"""Folder of the checkpoints in the folder of a run."""
_STEP_NAME = re.compile(r"step_(\d{6,})")
_WRITE_ERRORS = (OSError, ValueError, RuntimeError)
"""What Orbax and TensorStore raise when a write fails."""
_VERSIONS_OF = ("jax", "flax", "optax", "orbax-checkpoint", "tensorstore", "numpy")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When to save and what to keep."""

    interval_steps: int = 50
    """Save after every so many steps, and after the last."""
    keep_last: int = 2
    """Newest checkpoints that are kept; at least 1."""
    keep_every: int = 0
    """Also keep the checkpoints of steps that this divides; 0 = none."""

    def __post_init__(self) -> None:
        least = {"interval_steps": 1, "keep_last": 1, "keep_every": 0}
        refuse(
            f"{name}={getattr(self, name)}: must be at least {low}"
            for name, low in least.items()
            if getattr(self, name) < low
        )


class CheckpointFailed(OSError):
    """A checkpoint could not be written; those before it are whole."""


class State(Protocol):
    """What a checkpoint holds: a dataclass with parameters and other pytrees."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field]]

    params: Params


S = TypeVar("S", bound=State)
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Meta:
    """What is known of a checkpoint without reading its arrays."""

    step: int
    architecture: Architecture
    config_hash: str
    """Hash of the resolved config of the run, "" if none was given."""
    versions: dict[str, str] = field(default_factory=dict)
    """Package -> version that wrote it."""


@dataclass(frozen=True, kw_only=True)
class Restored(Generic[S]):
    """What a checkpoint gave back."""

    state: S
    host: bytes
    meta: Meta


class Checkpointer:
    """Saves and restores the checkpoints of one run, one writer a run. Leave by `close` or use as a context."""

    def __init__(self, run_folder: Path, config: CheckpointConfig, arch: Architecture, config_hash: str = ""):
        # Orbax logs the traceback of every error that it also raises.
        logging.getLogger("absl").setLevel(logging.CRITICAL)
        self._folder = (run_folder / FOLDER).resolve()
        self._arch = arch
        self._config_hash = config_hash
        self._unverified: int | None = None
        self._set_broken_aside()
        keep: list[ocp.checkpoint_managers.PreservationPolicy] = [ocp.checkpoint_managers.LatestN(config.keep_last)]
        if config.keep_every:
            keep.append(ocp.checkpoint_managers.EveryNSteps(config.keep_every))
        self._options = ocp.CheckpointManagerOptions(
            step_prefix="step",
            step_format_fixed_length=6,
            cleanup_tmp_directories=True,  # a killed writer's
            preservation_policy=ocp.checkpoint_managers.AnyPreservationPolicy(keep),
        )
        self._manager = ocp.CheckpointManager(self._folder, options=self._options)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def latest(self) -> int | None:
        """Return the step of the newest whole checkpoint, None without one."""
        return max(whole_steps(self._folder), default=None)

    def save(self, step: int, state: State, host: bytes) -> None:
        """Start to save; returns when the arrays are copied, so the next step may donate them.

        Waits for the save before and verifies it first.

        Raises:
            CheckpointFailed: the disk is too full, or this or the save before could not be written.
        """
        self.wait()
        needed_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state)) + len(host)
        free_bytes = shutil.disk_usage(self._folder).free
        if free_bytes < needed_bytes:
            raise self._failed(step, "the disk is too full", needed_bytes)
        versions = {name: importlib.metadata.version(name) for name in _VERSIONS_OF}
        meta = Meta(step=step, architecture=self._arch, config_hash=self._config_hash, versions=versions)
        items = ocp.args.Composite(
            params=ocp.args.PyTreeSave(state.params),
            rest=ocp.args.PyTreeSave(_rest(state)),
            host=ocp.args.ArraySave(np.frombuffer(host + b"\0", np.uint8)),  # Orbax refuses an empty array
            meta=ocp.args.JsonSave(dataclasses.asdict(meta)),
        )
        try:
            self._manager.save(step, args=items)
        except _WRITE_ERRORS as error:
            raise self._failed(step, str(error), needed_bytes) from error
        self._unverified = step

    def wait(self) -> None:
        """Wait until the last save is committed, and verify it.

        Raises:
            CheckpointFailed: it could not be written or cannot be read back; those before it are whole.
        """
        step, self._unverified = self._unverified, None
        if step is None:
            return
        try:
            self._manager.wait_until_finished()
        except _WRITE_ERRORS as error:
            raise self._failed(step, str(error)) from error
        if step not in whole_steps(self._folder):
            raise self._failed(step, "it was committed, but its metadata cannot be read")

    def restore(self, abstract_state: S, step: int | None = None) -> Restored[S]:
        """Restore a checkpoint, the newest by default, with the shapes, dtypes and shardings of `abstract_state`.

        Raises:
            ConfigError: no whole checkpoint, another architecture, or another optimizer.
        """
        self.wait()
        step = self.latest() if step is None else step
        folder = find_checkpoint(self._folder if step is None else self._folder / _step_name(step))
        meta = read_meta(folder)
        if meta.architecture != self._arch:
            raise ConfigError([f"{folder}: is of another architecture, {_differences(meta.architecture, self._arch)}"])
        params = _restore_tree(folder / "params", abstract_state.params)
        rest = _restore_tree(folder / "rest", _rest(abstract_state))
        with ocp.Checkpointer(ocp.ArrayCheckpointHandler()) as reader:
            as_numpy = ocp.RestoreArgs(restore_type=np.ndarray)
            host = reader.restore(folder / "host", args=ocp.args.ArrayRestore(restore_args=as_numpy))
        return Restored(
            state=dataclasses.replace(abstract_state, params=params, **rest), host=host.tobytes()[:-1], meta=meta
        )

    def close(self) -> None:
        """Wait for the last save, verify it, and end the threads. Raises as `wait`."""
        try:
            self.wait()
        finally:
            self._manager.close()

    def _failed(self, step: int, why: str, needed_bytes: int | None = None) -> CheckpointFailed:
        """Remove what was written of a checkpoint, start afresh, and say what is left."""
        with contextlib.suppress(*_WRITE_ERRORS):
            self._manager.close()  # raises what it raised before
        _remove_partial(self._folder, step)
        self._manager = ocp.CheckpointManager(self._folder, options=self._options)
        needed = "" if needed_bytes is None else f"{needed_bytes / 1e6:.1f} MB are needed and "
        free = f"{shutil.disk_usage(self._folder).free / 1e6:.1f} MB are free"
        latest = self.latest()
        left = "there is none before it" if latest is None else f"the last whole one is of step {latest}"
        return CheckpointFailed(
            f"the checkpoint of step {step} failed in {self._folder}: {why[:300]}; {needed}{free}; {left}. "
            "Free disk space or lower checkpoint.keep_last, then resume"
        )

    def _set_broken_aside(self) -> None:
        """Rename folders of steps that are no whole checkpoints, so that neither retention nor a save meets them."""
        whole = whole_steps(self._folder)
        for folder in self._folder.glob("step_*") if jax.process_index() == 0 else ():
            match = _STEP_NAME.fullmatch(folder.name)
            if match and int(match[1]) not in whole:
                aside = folder.with_name(f"broken_{folder.name}_{time.time_ns()}")
                folder.rename(aside)
                log.warning("%s is no whole checkpoint; renamed to %s", folder, aside.name)


def whole_steps(folder: Path) -> list[int]:
    """Return the steps with a whole checkpoint in a folder of checkpoints, ascending."""
    matches = [_STEP_NAME.fullmatch(path.name) for path in folder.glob("step_*")]
    steps = [int(match[1]) for match in matches if match and _is_whole(folder / match[0])]
    return sorted(steps)


def find_checkpoint(path: Path) -> Path:
    """Return the folder of a checkpoint, given it, or the newest one, given the folder of a run or of its checkpoints.

    Raises:
        ConfigError: there is no whole checkpoint.
    """
    if _STEP_NAME.fullmatch(path.name):
        if _is_whole(path):
            return path
        raise ConfigError([f"{path}: is no whole checkpoint; whole are steps {whole_steps(path.parent) or 'none'}"])
    for folder in (path, path / FOLDER):
        if steps := whole_steps(folder):
            return folder / _step_name(steps[-1])
    raise ConfigError([f"{path}: no checkpoint in there; give the folder of a run, or of one checkpoint (step_...)"])


def read_meta(checkpoint: Path) -> Meta:
    """Return what is known of a checkpoint; `checkpoint` is its folder."""
    raw = json.loads((checkpoint / "meta" / "metadata").read_text(encoding="utf-8"))
    arch = raw["architecture"]
    return Meta(**raw | {"architecture": Architecture(**arch | {"rope": Rope(**arch["rope"])})})


def load_params(path: Path, mesh: Mesh) -> tuple[Meta, Params]:
    """Load only the float32 weights, sharded on `mesh`; for `path` see find_checkpoint.

    Raises:
        ConfigError: there is no whole checkpoint.
    """
    folder = find_checkpoint(path)
    meta = read_meta(folder)
    return meta, _restore_tree(folder / "params", abstract_params(meta.architecture, mesh))


def _rest(state: State) -> dict[str, object]:
    return {f.name: getattr(state, f.name) for f in dataclasses.fields(state) if f.name != "params"}


def _restore_tree(folder: Path, abstract: T) -> T:
    """Restore a tree with the shardings asked for; they are put on again, since Orbax may drop explicit axis types."""
    restore_args = ocp.checkpoint_utils.construct_restore_args(abstract)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        try:
            restored = reader.restore(folder, args=ocp.args.PyTreeRestore(item=abstract, restore_args=restore_args))
        except (ValueError, KeyError) as error:
            raise ConfigError(
                [f"{folder}: does not fit this config (another optimizer or model?): {str(error)[:500]}"]
            ) from error
    placed = jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), restored, abstract)
    for (path, leaf), like in zip(jax.tree.leaves_with_path(placed), jax.tree.leaves(abstract), strict=True):
        is_exact = (leaf.shape, leaf.dtype, leaf.sharding) == (like.shape, like.dtype, like.sharding)
        assert is_exact, (
            f"{folder} {jax.tree_util.keystr(path)}: restored as {leaf.sharding}, asked for {like.sharding}"
        )
    return placed


def _remove_partial(folder: Path, step: int) -> None:
    """Remove a half-written checkpoint; other writers of it may still be at work for a moment after one has failed."""
    left: list[Path] = []
    for _ in range(20):
        left = list(folder.glob(f"{_step_name(step)}.orbax-checkpoint-tmp*"))
        if not left:
            return
        for partial in left:
            shutil.rmtree(partial, ignore_errors=True)
        time.sleep(0.05)
    log.warning("%s: could not remove what is left of a failed checkpoint; remove it by hand", left)


def _step_name(step: int) -> str:
    return f"step_{step:06d}"


def _is_whole(checkpoint: Path) -> bool:
    stores = [checkpoint / "params" / "manifest.ocdbt", checkpoint / "rest" / "manifest.ocdbt", checkpoint / "host"]
    if not all(path.exists() for path in stores):
        return False
    try:
        return _step_name(read_meta(checkpoint).step) == checkpoint.name
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _differences(found: Architecture, expected: Architecture) -> str:
    names = [f.name for f in dataclasses.fields(Architecture)]
    changed = [name for name in names if getattr(found, name) != getattr(expected, name)]
    return ", ".join(f"{name}={getattr(found, name)!r} instead of {getattr(expected, name)!r}" for name in changed)
