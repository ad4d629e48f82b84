"""A plan's outcomes as text, CSV, a plot, and the winner's TOML."""

import csv
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from rl_jax.axes import MESH_AXES
from rl_jax.config import to_toml
from rl_jax.mesh import MeshConfig
from rl_jax.models.architecture import Architecture
from rl_jax.models.schema import num_active_params, num_params
from rl_jax.plan.chips import Chip
from rl_jax.plan.config import PlanConfig, run_of, with_mesh
from rl_jax.plan.outcome import Outcome

_GB, _GIB = 1e9, 2**30


def ranked(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Return the outcomes, those that fit first, the fastest first; the others by what is missing."""
    order = {"fits": 0, "tight": 1, "out of memory": 2, "failed": 3}

    def key(one: Outcome) -> tuple[int, float]:
        speed = one.time.step_s / one.rows / one.num_micro_batches if one.time else -one.headroom_bytes
        return order[one.verdict], speed

    return sorted(outcomes, key=key)


def rows_of(outcomes: Sequence[Outcome], config: PlanConfig) -> list[dict[str, object]]:
    """Return one flat row for each outcome, for the CSV."""
    keys = sorted({key for one in outcomes for key in one.wire_bytes})
    return [_row(one, config, keys) for one in outcomes]


def _row(one: Outcome, config: PlanConfig, keys: Sequence[tuple[str, str]]) -> dict[str, object]:
    plan, memory, time = config.plan, one.memory, one.time
    row: dict[str, object] = {"chip": plan.chip, "topology": plan.topology, "slices": plan.num_slices}
    row |= {axis: getattr(one.mesh, axis) for axis in MESH_AXES}
    row |= {"seq_len": config.packing.seq_len, "rows": one.rows, "micro_batches": one.num_micro_batches}
    row |= {"verdict": one.verdict, "headroom_gib": round(one.headroom_bytes / _GIB, 2)}
    for name in ("params", "optimizer", "gradient", "temporaries", "peak", "bound"):
        row[f"{name}_gb"] = round(getattr(memory, name) / _GB, 3) if memory else ""
    for name in ("compute_s", "hbm_s", "wire_s", "step_s", "serial_s", "limit"):
        value = getattr(time, name) if time else ""
        row[name] = round(value, 4) if isinstance(value, float) else value
    row |= {"tokens_s": round(one.tokens_s), "mfu_ceiling": round(one.mfu, 4)}
    row |= {"model_pflops": round(one.model_flops / 1e15, 3), "executed_pflops": round(one.executed_flops / 1e15, 3)}
    row |= {"counted_over_formula": round(one.matmul_ratio, 4)}
    row |= {f"{axes} {kind} gb": round(one.wire_bytes.get((axes, kind), 0.0) / _GB, 3) for axes, kind in keys}
    row |= {"compile_s": round(one.compile_s, 1), "compile_cpu_s": round(one.compile_cpu_s, 1)}
    row |= {"compiler_gib": round(one.compiler_bytes / _GIB, 2), "warnings": len(one.warnings), "reason": one.reason}
    return row


def text(outcomes: Sequence[Outcome], config: PlanConfig, arch: Architecture, chip: Chip) -> str:
    """Return the plan for a terminal: a table of all shapes, and what the first needs in detail."""
    lines = [
        f"{num_params(arch) / 1e9:,.1f}B parameters ({num_active_params(arch) / 1e9:,.1f}B active), rows of "
        f"{config.packing.seq_len:,} tokens, on {config.plan.num_devices:,} devices of {chip.name} "
        f"({config.plan.topology}{f' x {config.plan.num_slices} slices' if config.plan.num_slices > 1 else ''}; "
        f"{chip.memory_bytes / _GIB:.1f} GiB each)",
        "",
        f"{'mesh':38} {'rows':>11} {'verdict':>13} {'peak':>6} {'bound':>6} {'step s':>13} {'limit':>7} "
        f"{'tok/s':>9} {'MFU<':>5} {'compile':>7}",
    ]
    lines += [_line(one) for one in outcomes]
    best = next((one for one in outcomes if one.time), None)
    return "\n".join(lines + (_details(best, chip) if best else []))


def _line(one: Outcome) -> str:
    rows = f"{one.num_micro_batches}x{one.rows}"
    memory, time = one.memory, one.time
    peak, bound = (f"{memory.peak / _GIB:.1f}", f"{memory.bound / _GIB:.1f}") if memory else ("-", "-")
    step = f"{time.step_s:.2f}-{time.serial_s:.2f}" if time else one.reason[:13]
    limit = time.limit if time else "-"
    speed = f"{one.tokens_s:,.0f}" if time else "-"
    return (
        f"{one.name:38} {rows:>11} {one.verdict:>13} {peak:>6} {bound:>6} {step:>13} {limit:>7} {speed:>9} "
        f"{one.mfu:>5.2f} {one.compile_s:>6.0f}s"
    )


def _details(one: Outcome, chip: Chip) -> list[str]:
    memory, time = one.memory, one.time
    assert memory is not None and time is not None
    parts = ("params", "optimizer", "gradient", "temporaries")
    lines = [
        "",
        f"{one.name}:",
        "  memory of a device, GiB: "
        + ", ".join(f"{part} {getattr(memory, part) / _GIB:.2f}" for part in parts)
        + f"; peak {memory.peak / _GIB:.2f}, bound {memory.bound / _GIB:.2f} of {chip.memory_bytes / _GIB:.2f}",
        f"  step, s: compute {time.compute_s:.2f}, HBM {time.hbm_s:.2f}, wire {time.wire_s:.2f}: bound by {time.limit}",
        f"  FLOPs of a device and step: model {one.model_flops:.3e}, executed {one.executed_flops:.3e}; matmuls counted "
        f"in the compiled text / formula = {one.matmul_ratio:.4f}",
        "  sent by a device in a step, GB:",
    ]
    for (axes, kind), sent in sorted(one.wire_bytes.items(), key=lambda item: -item[1]):
        if sent >= 1e6:
            lines.append(f"    {axes:28} {kind:20} {sent / _GB:10.3f}")
    return lines + [f"  warning: {warning}" for warning in one.warnings]


def write(folder: Path, outcomes: Sequence[Outcome], config: PlanConfig, report: str) -> list[Path]:
    """Write plan.txt, shapes.csv, shapes.png, and winner.toml if a shape fits; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    written = [folder / "plan.txt", folder / "shapes.csv"]
    written[0].write_text(report + "\n")
    rows = rows_of(outcomes, config)
    with written[1].open("w", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]) if rows else [])
        table.writeheader()
        table.writerows(rows)
    timed = [one for one in outcomes if one.time]
    if timed:
        title = f"{config.run.name} on {config.plan.chip} {config.plan.topology}"
        figure_of(timed, [one.name for one in timed], title).savefig(folder / "shapes.png", dpi=130)
        (folder / "winner.toml").write_text(winner(config, timed[0]))
        written += [folder / "shapes.png", folder / "winner.toml"]
    return written


