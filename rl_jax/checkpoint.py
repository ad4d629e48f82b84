"""Checkpoints through Orbax: written aside, committed by a rename, verified, restored on any mesh (walk: step 13).

Layout, one folder a step:

    checkpoints/step_000012/params/     float32 weights, one OCDBT store, leaf names as in the parameter table
                           /rest/       optimizer state and step count
                           /host/       bytes of the orchestrator: queue, cursors, ledger position
                           /meta/       JSON: step, architecture, config hash, versions
                           /checksums.json   of every file (rl_jax/checksums.py), compared before it is read

A folder without readable meta is no checkpoint: a killed writer leaves only folders that are never looked at. One that
was converted from a Hugging Face directory has params and meta only. Knows neither the optimizer nor what the bytes mean.
"""

import contextlib
import dataclasses
import importlib.metadata
import json
import logging
import math
import re
import shlex
import shutil
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Generic, Literal, Protocol, Self, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh

from rl_jax.checksums import damaged_files, write_checksums
from rl_jax.config import ConfigError, refuse
from rl_jax.models.architecture import Architecture, Rope
from rl_jax.models.schema import Param, Params, abstract_params, flat_table, nested

log = logging.getLogger(__name__)

FOLDER = "checkpoints"
"""Folder of the checkpoints in the folder of a run."""
CHUNK_BYTES = 64 << 20
"""Arrays of weights up to this size are stored in one chunk a shard."""
_STEP_NAME = re.compile(r"step_(\d{6,})")
_WRITE_ERRORS = (OSError, ValueError, RuntimeError)
"""What Orbax and TensorStore raise when a write fails."""
_READ_ERRORS = (OSError, ValueError, KeyError, TypeError, RuntimeError)
"""What Orbax and TensorStore raise when a checkpoint is damaged, or is not of the tree that is asked for."""
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
    holds: Literal["state", "weights"] = "state"
    """Everything that a run continues from, or only what it can start from."""


def versions() -> dict[str, str]:
    """Return the versions of the packages that decide what a checkpoint looks like."""
    return {name: importlib.metadata.version(name) for name in _VERSIONS_OF}


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
        self._finisher = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-finisher")
        self._finishing: Future[None] | None = None
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
        self._manager = _open_manager(self._folder, self._options)

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
        meta = Meta(step=step, architecture=self._arch, config_hash=self._config_hash, versions=versions())
        items = ocp.args.Composite(
            params=ocp.args.PyTreeSave(state.params, save_args=_chunks(self._arch)),
            rest=ocp.args.PyTreeSave(_rest(state)),
            host=ocp.args.ArraySave(np.frombuffer(host + b"\0", np.uint8)),  # Orbax refuses an empty array
            meta=ocp.args.JsonSave(dataclasses.asdict(meta)),
        )
        try:
            self._manager.save(step, args=items)
        except _WRITE_ERRORS as error:
            raise self._failed(step, str(error), needed_bytes) from error
        self._unverified = step
        self._finishing = self._finisher.submit(self._finish, step)

    def _finish(self, step: int) -> None:
        """Wait for the commit and write the checksums: beside the training, it reads back all that was written."""
        self._manager.wait_until_finished()
        if jax.process_index() == 0:
            write_checksums(self._folder / _step_name(step))

    def wait(self) -> None:
        """Wait until the last save is committed, and verify it.

        Raises:
            CheckpointFailed: it could not be written or cannot be read back; those before it are whole.
        """
        step, self._unverified = self._unverified, None
        if step is None:
            return
        assert self._finishing is not None, "it is set with the step"
        try:
            self._finishing.result()
        except _WRITE_ERRORS as error:
            raise self._failed(step, str(error)) from error
        if step not in whole_steps(self._folder):
            raise self._failed(step, "it was committed, but its metadata cannot be read")

    def restore(self, abstract_state: S, step: int | None = None) -> Restored[S]:
        """Restore a checkpoint, the newest by default, with the shapes, dtypes and shardings of `abstract_state`.

        Raises:
            ConfigError: no whole checkpoint, a damaged one, another architecture, or another optimizer.
        """
        self.wait()
        step = self.latest() if step is None else step
        folder = find_checkpoint(self._folder if step is None else self._folder / _step_name(step))
        meta = read_meta(folder)
        if meta.architecture != self._arch:
            raise ConfigError([f"{folder}: is of another architecture, {_differences(meta.architecture, self._arch)}"])
        if meta.holds == "weights":
            raise ConfigError([f"{folder}: holds weights only; name it in model.path to start a run from it"])
        _refuse_damaged(folder)
        params = _restore_tree(folder / "params", abstract_state.params)
        rest = _restore_tree(folder / "rest", _rest(abstract_state))
        host = _restore_host(folder / "host")
        return Restored(
            state=dataclasses.replace(abstract_state, params=params, **rest), host=host.tobytes()[:-1], meta=meta
        )

    def rewind(self, step: int) -> None:
        """Set the checkpoints after `step` aside, so that a run that was restored from it goes on from there."""
        for newer in [s for s in whole_steps(self._folder) if s > step] if jax.process_index() == 0 else ():
            folder = self._folder / _step_name(newer)
            aside = folder.with_name(f"newer_{folder.name}_{time.time_ns()}")
            folder.rename(aside)
            log.warning("%s is newer than what the run goes on from; renamed to %s", folder, aside.name)
        self._manager.close()
        self._manager = _open_manager(self._folder, self._options)

    def close(self) -> None:
        """Wait for the last save, verify it, and end the threads. Raises as `wait`."""
        try:
            self.wait()
        finally:
            self._finisher.shutdown()
            self._manager.close()

    def _failed(self, step: int, why: str, needed_bytes: int | None = None) -> CheckpointFailed:
        """Remove what was written of a checkpoint, start afresh, and say what is left."""
        with contextlib.suppress(*_WRITE_ERRORS):
            self._manager.close()  # raises what it raised before
        _remove_partial(self._folder, step)
        self._manager = _open_manager(self._folder, self._options)
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
    raise ConfigError(
        [
            f"{path}: no checkpoint in there, and no config.json of a Hugging Face directory; "
            "give the folder of a run, or of one checkpoint (step_...)"
        ]
    )


