"""Compares an exported directory with a fresh conversion of the checkpoint, tensor by tensor, in bounded memory."""

import hashlib
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import numpy as np

from bridge.export import ExportTensor, export_table
from bridge.host_tensors import host_tensor
from bridge.names import cut
from bridge.orbax_reader import Chain, WeightStore, refuse_damaged
from bridge.stream import UNIT_BYTES
from bridge.verify_files import EXPORT_AGAIN, Finding, Folder
from bridge.verify_manifest import diagnose, sha256
from rl_jax.models.architecture import Architecture
from rl_jax.models.fp8_rule import fp8_block

ANOTHER = "name the checkpoint that the directory was made from, or convert this one"


def check_against(folder: Folder, checkpoint: Path, arch: Architecture) -> Iterator[Finding]:
    """Find every tensor whose bytes are not what a checkpoint converts to.

    Args:
        checkpoint: folder of one checkpoint, and `arch` its architecture.
    Raises:
        ConfigError: the checkpoint cannot be read, or is damaged.
    """
    differ = [f.name for f in fields(Architecture) if getattr(arch, f.name) != getattr(folder.arch, f.name)]
    for name in differ:
        expected, got = getattr(arch, name), getattr(folder.arch, name)
        yield Finding("against", f"config.json: {name}", f"{expected!r} of {checkpoint.name}", f"{got!r}", ANOTHER)
    if differ and export_table(arch, folder.format) != export_table(folder.arch, folder.format):
        return  # the tensors are of another model
    refuse_damaged(checkpoint)
    expected = _converted(folder, WeightStore(checkpoint / "params", arch))
    table = folder.table
    for name, checksum in expected.items():
        stored = folder.tensors.get(name)
        if stored is None or (stored.dtype, stored.shape) != (table[name].dtype, table[name].shape):
            continue  # check_headers has it
        if sha256(folder, name) != checksum:
            got = diagnose(folder, name, expected)
            yield Finding("against", name, f"{checksum[:12]} of {checkpoint.name}", got, EXPORT_AGAIN)


def _converted(folder: Folder, store: WeightStore) -> dict[str, str]:
    """Return tensor name -> sha256 of what the checkpoint converts to; a few slices are in memory at a time."""
    rows = {(t.param, t.index, t.role): t for t in export_table(folder.arch, folder.format)}
    weights = [(t.param, t.index) for t in rows.values() if t.role == "weight"]
    sums = {tensor.name: hashlib.sha256() for tensor in rows.values()}

    def add(tensor: ExportTensor, array: np.ndarray) -> None:
        sums[tensor.name].update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)

    for chain in store.chains(weights, UNIT_BYTES):
        for index, weight, scale in _made(folder, store, chain):
            add(rows[chain[0].key, index, "weight"], weight)
            if scale is not None:
                add(rows[chain[0].key, index, "scale"], scale)
    return {name: checksum.hexdigest() for name, checksum in sums.items()}


def _made(
    folder: Folder, store: WeightStore, chain: Chain
) -> Iterator[tuple[tuple[int, ...], np.ndarray, np.ndarray | None]]:
    """Yield index, weight and scale of every slice of a chain; of a matrix in pieces, every piece."""
    key = chain[0].key
    block = fp8_block(folder.arch, folder.format, key)
    for unit, values in store.results(chain, store.read(chain[0])):
        param = store.table[key] if unit.rows is None else cut(store.table[key], len(values))
        origin = tuple(part.start for part in unit.box)
        for index in unit.indices:
            piece = values if unit.rows is not None else values[tuple(np.subtract(index, origin))]
            made = host_tensor(param, piece, block, folder.format)
            yield index, made.weight, made.scale
