"""The place that a conversion writes to: messages name --out, though the bytes go to a folder beside it until the end.

Knows not what is written. The folder aside is .NAME.converting; a part of it becomes NAME by one rename. One process a
host writes into it, whatever it makes.
"""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from rl_jax.config import ConfigError

_UNITS = ("B", "kB", "MB", "GB", "TB")
PLAN = "plan.json"
"""File of the folder aside that says what is being made."""


def aside_of(out: Path) -> Path:
    """Return the folder that is written until all is there."""
    return out.with_name(f".{out.name}.converting")


def refuse_taken(out: Path) -> None:
    """Refuse an output that exists, unless it is an empty directory, or that no rename can make.

    Raises:
        ConfigError: it does, or it cannot be looked at.
    """
    try:
        is_taken = out.exists() and not (out.is_dir() and not any(out.iterdir()))
    except OSError as error:
        raise ConfigError([f"--out {out}: cannot be looked at ({error.strerror}); name another directory"]) from error
    if is_taken:
        raise ConfigError([f"--out {out}: exists already; remove it, or name another directory"])
    if out.is_mount():
        raise ConfigError([f"--out {out}: is where a disk is mounted; name a directory on it, for example {out}/model"])


@contextlib.contextmanager
def held(out: Path, host: int = 0) -> Iterator[None]:
    """Make the folder aside and hold it for this process, for one host; the lock falls with the process.

    Raises:
        ConfigError: the output exists or cannot be made, or another process makes it.
        OSError: the disk is full.
    """
    refuse_taken(out)
    with _locked(out, host):
        try:
            refuse_taken(out)  # who held the lock before may have made it meanwhile
        except ConfigError:
            shutil.rmtree(aside_of(out), ignore_errors=True)
            raise
        yield


def _locked(out: Path, host: int) -> TextIO:
    path = aside_of(out) / f"host-{host}.lock"
    while True:
        make_folder(out, path.parent)
        try:
            lock = path.open("w")
        except FileNotFoundError:
            continue  # who held it has removed the folder just now
        except OSError as error:
            with contextlib.suppress(OSError):  # something is in it
                path.parent.rmdir()
            raise failed(out, error) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and os.path.samestat(path.stat(), os.fstat(lock.fileno())):
                return lock
        except BlockingIOError as error:
            lock.close()
            fault = f"{path.parent}: another process converts as host {host}; wait for it, or end it"
            raise ConfigError([fault]) from error
        except FileNotFoundError:
            pass  # as above
        except OSError as error:
            lock.close()
            fault = f"--out {out}: its file system locks no files ({error.strerror}); name a directory on another disk"
            raise ConfigError([fault]) from error
        lock.close()


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


def appear(made: Path, out: Path) -> None:
    """Bring everything in `made`, a part of the folder aside, to the disk; make it appear as `out`; remove the rest."""
    for path in (*made.rglob("*"), made):
        sync(path)
    made.rename(out)
    sync(out.parent)
    shutil.rmtree(aside_of(out), ignore_errors=True)


def sync(path: Path) -> None:
    """Wait until a file or directory is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def failed(out: Path, error: OSError) -> OSError:
    """Return what to raise when a conversion to `out` failed and what it wrote is removed.

    A file that is read keeps its own name; one of the folder aside becomes `out`, or loses the part that is hidden.
    """
    aside = aside_of(out)
    if error.filename is not None and not Path(str(error.filename)).is_relative_to(aside):
        return error
    reason = error.strerror if error.errno else str(error).replace(f"{aside}/", "")
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
