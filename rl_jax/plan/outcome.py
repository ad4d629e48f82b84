"""What a plan says of one mesh shape: memory, traffic, time, each from the compiled program or by formula."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rl_jax.axes import MESH_AXES
from rl_jax.mesh import MeshConfig
from rl_jax.models.architecture import Architecture
from rl_jax.plan.chips import Chip
from rl_jax.plan.config import PlanConfig, num_micro_batches
from rl_jax.plan.hlo import parse
from rl_jax.plan.hlo_cost import Cost, cost_of
from rl_jax.plan.links import Place
from rl_jax.plan.roofline import Roofline, bytes_by_axis, roofline
from rl_jax.plan.step_flops import expected_scopes, kernel_bytes, micro_batch_flops

Verdict = Literal["fits", "tight", "out of memory", "failed"]
"""fits: by the safe bound, all arguments and temporaries; tight: by the compiler's peak only."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of one device in a step, at its fullest."""

    params: int
    """float32 masters."""
    optimizer: int
    gradient: int
    temporaries: int
    """Activations, gathered weights and everything else beyond the three above: peak - them."""
    peak: int
    """By the compiler's own peak."""
    bound: int
    """All arguments, outputs and temporaries at once; never less than the peak."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One mesh shape. Without a verdict of "fits" or "tight" there is no time."""

    mesh: MeshConfig
    rows: int
    """Of a micro-batch."""
    num_micro_batches: int
    verdict: Verdict
    reason: str = ""
    headroom_bytes: int = 0
    """What is left under the limit by the bound; negative: what is missing."""
    memory: Memory | None = None
    time: Roofline | None = None
    tokens_s: float = 0.0
    """If everything overlaps."""
    mfu: float = 0.0
    """Model FLOPs over peak, if everything overlaps: a ceiling."""
    wire_bytes: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """(mesh axes, kind) -> bytes that a device sends in a step."""
    model_flops: float = 0.0
    """Of a device and step, by formula."""
    executed_flops: float = 0.0
    """With recomputation, by formula."""
    matmul_ratio: float = 0.0
    """Matmul FLOPs counted in the compiled text over those of the formula, routed experts and attention kernels apart
    where they are kernels; 1 if both are right."""
    compile_s: float = 0.0
    compile_cpu_s: float = 0.0
    compiler_bytes: int = 0
    warnings: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Axes above 1, for example "fsdp 8, context 8"."""
        sizes = {axis: getattr(self.mesh, axis) for axis in MESH_AXES}
        return ", ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "one device"


def outcome_of(
    config: PlanConfig, arch: Architecture, chip: Chip, result: Mapping[str, Any], texts: Mapping[str, str]
) -> Outcome:
    """Judge a compiled step: `result` and `texts` are what compiled.read returns."""
    common: dict[str, Any] = {
        "mesh": config.mesh,
        "rows": config.packing.rows,
        "num_micro_batches": num_micro_batches(config),
        "compile_s": sum(program["compile_s"] for program in result["programs"].values()),
        "compile_cpu_s": sum(program["compile_cpu_s"] for program in result["programs"].values()),
        "compiler_bytes": result["rss_bytes"],
    }
    refused = [program for program in result["programs"].values() if "out_of_memory" in program]
    if refused:
        needed = max(program["needed_bytes"] for program in refused)
        reason = refused[0]["out_of_memory"].splitlines()[0][:200]
        missing = chip.memory_bytes - needed - result["held"]["optimizer_bytes"] if needed else 0
        return Outcome(**common, verdict="out of memory", reason=reason, headroom_bytes=missing)
    memory = memory_of(result)
    headroom = chip.memory_bytes - memory.bound
    verdict: Verdict = "fits" if headroom >= 0 else "tight" if memory.peak <= chip.memory_bytes else "out of memory"
    return (
        Outcome(**common, verdict=verdict, headroom_bytes=headroom, memory=memory)
        if verdict == "out of memory"
        else (
            Outcome(
                **common,
                verdict=verdict,
                headroom_bytes=headroom,
                memory=memory,
                **_speed(config, arch, chip, result, texts),
            )
        )
    )


def memory_of(result: Mapping[str, Any]) -> Memory:
    """Return the memory of a step: its programs, and what is held beside them.

    While micro-batches are accumulated the optimizer's state is no argument, but there.
    """
    held, programs = result["held"], result["programs"]
    beside = {"accumulate": held["optimizer_bytes"], "apply": 0}
    peak = max(program["peak_bytes"] + beside[name] for name, program in programs.items())
    bound = max(_bound(program) + beside[name] for name, program in programs.items())
    params, optimizer, gradient = held["params_bytes"], held["optimizer_bytes"], held["gradient_bytes"]
    return Memory(
        params=params,
        optimizer=optimizer,
        gradient=gradient,
        temporaries=max(0, peak - params - optimizer - gradient),
        peak=peak,
        bound=max(bound, peak),
    )


def _bound(program: Mapping[str, Any]) -> int:
    new = program["output_bytes"] - program["alias_bytes"]
    return program["argument_bytes"] + program["temp_bytes"] + max(0, new)


def costs_of(config: PlanConfig, arch: Architecture, texts: Mapping[str, str]) -> dict[str, Cost]:
    """Count each program of a step from its text."""
    sizes = {axis: getattr(config.mesh, axis) for axis in MESH_AXES}
    expected = expected_scopes(arch, config.forward, config.packing, config.mesh)
    return {name: cost_of(parse(text), sizes, expected) for name, text in texts.items()}


def _speed(
    config: PlanConfig, arch: Architecture, chip: Chip, result: Mapping[str, Any], texts: Mapping[str, str]
) -> dict[str, Any]:
    costs, repeats = costs_of(config, arch, texts), num_micro_batches(config)
    flops = micro_batch_flops(arch, config.forward, config.packing, config.mesh)
    programs = [(costs["accumulate"], float(repeats)), (costs["apply"], 1.0)]
    places = [Place(tuple(coords), domain) for coords, domain in result["places"]]
    read = kernel_bytes(config.forward, flops.attention) * repeats
    time = roofline(chip, config.plan.topology, places, programs, flops.executed * repeats, read)
    tokens = config.packing.rows * config.packing.seq_len * repeats
    in_kernels = (flops.experts if config.forward.grouped_matmul == "ragged" else 0.0) + (
        flops.attention if config.forward.attention == "splash" else 0.0
    )
    return {
        "time": time,
        "tokens_s": tokens / time.step_s,
        "mfu": flops.model * repeats / time.step_s / chip.flops_s,
        "wire_bytes": bytes_by_axis(programs),
        "model_flops": flops.model * repeats,
        "executed_flops": flops.executed * repeats,
        "matmul_ratio": costs["accumulate"].matmul_flops / (flops.executed - in_kernels),
        "warnings": tuple(sorted(costs["accumulate"].warnings | costs["apply"].warnings)),
    }
