"""Peak memory of converting a checkpoint that is larger than it may hold.

    PYTHONPATH=. python experiments/0005-bridge-speed/memory.py --gb 20 --dir /some/disk

Writes the checkpoint piece by piece, converts it in a process of its own, prints what the kernel says of that process's
resident memory and fails above --limit-gib. Removes what it wrote.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import synthetic

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


def watch(command: list[str]) -> dict[str, float]:
    """Run a command; return the peaks of its resident memory in GiB: VmHWM of the kernel, its parts every 50 ms.

    The parts: RssAnon is what the process allocated, RssFile what it mapped of files (programs and libraries too).
    """
    peaks = dict.fromkeys(("VmHWM", "RssAnon", "RssFile", "RssShmem"), 0)
    process = subprocess.Popen(command, cwd=ROOT)
    while process.poll() is None:
        with contextlib.suppress(OSError):  # it has just ended
            status = Path(f"/proc/{process.pid}/status").read_text()
            for name, kib in re.findall(r"(\w+):\s*(\d+) kB", status):
                if name in peaks:
                    peaks[name] = max(peaks[name], int(kib))
        time.sleep(0.05)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}: exit code {process.returncode}")
    return {name: kib / 2**20 for name, kib in peaks.items()}


def main() -> int:
    """Write, convert, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=20.0, help="size of the weights in bfloat16 (default: 20)")
    parser.add_argument("--dir", type=Path, default=None, help="where to write; needs 1.7 times the size")
    parser.add_argument("--format", default="fp8-block")
    parser.add_argument("--limit-gib", type=float, default=3.0)
    args = parser.parse_args()
    per_layer = synthetic.weight_bytes(synthetic.architecture(2)) - synthetic.weight_bytes(synthetic.architecture(1))
    arch = synthetic.architecture(max(1, round(args.gb * 1e9 / per_layer)), vocab_size=151_936)
    num_bytes = synthetic.weight_bytes(arch)
    with tempfile.TemporaryDirectory(dir=args.dir) as place:
        free = shutil.disk_usage(place).free
        if free < 1.7 * num_bytes:
            raise SystemExit(f"{place}: {1.7 * num_bytes / 1e9:.0f} GB are needed, {free / 1e9:.0f} GB are free; --dir")
        started = time.monotonic()
        synthetic.write(Path(place) / "run", arch)
        print(f"wrote {num_bytes / 1e9:.2f} GB of weights in {time.monotonic() - started:.0f} s", flush=True)
        command = ["-m", "bridge.convert", "--checkpoint", f"{place}/run", "--out", f"{place}/out"]
        started = time.monotonic()
        peaks_gib = watch([sys.executable, *command, "--format", args.format])
        seconds = time.monotonic() - started
    peak = peaks_gib["VmHWM"]
    found = {
        "weights_gb": num_bytes / 1e9,
        "layers": arch.num_layers,
        "format": args.format,
        "peak_gib": peaks_gib,
        "seconds": seconds,
        "gb_per_s": num_bytes / 1e9 / seconds,
        "cores": os.cpu_count(),
    }
    (HERE / "memory.json").write_text(json.dumps(found, indent=1) + "\n")
    parts = ", ".join(f"{name} {gib:.2f}" for name, gib in peaks_gib.items())
    print(f"GiB at their peaks: {parts}")
    print(f"peak {peak:.2f} GiB resident for {num_bytes / 1e9:.2f} GB in {seconds:.0f} s")
    return int(peak > args.limit_gib)


if __name__ == "__main__":
    sys.exit(main())
