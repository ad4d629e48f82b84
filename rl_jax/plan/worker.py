"""One compile in a process of its own: python -m rl_jax.plan.worker FOLDER, which holds request.json.

Writes compiled.json and the text of each program beside it. Out of memory is a result. rl_jax/plan/compiled.py starts
it with the environment that the compilers need.
"""

import argparse
import gzip
import json
import re
import resource
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from rl_jax import cli
from rl_jax.config import ConfigError, load
from rl_jax.plan.chips import chip_of
from rl_jax.plan.compiled import REFUSED
from rl_jax.plan.program import held_bytes, lower
from rl_jax.plan.topology import describe, mesh_on, versions

MEMORY = ("argument", "output", "alias", "temp", "generated_code")
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def main(argv: Sequence[str] | None = None) -> int:
    """Compile what request.json asks for."""
    args = argparse.ArgumentParser(prog="python -m rl_jax.plan.worker")
    args.add_argument("folder", type=Path)
    folder = cli.arguments(args, argv).folder
    request = json.loads((folder / "request.json").read_text())
    config = load(cli.RunConfig, [folder / "run.toml"])
    try:
        result = _compile(config, request, folder)
    except ConfigError as error:
        print(json.dumps(error.faults))
        return REFUSED
    result["rss_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    (folder / "compiled.json").write_text(json.dumps(result, indent=1))
    return 0


def _compile(config: cli.RunConfig, request: dict[str, Any], folder: Path) -> dict[str, Any]:
    arch, slices = config.model.resolve(), request["num_slices"]
    devices = describe(chip_of(request["chip"]), request["topology"], slices)
    mesh = mesh_on(devices, config.mesh, slices)
    result: dict[str, Any] = {
        "versions": versions(),
        "device_kind": devices[0].device_kind,
        "places": _places(mesh),
        "held": held_bytes(config, arch, mesh),
        "programs": {},
    }
    started_s = time.perf_counter()
    lowered = lower(config, arch, mesh)
    result["lower_s"] = time.perf_counter() - started_s
    for name, program in lowered.items():
        result["programs"][name] = _program(program, request.get("compiler_options"), folder / f"{name}.hlo.gz")
    return result


def _program(lowered: Any, options: dict[str, Any] | None, text: Path) -> dict[str, Any]:
    started_s, started_cpu_s = time.perf_counter(), time.process_time()
    try:
        compiled = lowered.compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return {"out_of_memory": str(error)[:2000], "needed_bytes": needed_bytes(str(error))} | _spent(
            started_s, started_cpu_s
        )
    memory = compiled.memory_analysis()
    found = {f"{name}_bytes": getattr(memory, f"{name}_size_in_bytes") for name in MEMORY}
    found["peak_bytes"] = memory.peak_memory_in_bytes
    with gzip.open(text, "wt", compresslevel=3) as file:
        file.write(compiled.as_text())
    return found | _spent(started_s, started_cpu_s)


def _spent(started_s: float, started_cpu_s: float) -> dict[str, float]:
    return {"compile_s": time.perf_counter() - started_s, "compile_cpu_s": time.process_time() - started_cpu_s}


def needed_bytes(message: str) -> int:
    """Return the bytes that an out-of-memory message of the TPU compiler says are needed; 0 if it does not."""
    found = re.search(r"\(([\d.]+)([KMGT]?)\) exceeds available|Used ([\d.]+)([KMGT]?) of", message)
    if not found:
        return 0
    number, unit = (found[1], found[2]) if found[1] else (found[3], found[4])
    return int(float(number) * _UNITS[unit])


def _places(mesh: Mesh) -> list[list[Any]]:
    """Return coordinates and slice, or number and host, of each device in the order of the mesh."""
    if mesh.devices.flat[0].platform == "gpu":
        return [[[device.id], device.process_index] for device in mesh.devices.flat]
    return [[list(device.coords), getattr(device, "slice_index", 0)] for device in mesh.devices.flat]


if __name__ == "__main__":
    raise SystemExit(main())