def winner(config: PlanConfig, best: Outcome) -> str:
    """Return the TOML of the run on the best mesh, for rl_jax.train."""
    run = run_of(with_mesh(config, best.mesh))
    head = f"# mesh chosen by rl_jax.plan for {config.plan.chip} {config.plan.topology}: {best.name}\n"
    return head + to_toml(run)


def figure_of(outcomes: Sequence[Outcome], names: Sequence[str], title: str) -> Figure:
    """Draw the three terms of the step time, and the memory, of each shape."""
    places = list(range(len(outcomes)))
    with matplotlib.rc_context({"font.size": 8, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(10, 1.4 + 0.34 * len(outcomes)), layout="constrained")
        left, right = figure.subplots(1, 2, sharey=True)
        for shift, (term, color) in enumerate((("compute_s", "C0"), ("hbm_s", "C1"), ("wire_s", "C2"))):
            values = [getattr(one.time, term) / one.rows / one.num_micro_batches for one in outcomes]
            left.barh([p + 0.27 * (shift - 1) for p in places], values, 0.25, color=color, label=term[:-2])
        left.set_yticks(places, names)
        left.invert_yaxis()
        left.set_xlabel("seconds a row, if it were the only limit")
        left.legend(frameon=False)
        offsets: dict[int, float] = defaultdict(float)
        for color, part in enumerate(("params", "optimizer", "gradient", "temporaries")):
            sizes = [getattr(one.memory, part) / _GIB for one in outcomes]
            right.barh(places, sizes, 0.6, left=[offsets[p] for p in places], color=f"C{color + 3}", label=part)
            for p, size in zip(places, sizes, strict=True):
                offsets[p] += size
        right.set_xlabel("GiB of a device (compiler's peak)")
        right.legend(frameon=False)
        figure.suptitle(title, fontweight="bold")
    return figure


def refused_text(refused: Sequence[tuple[MeshConfig, str]], left_out: int) -> str:
    """Return what a sweep did not compile, and why: each reason with an example."""
    examples: dict[str, list[MeshConfig]] = defaultdict(list)
    for mesh, reason in refused:
        examples[reason.split(":")[0] if "alone need" not in reason else "does not fit"].append(mesh)
    lines = [f"{len(refused)} shapes are not legal or cannot fit:"] if refused else []
    for reason, meshes in sorted(examples.items(), key=lambda item: -len(item[1]))[:12]:
        lines.append(f"  {len(meshes):4} x {reason}")
    if left_out:
        lines.append(f"{left_out} legal shapes were not compiled (plan.max_shapes); they promise more traffic")
    return "\n".join(lines)
