"""Plan a run before renting the machine: python -m rl_jax.plan --config configs/plan/qwen3_30b_v5p.toml.

Compiles the run's own training step for hardware that is not here, and says for each mesh shape whether it fits, what
it sends, and what bounds its speed. docs/plan.md explains the numbers.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from rl_jax import cli
from rl_jax.config import ConfigError, load, refuse, to_toml
from rl_jax.plan import report, sampler_report
from rl_jax.plan.chips import chip_of
from rl_jax.plan.compare import chosen_shapes, outcomes_of
from rl_jax.plan.compiled import CACHE
from rl_jax.plan.config import ACCELERATOR, PlanConfig
from rl_jax.plan.outcome import Outcome
from rl_jax.plan.sampler_plan import plan_sampler
from rl_jax.plan.topology import compiler_faults

SHORT = {
    "model": "model.path",
    "chip": "plan.chip",
    "topology": "plan.topology",
    "seq": "packing.seq_len",
    "batch": "plan.batch",
    "max_shapes": "plan.max_shapes",
}
"""Option -> the key that it sets."""


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and plan; returns the exit code."""
    args = cli.parser("plan", "Compile a run's training step for hardware that is not here, and compare mesh shapes.")
    args.add_argument("--model", metavar="DIR", help="Hugging Face directory; only its config.json is read")
    args.add_argument("--chip", help="v5e, v5p, v6e, tpu7x, h100, h200")
    args.add_argument("--topology", help="8x8x8; of GPUs HOSTSxGPUS, for example 8x8")
    args.add_argument("--seq", type=int, help="tokens of a row")
    args.add_argument("--batch", type=int, help="rows of an optimizer step")
    args.add_argument("--max-shapes", type=int, help="mesh shapes that a sweep compiles")
    args.add_argument("--sweep", action="store_true", help="try other mesh shapes than that of the config")
    args.add_argument("--out", type=Path, metavar="DIR", help="where results go; default runs/plan/<run.name>")
    return cli.run_entry(_run, cli.arguments(args, argv))


def _run(args: argparse.Namespace) -> int:
    config = _load(args)
    arch, chip = config.model.resolve(), chip_of(config.plan.chip)
    shapes, left_out = chosen_shapes(config, arch, chip, args.sweep)
    console = Console(stderr=True, soft_wrap=True)
    if left_out:
        console.print(left_out, highlight=False)
    if args.dry_run:
        print(to_toml(config))
        print("\n".join(f"# would compile {shape.mesh}" for shape in shapes))
        return 0
    refuse(compiler_faults(chip))
    outcomes: list[Outcome] = []
    for one in outcomes_of(shapes, arch, chip, CACHE):
        outcomes.append(one)
        console.print(f"{len(outcomes)}/{len(shapes)} {one.name}: {one.verdict} {one.reason}", highlight=False)
    outcomes = report.ranked(outcomes)
    said = report.text(outcomes, config, arch, chip)
    if config.sampler_plan and outcomes[0].time:
        sampler = plan_sampler(arch, outcomes[0].time.step_s, config.sampler_plan, config.model.path)
        said += "\n\n" + sampler_report.text(sampler)
    print(said)
    for path in report.write(args.out or Path("runs/plan") / config.run.name, outcomes, config, said):
        console.print(f"wrote {path}", highlight=False)
    return 0


def _load(args: argparse.Namespace) -> PlanConfig:
    short = [f"{key}={getattr(args, name)}" for name, key in SHORT.items() if getattr(args, name) is not None]
    if not args.config and not args.model:
        raise ConfigError(
            ["--config: give a TOML file, for example --config configs/plan/qwen3_30b_v5p.toml, or --model"]
        )
    base = () if args.config else ACCELERATOR
    return load(PlanConfig, args.config, [*base, *short, *args.set])


if __name__ == "__main__":
    raise SystemExit(main())
