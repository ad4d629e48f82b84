"""Lays the trainer's weights down for a fleet: the folder that servers start from, and an update for each version.

Step 14 of docs/walk.md: sharded float32 parameters -> named tensors of an export, quantised on the device -> an update
folder of bridge/wire. Knows no server.
"""

import contextlib
import json
from pathlib import Path
from typing import cast

from bridge.export import export_arrays, export_config, export_table
from bridge.export_folder import ExportFolder
from bridge.out_folder import failed
from bridge.shard_writer import ShardFile, ShardPlan, plan_shards
from bridge.sources import carried_files
from bridge.wire import Sender, Update
from rl_jax.models.architecture import Architecture
from rl_jax.models.fp8_rule import Format
from rl_jax.models.schema import Params

MAX_SHARD_BYTES = 4 << 30


class Pusher:
    """Writes the updates of one run.

    Args:
        directory: made if it is not there; updates that an earlier run left in it are removed.
    """

    def __init__(self, arch: Architecture, fmt: Format, directory: Path):
        self._arch = arch
        self._format: Format = fmt
        self._sender = Sender(directory)

    def write(self, weights: object, version: int) -> Update:
        """Lay down policy `version`: what changed since the version before, or everything.

        Args:
            weights: float32 parameters, sharded as they are; they must not be donated meanwhile.
        Raises:
            NonFiniteWeight: naming the tensor. OSError: the disk. Nothing half-written stays.
        """
        tensors = export_arrays(self._arch, cast(Params, weights), self._format)
        return self._sender.write(version, ((t.name, t.dtype, t.shape, array) for t, array in tensors))

    def update_for(self, held_version: int | None) -> Update:
        """Return what brings a replica from `held_version` (None: unknown) to the version written last."""
        return self._sender.update_for(held_version)


def write_model(
    out: Path,
    arch: Architecture,
    params: Params,
    fmt: Format,
    *,
    tokenizer_dir: Path,
    source_config: Path | None = None,
    step: int = 0,
) -> None:
    """Write live weights as the Hugging Face directory that servers start from; whole, or not there.

    Args:
        tokenizer_dir: folder of tokenizer.json and what goes with it.
        source_config: config.json of the model that the run began with, whose other fields are kept.
    Raises:
        NonFiniteWeight: naming the tensor. OSError: naming `out`, the disk is full.
    """
    source = json.loads(source_config.read_text(encoding="utf-8")) if source_config else None
    plans = plan_shards(export_table(arch, fmt), MAX_SHARD_BYTES)
    folder = ExportFolder(out, plans, {"format": fmt, "step": step})
    arrays = ((tensor.name, array) for tensor, array in export_arrays(arch, params, fmt))
    with folder.held(0), contextlib.ExitStack() as stack:
        try:
            files = _files_by_tensor(folder, plans, stack)
            for name, array in arrays:
                if files[name].write(name, (array,)):
                    files[name].finish()
            folder.commit(fmt, step, export_config(arch, fmt, source), carried_files(tokenizer_dir))
        except BaseException as error:
            folder.discard(plans)
            if isinstance(error, OSError):
                raise failed(folder.out, error) from error
            raise


def _files_by_tensor(
    folder: ExportFolder, plans: tuple[ShardPlan, ...], stack: contextlib.ExitStack
) -> dict[str, ShardFile]:
    files = {}
    for plan in plans:
        file = ShardFile(folder.model, folder.marks, plan)
        stack.callback(file.close)
        files.update(dict.fromkeys((tensor.name for tensor in plan.tensors), file))
    return files
