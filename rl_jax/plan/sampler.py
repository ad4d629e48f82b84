"""Plan the sampler side of a run: python -m rl_jax.plan.sampler --config configs/plan/NAME.toml.

Reads [sampler_plan] of the file, and [model] unless the table has a model of its own: vLLM's KV budget, what layouts it
takes, a simulation of the loop, and the nodes that balance training and sampling.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass

from rl_jax import cli
from rl_jax.config import ConfigError, load, to_toml
from rl_jax.plan.sampler_config import SamplerPlanConfig
from rl_jax.plan.sampler_plan import plan_sampler
from rl_jax.plan.sampler_report import numbers, text

TABLES = ("model", "sampler_plan")
"""What is read of a file; other tables are for other commands."""


@dataclass(frozen=True, kw_only=True)
class SamplerPlanFile:
    """The tables of a plan's file that concern the sampler side."""

    model: cli.ModelConfig | None = None
    """The policy."""
    sampler_plan: SamplerPlanConfig
    """The sampler side."""


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and plan; returns the exit code."""
    args = cli.parser("plan.sampler", "Plan the sampler side: KV budget, asynchronous loop, balance of nodes.")
    args.add_argument("--trainer-step-s", type=float, metavar="S", help="seconds of a training step, as compiled")
    args.add_argument("--json", action="store_true", help="print one JSON object")
    return cli.run_entry(_run, cli.arguments(args, argv))


def _run(args: argparse.Namespace) -> int:
    if not args.config:
        raise ConfigError(["--config: give a TOML file with a table [sampler_plan]"])
    config = load(SamplerPlanFile, args.config, args.set, only=TABLES)
    if args.dry_run:
        print(to_toml(config))
        return 0
    arch = config.model.resolve() if config.model and not config.sampler_plan.model else None
    name = config.model.path if config.model else ""
    plan = plan_sampler(arch, args.trainer_step_s, config.sampler_plan, name)
    print(json.dumps(numbers(plan), indent=1) if args.json else text(plan), end="\n" if args.json else "")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
