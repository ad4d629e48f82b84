"""Asks a real vLLM, in the fleet environment, about an exported directory: does every element load, is it the same model?

The second question compares prompt log-probabilities, in float32 and without quantised activations, with those of the
exactly dequantised twin: the same values as plain float32 tensors. What FP8 costs in precision is in both.
"""

import contextlib
import fcntl
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bridge.out_folder import shown_bytes
from bridge.safetensors_reader import QUANTISED, TensorFiles
from bridge.shard_writer import layout
from bridge.verify_files import EXPORT_AGAIN, Finding, Folder
from rl_jax.config import ConfigError

ROOT = Path(__file__).resolve().parent.parent
TOLERANCE = 2e-5
"""Largest difference of log-probabilities; measured: 3e-6 to 6e-6 on five families, a wrong scale gives 0.1 to 1."""
TIMEOUT_S = 3600.0
GRACE_S = 5.0
"""Time that vLLM gets to end before it is killed."""
ENVIRONMENT = {
    **{"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_LOGGING_LEVEL": "WARNING"},
    **{"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1"},
    **{"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "PYTHONPATH": str(ROOT)},
}
"""What an engine inside one process of the fleet's Python needs, beside the variables of this process."""
_NOT_FOR_VLLM = ("JAX_PLATFORMS", "XLA_FLAGS")
_LAST_CHARS = 3000
_PIECE_BYTES = 16 << 20  # of a tensor that is copied
_PREFIX = ".verify-"
_ELSEWHERE = "name a directory with room by --scratch, or leave these steps out by --no-vllm"
_INSTEAD = "`make fleet` builds .venv-fleet/bin/python, --no-vllm leaves these steps out"


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """How a process of the fleet environment is started."""

    python: Path
    """Its interpreter; --fleet-python."""
    leash: Path
    """The script rl_jax/rollout/leash.py, which ends what it runs when this process is gone, however it went."""


def fleet_fault(python: Path) -> str | None:
    """Return why a program cannot be the fleet's Python; whether vLLM is in there only a run of it can tell."""
    option = f"--fleet-python {python}"
    if python.is_symlink() and not python.exists():
        return f"{option}: a link to {python.readlink()}, which is not there; {_INSTEAD}"
    if not python.exists():
        return f"{option}: no such file; {_INSTEAD}"
    if python.is_dir():
        return f"{option}: is a directory; name the program, for example {python}/bin/python. {_INSTEAD}"
    if not os.access(python, os.X_OK):
        return f"{option}: is no program that you may execute; name the Python of the fleet environment. {_INSTEAD}"
    return None


def check_in_vllm(folder: Folder, fleet: Fleet, place: Path) -> Iterator[Finding]:
    """Load the directory strictly and, if it is quantised, compare it with its twin.

    Args:
        place: directory for the twin.
    Raises:
        ConfigError: `place` cannot hold the twin, or vLLM does not run in the fleet environment.
    """
    is_quantised = folder.format in ("fp8-block", "fp8-channel")
    unreadable = _unreadable(folder) if is_quantised else None
    with scratch_folder(place, _twin_bytes(folder) if is_quantised else 0) as scratch:
        twin = scratch / "twin" if is_quantised and unreadable is None else None
        if twin is not None:
            try:
                write_twin(folder, twin)
            except OSError as error:
                why = f"the twin cannot be written ({error.strerror or error})"
                raise ConfigError([f"--scratch {place}: {why}; {_ELSEWHERE}"]) from error
        answer = ask_fleet(fleet, folder.path, twin, scratch)
    if answer["load_fault"]:
        yield Finding("strict load", str(folder.path), "vLLM writes every element", answer["load_fault"], EXPORT_AGAIN)
    if unreadable is not None:
        yield Finding("parity", "prompt log-probabilities", "those of the twin", f"no twin: {unreadable}", EXPORT_AGAIN)
    elif twin is not None and not answer["load_fault"] and not answer["max_difference"] <= TOLERANCE:
        got = f"{answer['max_difference']:.2e} at token {answer['worst_token']} of prompt {answer['worst_prompt']}"
        remedy = f"{EXPORT_AGAIN}; a scale or a matrix is not where vLLM looks for it"
        yield Finding("parity", "prompt log-probabilities", f"at most {TOLERANCE} from the twin", got, remedy)


@contextlib.contextmanager
def scratch_folder(place: Path, needed_bytes: int) -> Iterator[Path]:
    """Make a folder in `place` that is gone afterwards; those of checks that were killed go too.

    Raises:
        ConfigError: `place` cannot be written, or has too little room.
    """
    try:
        _remove_abandoned(place)
        holder = tempfile.TemporaryDirectory(prefix=_PREFIX, dir=place)
        free_bytes = shutil.disk_usage(place).free
    except OSError as error:
        raise ConfigError([f"--scratch {place}: cannot be written ({error.strerror}); {_ELSEWHERE}"]) from error
    with holder as name, (Path(name) / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if needed_bytes > free_bytes:
            amounts = f"{shown_bytes(needed_bytes)} are needed for the twin and {shown_bytes(free_bytes)} are free"
            raise ConfigError([f"--scratch {place}: {amounts}; {_ELSEWHERE}"])
        yield Path(name)


def _remove_abandoned(place: Path) -> None:
    """Remove scratch folders whose lock nobody holds: the process that made them was killed."""
    for lock_file in place.glob(f"{_PREFIX}*/lock"):
        with contextlib.suppress(OSError), lock_file.open("w") as lock:  # held, or gone meanwhile
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock_file.parent)


def _unreadable(folder: Folder) -> str | None:
    """Return why a tensor cannot be dequantised; other checks have found it."""
    files = TensorFiles(folder.path)
    return next((fault for name in files.weights() if (fault := files.fault(name))), None)


def _twin_bytes(folder: Folder) -> int:
    return sum(t.nbytes * (4 if t.dtype == "F8_E4M3" else 1) for t in folder.tensors.values())


def ask_fleet(fleet: Fleet, model: Path, twin: Path | None, scratch: Path) -> dict:
    """Run bridge.vllm_plugin.check under the fleet's Python and return its answer.

    Raises:
        ConfigError: with the end of its output.
    """
    answer, log = scratch / "answer.json", scratch / "log"
    command = [str(fleet.python), "-m", "bridge.vllm_plugin.check", "--model", str(model), "--answer", str(answer)]
    if twin is not None:
        command += ["--twin", str(twin)]
    ended = _run_leashed(fleet.leash, command, log)
    if answer.is_file():
        return json.loads(answer.read_text())
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _LAST_CHARS))
        words = file.read().decode(errors="replace").strip()
    said = f"its last lines:\n{words}" if words else "it printed nothing"
    fault = f"--fleet-python {fleet.python}: vLLM did not run ({ended}); is it the Python of the fleet environment?"
    raise ConfigError([f"{fault} {_INSTEAD}; {said}"])


