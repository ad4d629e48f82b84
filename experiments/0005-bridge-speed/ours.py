"""The bridge as a process that answers line by line, so that it and its rivals take turns."""

import os
import shutil
import time
from pathlib import Path

from bridge.allocator import keep_freed_memory
from bridge.sources import find_source
from bridge.to_hf import ToHf, ToHfConversion
from experiments.worker import serve
from rl_jax.checkpoint import find_checkpoint, read_meta


def convert(run: str, out: str, fmt: str, shard_bytes: int, is_trusted: bool = False) -> dict[str, object]:
    """Convert a whole checkpoint, compared before, read back and synced to the disk; return seconds and bytes read."""
    checkpoint = find_checkpoint(Path(run))
    meta = read_meta(checkpoint)
    started = time.monotonic()
    job = ToHf(
        checkpoint=checkpoint,
        arch=meta.architecture,
        step=meta.step,
        source=find_source(checkpoint, None, False),
        out=Path(out),
        fmt=fmt,  # type: ignore[arg-type]
        max_shard_bytes=shard_bytes,
        threads=os.cpu_count() or 1,
        is_trusted=is_trusted,
    )
    conversion = ToHfConversion(job)
    with conversion.held():
        num_bytes = conversion.prepare()
        conversion.run(lambda _: None)
    return {"seconds": time.monotonic() - started, "bytes": num_bytes}


def copy(source: str, out: str) -> dict[str, object]:
    """Copy the files of a directory and sync them to the disk."""
    started, num_bytes = time.monotonic(), 0
    Path(out).mkdir()
    for path in sorted(Path(source).glob("*.safetensors")):
        target = Path(out) / path.name
        shutil.copyfile(path, target)
        descriptor = os.open(target, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
        num_bytes += path.stat().st_size
    return {"seconds": time.monotonic() - started, "bytes": num_bytes}


if __name__ == "__main__":
    keep_freed_memory()  # as bridge.convert does
    serve({"convert": convert, "copy": copy})
