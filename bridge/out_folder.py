"""The place that a conversion writes to: messages name --out, though the bytes go to a folder beside it until the end.

Knows not what is written. The folder aside is .NAME.converting and becomes NAME, or part of it does, by one rename.
"""

import shutil
from pathlib import Path

from rl_jax.config import ConfigError

_UNITS = ("B", "kB", "MB", "GB", "TB")


def aside_of(out: Path) -> Path:
    """Return the folder that is written until all is there."""
    return out.with_name(f".{out.name}.converting")


def refuse_taken(out: Path) -> None:
    """Refuse an output that exists, unless it is an empty directory.

    Raises:
        ConfigError: it does, or it cannot be looked at.
    """
    try:
        is_taken = out.exists() and not (out.is_dir() and not any(out.iterdir()))
    except OSError as error:
        raise ConfigError([f"--out {out}: cannot be looked at ({error.strerror}); name another directory"]) from error
    if is_taken:
        raise ConfigError([f"--out {out}: exists already; remove it, or name another directory"])


def make_folder(out: Path, folder: Path) -> None:
    """Make a folder, and those above it, that a conversion to `out` writes to.

    Raises:
        ConfigError: naming `out` and what is in the way.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        there = next(above for above in out.parents if above.exists())
        if not there.is_dir():
            fault = f"cannot be made, {there} is a file; name a directory that is not below it"
        else:
            fault = f"cannot be made in {there} ({error.strerror}); name a directory that you may write to"
        raise ConfigError([f"--out {out}: {fault}"]) from error


def refuse_full(out: Path, folder: Path, needed_bytes: int) -> None:
    """Refuse an output that the disk of `folder` has no room for.

    Raises:
        ConfigError: naming both amounts.
    """
    free_bytes = shutil.disk_usage(folder).free
    if needed_bytes > free_bytes:
        amounts = f"{shown_bytes(needed_bytes)} are needed and {shown_bytes(free_bytes)} are free"
        raise ConfigError([f"--out {out}: {amounts}; free disk space, or name a directory on another disk"])


def failed(out: Path, error: OSError) -> OSError:
    """Return what to raise when a conversion to `out` failed and what it wrote is removed.

    A file that is read keeps its own name; one of the folder aside becomes `out`.
    """
    if error.filename is not None and not Path(str(error.filename)).is_relative_to(aside_of(out)):
        return error
    reason = error.strerror if error.errno else str(error)
    return OSError(
        f"--out {out}: cannot be written ({reason}); what was written is removed. Free disk space, or name a "
        "directory on another disk"
    )


def shown_bytes(num_bytes: float) -> str:
    """Return an amount with a unit that fits: 999 B, 1.50 kB, 12.3 MB, 456 GB."""
    power = 0
    while num_bytes >= 999.5 and power < len(_UNITS) - 1:
        num_bytes, power = num_bytes / 1000, power + 1
    unit = _UNITS[power]
    return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:#.3g} {unit}".replace(". ", " ")  # 456. GB