def _run_leashed(leash: Path, command: list[str], log: Path) -> str:
    """Run a command whose output goes to `log`, and say how it ended; it ends with this process, or by an exception."""
    environment = {k: v for k, v in {**os.environ, **ENVIRONMENT}.items() if k not in _NOT_FOR_VLLM}
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-I", str(leash)],
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # out of reach of the terminal's Ctrl-C, which comes here
            env=environment,
            cwd=log.parent,
        )
    assert process.stdin is not None, "asked for as a pipe"
    try:
        process.stdin.write(json.dumps({"command": command, "grace_s": GRACE_S}).encode() + b"\n")
        process.stdin.flush()
        code = process.wait(TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return f"no answer within {TIMEOUT_S:.0f} s"
    finally:
        with contextlib.suppress(OSError):  # it is gone
            process.stdin.close()
        process.wait()
    return f"exit code {code}" if code <= 128 else f"ended by {signal.Signals(code - 128).name}"


def write_twin(folder: Folder, twin: Path) -> None:
    """Write the directory's values as plain tensors, one at a time: what is quantised becomes float32 code * scale."""
    twin.mkdir(parents=True)
    files = TensorFiles(folder.path)
    by_file: dict[str, list[str]] = {}
    for name in files.weights():
        by_file.setdefault(files.tensors[name].file.name, []).append(name)
    for file, names in by_file.items():
        _write_plain(files, sorted(names, key=lambda name: -files.plain_itemsize(name)), twin / file)
    config = {k: v for k, v in folder.config.items() if k != "quantization_config"}
    (twin / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    for path in folder.path.iterdir():
        if path.is_file() and path.suffix not in (".safetensors", ".json"):
            shutil.copy(path, twin / path.name)


def _write_plain(files: TensorFiles, names: Sequence[str], path: Path) -> None:
    """Write tensors into one file, as they are or dequantised; wide elements first."""
    rows = []
    for name in names:
        stored = files.tensors[name]
        dtype = "F32" if stored.dtype == QUANTISED else stored.dtype
        rows.append((name, dtype, stored.shape, math.prod(stored.shape) * files.plain_itemsize(name)))
    with path.open("wb") as out:
        out.write(layout(rows)[0])
        for name in names:
            for piece in files.pieces(name, _PIECE_BYTES):
                out.write(np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data)
