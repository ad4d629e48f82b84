"""What a conversion did, for people: a table for each kind of layer, and the lines below it."""

import re
import resource
from collections.abc import Mapping
from pathlib import Path

from rich.table import Table

from bridge.from_hf import Stored
from bridge.stream import Kind
from bridge.to_hf import Exported, ToHf
from rl_jax.models.architecture import Architecture
from rl_jax.models.fp8_rule import Format, fp8_block, why_plain
from rl_jax.models.schema import Param, flat_table


def kinds_table(arch: Architecture, fmt: Format, kinds: Mapping[str, Kind]) -> Table:
    """Return a row for each kind of layer: how many tensors, how large, how exact."""
    table = Table(title=f"written as {fmt}", title_justify="left")
    for column in ("layer", "tensors", "MB", "dtype", "error"):
        table.add_column(column, justify="right" if column in ("tensors", "MB", "error") else "left", no_wrap=True)
    for key, param in flat_table(arch).items():
        if key not in kinds:
            continue
        kind = kinds[key]
        plain = "F32" if fmt == "float32" else "BF16"
        dtype = plain if fp8_block(arch, fmt, key) is None else "F8_E4M3"
        error = f"{kind.relative_error:.2e}" if kind.relative_error else "exact"
        table.add_row(_layer(param), f"{kind.tensors:,}", f"{kind.nbytes / 1e6:,.1f}", dtype, error)
    return table


def plain_lines(arch: Architecture, fmt: Format) -> list[str]:
    """Return what stays bfloat16 in an FP8 export, and why."""
    if not fmt.startswith("fp8"):
        return []
    reasons: dict[str, list[str]] = {}
    for key, param in flat_table(arch).items():
        if reason := why_plain(arch, fmt, key):
            reasons.setdefault(reason, []).append(_layer(param).removeprefix("layers.*."))
    return [f"bf16      {', '.join(layers)}: {reason}" for reason, layers in reasons.items()]


def _layer(param: Param) -> str:
    return param.hf.removeprefix("model.").replace("{L}", "*").replace("{E}", "*").removesuffix(".weight")


def export_lines(exported: Exported, job: ToHf, seconds: float) -> list[str]:
    """Return what stands below the table."""
    tally = exported.tally
    written = sum(kind.nbytes for kind in tally.kinds.values())
    tensors = sum(kind.tensors for kind in tally.kinds.values())
    speed = tally.read_bytes / 1e9 / max(seconds, 1e-9)
    lines = [
        f"tensors   {tensors:,} weights, {written / 1e9:.3f} GB from {tally.read_bytes / 1e9:.3f} GB",
        f"speed     {seconds:.1f} s, {speed:.2f} GB/s read; peak memory {_peak_gib():.2f} GiB resident",
        f"config    from {job.source.config_from}",
        f"checked   {_checked(exported, job)}",
    ]
    if exported.resumed:
        lines.append(f"resumed   {exported.resumed} files of an earlier attempt were whole and kept")
    if dead := sum(kind.dead for kind in tally.kinds.values()):
        lines.append(f"dead      {dead} quantised matrices hold no weight of at least 1e-12")
    if tally.decoded_bytes > 1.5 * tally.read_bytes:
        times = tally.decoded_bytes / tally.read_bytes
        lines.append(f"slow      chunks of the checkpoint span many layers: each was decoded {times:.1f} times")
    return lines


def _checked(exported: Exported, job: ToHf) -> str:
    """Return what is known of the integrity of the checkpoint."""
    if exported.checked:
        return f"{exported.checked} files of the checkpoint have the checksums that the run wrote"
    why = "--trust-checkpoint" if job.is_trusted else f"{job.checkpoint.name} has no checksums.json"
    return (
        f"no file of the checkpoint: {'every file was done' if exported.resumed and not exported.tally.kinds else why}"
    )


def stored_lines(stored: Stored, seconds: float) -> list[str]:
    """Return the report of the way back."""
    speed = stored.read_bytes / 1e9 / max(seconds, 1e-9)
    exact = "all exact" if not stored.rounded else f"{stored.rounded} tensors were rounded to bfloat16"
    return [
        f"tensors   {stored.tensors:,} weights, {stored.written_bytes / 1e9:.3f} GB; {exact}",
        f"speed     {seconds:.1f} s, {speed:.2f} GB/s read; peak memory {_peak_gib():.2f} GiB resident",
    ]


def _peak_gib() -> float:
    """Return the peak resident memory of this process; getrusage would count what its parent held when it forked."""
    status = Path("/proc/self/status")
    found = re.search(r"VmHWM:\s*(\d+) kB", status.read_text()) if status.is_file() else None
    kib = int(found[1]) if found else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kib / 2**20