def holds_checkpoint(path: Path) -> bool:
    """Return whether find_checkpoint finds one there; a Hugging Face directory holds none."""
    if (path / "config.json").is_file():
        return False
    try:
        find_checkpoint(path)
    except ConfigError:
        return False
    return True


def read_meta(checkpoint: Path) -> Meta:
    """Return what is known of a checkpoint; `checkpoint` is its folder."""
    raw = json.loads((checkpoint / "meta" / "metadata").read_text(encoding="utf-8"))
    arch = raw["architecture"]
    return Meta(**raw | {"architecture": Architecture(**arch | {"rope": Rope(**arch["rope"])})})


def load_params(path: Path, mesh: Mesh) -> tuple[Meta, Params]:
    """Load only the float32 weights, sharded on `mesh`; for `path` see find_checkpoint.

    Raises:
        ConfigError: there is no whole checkpoint, or its weights are damaged.
    """
    folder = find_checkpoint(path)
    meta = read_meta(folder)
    _refuse_damaged(folder, ("params",))
    return meta, _restore_tree(folder / "params", abstract_params(meta.architecture, mesh))


def _open_manager(folder: Path, options: ocp.CheckpointManagerOptions) -> ocp.CheckpointManager:
    """Open a folder of checkpoints whose arrays are stored as they are.

    Weights and moments in float32 are noise to a compressor: zstd saves a tenth of the bytes, and makes writing and
    reading several times as much work.
    """
    plain = {part: ocp.PyTreeCheckpointHandler(use_compression=False) for part in ("params", "rest")}
    registry = ocp.handlers.create_default_handler_registry(**plain)
    return ocp.CheckpointManager(folder, options=options, handler_registry=registry)


def _chunks(arch: Architecture) -> Params:
    """Return how the weights are cut, so that bridge.convert can read them by parts."""
    return nested({key: _cut(param) for key, param in flat_table(arch).items()})


def _cut(param: Param) -> ocp.SaveArgs:
    """Cut a large array by layer and expert, or an embedding, which has neither, by rows: they are the longer dimension."""
    if 4 * math.prod(param.sizes) <= CHUNK_BYTES:
        return ocp.SaveArgs()
    if param.stacked:
        return ocp.SaveArgs(shard_axes=tuple(range(len(param.stacked))))
    # Orbax cuts into equal parts: a prime number of rows would become as many chunks.
    most_rows = CHUNK_BYTES // (4 * math.prod(param.sizes[1:]))
    rows = max((n for n in range(1, most_rows + 1) if param.sizes[0] % n == 0), default=0)
    return ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES if 8 * rows > most_rows else None)


