"""Evaluate a policy: python -m rl_jax.evaluate --policy RUN_OR_CHECKPOINT_OR_HF_DIR [--config FILE] [--env NAME].

Prints avg@k, pass@k, pass^k and the parts of the reward for every environment under [evaluate].
"""

import argparse
import asyncio
import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.table import Table

from rl_jax import cli, rooms
from rl_jax.config import ConfigError
from rl_jax.envs.registry import EnvConfig
from rl_jax.mesh import MeshConfig, make_mesh
from rl_jax.rollout.evaluation import EvaluateConfig, evaluate
from rl_jax.session import console


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and evaluate; returns the exit code."""
    args = cli.parser("evaluate", "Evaluate a policy on named environments.")
    args.add_argument("--policy", metavar="DIR", help="run folder, checkpoint, or Hugging Face directory")
    args.add_argument("--env", metavar="NAME", help="only this environment of the config, or a built-in one")
    args.add_argument("--json", action="store_true", help="print the metrics as one JSON object")
    return cli.run_entry(_run, cli.arguments(args, argv))


def _run(args: argparse.Namespace) -> int:
    config, policy = cli.load_policy_config(args)
    chosen = _chosen(config, args.env)
    config = dataclasses.replace(
        config, envs=(), sft=dataclasses.replace(config.sft, steps=0, envs=()), evaluate=chosen
    )
    title = f"{policy}: {chosen.num_tasks} tasks, {chosen.samples_per_task} samples each, T={chosen.temperature}"
    if args.dry_run:
        cli.print_plan(config, [f"would evaluate {title} on {', '.join(env.label for env in chosen.envs)}"])
        return 0
    metrics = _evaluate(config, policy)
    if args.json:
        print(json.dumps(metrics))
    else:
        console().print(_table(metrics, title))
    return 0


def _chosen(config: cli.RunConfig, name: str | None) -> EvaluateConfig:
    """Return the evaluation of `name` only, or all of the config's."""
    envs = config.evaluate.envs
    if name:
        known = {env.label: env for env in (*config.envs, *envs)}
        envs = (known.get(name) or EnvConfig(id=name),)
    if not envs:
        raise ConfigError(["evaluate.envs: no environment; add [[evaluate.envs]] or give --env"])
    return dataclasses.replace(config.evaluate, envs=envs)


def _evaluate(config: cli.RunConfig, policy: Path) -> dict[str, float]:
    arch, params, version = rooms.load_policy(policy, make_mesh(MeshConfig()))
    cli.check(config, arch, "evaluate")
    tokenizer = rooms.load_tokenizer(config, arch, rooms.tokenizer_dir(policy))
    pool = rooms.start_pool(config)
    sampler = rooms.make_sampler(config, arch, tokenizer, params, version)
    episode = dataclasses.replace(config.episode, temperature=config.evaluate.temperature)
    player = rooms.make_player(config, episode, sampler, pool, tokenizer, "evaluate")
    try:
        metrics, _ = asyncio.run(evaluate(config.evaluate, player))
    finally:
        asyncio.run(sampler.close())
        asyncio.run(pool.close())
    return metrics


def _table(metrics: Mapping[str, float], title: str) -> Table:
    table = Table(title=title)
    table.add_column("environment")
    table.add_column("metric")
    table.add_column("value", justify="right")
    for name, value in metrics.items():
        _, env, metric = name.split("/", 2)
        table.add_row(env, metric, f"{value:.4f}")
    return table


if __name__ == "__main__":
    sys.exit(main())
