"""Which mesh fits, and what bounds it: four mixtures at 131,072 tokens, and sweeps of shapes: python -m experiments 0006."""

from dataclasses import dataclass
from pathlib import Path

from experiments.harness import Report, conditions, is_quick, publish
from rl_jax.config import load
from rl_jax.models.schema import num_params
from rl_jax.plan import report
from rl_jax.plan.chips import chip_of
from rl_jax.plan.compare import chosen_shapes, outcomes_of
from rl_jax.plan.compiled import CACHE
from rl_jax.plan.config import PlanConfig
from rl_jax.plan.outcome import Outcome
from rl_jax.plan.topology import versions

HERE = Path(__file__).parent
GIB = 2**30


@dataclass(frozen=True)
class Case:
    """One plan."""

    name: str
    config: str
    overrides: tuple[str, ...] = ()
    is_sweep: bool = False


CASES = (
    Case("30B", "qwen3_30b_v5p"),
    Case("30B", "qwen3_30b_v6e"),
    Case("235B", "qwen3_235b_v5p"),
    Case("750B", "moe_750b_v5p"),
    Case("1T", "moe_1t_v5p"),
    Case("30B", "qwen3_30b_h200"),
    Case("30B, blockwise", "qwen3_30b_v5p", ("forward.attention=blockwise", "forward.attention_block_tokens=512")),
    Case("30B, ragged_dot", "qwen3_30b_v5p", ("forward.grouped_matmul=ragged",)),
    Case("30B, all_gather", "qwen3_30b_v5p", ("forward.dispatch=all_gather",)),
    Case("235B", "qwen3_235b_v5p", ('plan.topology="4x4x4"', "mesh.fsdp=8", "mesh.context=8")),
    Case("sweep 30B", "qwen3_30b_v5p", ("plan.max_shapes=6",), True),
    Case("sweep 30B", "qwen3_30b_v6e", ("plan.max_shapes=6",), True),
)


def planned(case: Case) -> tuple[PlanConfig, list[Outcome]]:
    """Compile one plan, or take it from the cache."""
    config = load(PlanConfig, [f"configs/plan/{case.config}.toml"], case.overrides)
    arch, chip = config.model.resolve(), chip_of(config.plan.chip)
    shapes, _ = chosen_shapes(config, arch, chip, case.is_sweep)
    return config, report.ranked(list(outcomes_of(shapes, arch, chip, CACHE)))


def row(case: Case, config: PlanConfig, one: Outcome) -> list[str]:
    """Return one line of the table."""
    memory, time = one.memory, one.time
    parts = (
        [getattr(memory, part) / GIB for part in ("params", "optimizer", "gradient", "temporaries")] if memory else []
    )
    return [
        case.name,
        f"{config.plan.chip} {config.plan.topology}",
        one.name,
        f"{one.num_micro_batches} x {one.rows}",
        one.verdict + (f" by {-one.headroom_bytes / GIB:.1f} GiB" if one.headroom_bytes < 0 else ""),
        " + ".join(f"{part:.1f}" for part in parts),
        f"{memory.peak / GIB:.1f} / {memory.bound / GIB:.1f}" if memory else "-",
        f"{time.compute_s:.1f} / {time.hbm_s:.1f} / {time.wire_s:.1f}" if time else "-",
        f"{time.limit}" if time else "-",
        f"{one.tokens_s / 1e3:,.0f}k" if time else "-",
        f"{one.mfu:.2f}" if time else "-",
        f"{one.matmul_ratio:.3f}" if time else "-",
        f"{one.compile_cpu_s:.0f} ({one.compile_s:.0f}), {one.compiler_bytes / GIB:.1f}",
    ]


COLUMNS = (
    "model",
    "machine",
    "mesh",
    "micro-batches x rows",
    "verdict",
    "parameters + optimizer + gradient + temporaries, GiB",
    "peak / bound, GiB",
    "compute / HBM / wire, s",
    "limit",
    "tokens/s",
    "MFU <",
    "counted / formula",
    "compile CPU-s (wall), GiB",
)


def main() -> None:
    """Run the experiment."""
    quick, where = is_quick(__doc__), conditions()
    where["compilers"] = ", ".join(f"{name} {version}" for name, version in versions().items() if version)
    rows, raw, drawn = [], [], []
    for case in CASES[:1] if quick else CASES:
        config, outcomes = planned(case)
        arch = config.model.resolve()
        for one in outcomes:
            rows.append(row(case, config, one))
            if one.time and (case.is_sweep or not case.overrides):
                drawn.append((f"{case.name.removeprefix('sweep ')} {config.plan.chip}: {one.name}", one))
        raw += [{"case": case.name, "parameters": num_params(arch)} | line for line in report.rows_of(outcomes, config)]
        if not case.is_sweep and not case.overrides and not quick:
            said = report.text(outcomes, config, arch, chip_of(config.plan.chip))
            (HERE / f"{case.config}.txt").write_text(said + "\n")
    figure = report.figure_of([one for _, one in drawn], [name for name, _ in drawn], "mesh shapes at 131,072 tokens")
    notes = ["rows of 131,072 tokens, 256 in a step; times are floors at 100 % of the peaks (docs/plan.md)"]
    publish(
        HERE,
        Report(title="0006", columns=COLUMNS, rows=rows, notes=notes, raw={"shapes": raw}, figure=figure),
        where,
        quick,
    )


if __name__ == "__main__":
    main()