def _rest(state: State) -> dict[str, object]:
    return {f.name: getattr(state, f.name) for f in dataclasses.fields(state) if f.name != "params"}


def _restore_tree(folder: Path, abstract: T) -> T:
    """Restore a tree with the shardings asked for; they are put on again, since Orbax may drop explicit axis types."""
    restore_args = ocp.checkpoint_utils.construct_restore_args(abstract)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        try:
            restored = reader.restore(folder, args=ocp.args.PyTreeRestore(item=abstract, restore_args=restore_args))
        except _READ_ERRORS as error:
            raise ConfigError([_fault_of_tree(folder, abstract, error)]) from error
    placed = jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), restored, abstract)
    for (path, leaf), like in zip(jax.tree.leaves_with_path(placed), jax.tree.leaves(abstract), strict=True):
        is_exact = (leaf.shape, leaf.dtype, leaf.sharding) == (like.shape, like.dtype, like.sharding)
        assert is_exact, (
            f"{folder} {jax.tree_util.keystr(path)}: restored as {leaf.sharding}, asked for {like.sharding}"
        )
    return placed


def _restore_host(folder: Path) -> np.ndarray:
    with ocp.Checkpointer(ocp.ArrayCheckpointHandler()) as reader:
        as_numpy = ocp.RestoreArgs(restore_type=np.ndarray)
        try:
            return reader.restore(folder, args=ocp.args.ArrayRestore(restore_args=as_numpy))
        except _READ_ERRORS as error:
            raise ConfigError([_unreadable(folder, error)]) from error


def _refuse_damaged(checkpoint: Path, parts: Sequence[str] = ()) -> None:
    """Refuse a checkpoint whose files are not what was written: flipped bytes would be weights as good as any."""
    if damaged := damaged_files(checkpoint, parts):
        more = f" and {len(damaged) - 1} more files" if len(damaged) > 1 else ""
        raise ConfigError([f"{damaged[0]}{more}: damaged or gone since it was written; {_way_out(checkpoint)}"])


def _way_out(checkpoint: Path) -> str:
    """Say what to do instead of reading a damaged checkpoint."""
    older = [step for step in whole_steps(checkpoint.parent) if _step_name(step) < checkpoint.name]
    if not older:
        return "there is no older checkpoint beside it; restore it from a copy or start again"
    before = checkpoint.with_name(_step_name(older[-1]))
    return f"name an older one instead of it, to go on from there: --resume {shlex.quote(str(before))}"


def _unreadable(part: Path, error: Exception) -> str:
    first_line = (str(error) or repr(error)).splitlines()[0]
    return f"{part}: cannot be read, damaged or incomplete ({first_line[:160]}); {_way_out(part.parent)}"


def _fault_of_tree(folder: Path, abstract: object, error: Exception) -> str:
    """Say why a tree could not be restored: it holds other leaves than were asked for, or it is damaged."""
    wanted = {jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in jax.tree.leaves_with_path(abstract)}
    try:
        entries = json.loads((folder / "_METADATA").read_text(encoding="utf-8"))["tree_metadata"].values()
        found = {
            ".".join(str(key["key"]) for key in entry["key_metadata"])
            for entry in entries
            if not entry["value_metadata"]["skip_deserialize"]
        }
    except _READ_ERRORS:
        return _unreadable(folder, error)
    if found == wanted:
        return _unreadable(folder, error)
    return (
        f"{folder}: is of another optimizer or model than this config's: it has {_some(found - wanted)} and lacks "
        f"{_some(wanted - found)}; resume with the settings of optim and model that it was written with"
    )


def _some(names: set[str]) -> str:
    first = sorted(names)[:2]
    return (", ".join(first) or "nothing else") + (f" and {len(names) - 2} more" if len(names) > 2 else "")


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
    try:
        meta = read_meta(checkpoint)
    except (OSError, ValueError, KeyError, TypeError):
        return False
    stores = [checkpoint / "params" / "manifest.ocdbt"]
    if meta.holds == "state":
        stores += [checkpoint / "rest" / "manifest.ocdbt", checkpoint / "host"]
    return all(path.exists() for path in stores) and _step_name(meta.step) == checkpoint.name


def _differences(found: Architecture, expected: Architecture) -> str:
    names = [f.name for f in dataclasses.fields(Architecture)]
    changed = [name for name in names if getattr(found, name) != getattr(expected, name)]
    return ", ".join(f"{name}={getattr(found, name)!r} instead of {getattr(expected, name)!r}" for name in changed)
