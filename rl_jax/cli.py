"""The run's config and its checks across rooms, shared by the entry modules (step 1 of docs/walk.md).

A room checks its own Config; what two rooms must agree on is checked here, before anything starts.
"""

import argparse
import contextlib
import dataclasses
import gc
import importlib.util
import logging
import os
import shlex
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import jax
from rich.console import Console

from rl_jax.advantages import AdvantageConfig
from rl_jax.checkpoint import (
    CheckpointConfig,
    CheckpointFailed,
    find_checkpoint,
    holds_checkpoint,
    read_meta,
    versions,
)
from rl_jax.config import ConfigError, load, refuse, to_toml
from rl_jax.engine.config import EngineConfig
from rl_jax.envs.errors import EnvError
from rl_jax.envs.pool import PoolConfig
from rl_jax.envs.registry import EnvConfig
from rl_jax.hosts import group
from rl_jax.hosts.config import HostsConfig, resolve
from rl_jax.hosts.group import Ending, Hosts
from rl_jax.http.config import ServeConfig
from rl_jax.interrupt import Interrupt
from rl_jax.losses import LossConfig
from rl_jax.mesh import MeshConfig
from rl_jax.metrics import NO_WANDB, MetricsConfig
from rl_jax.models.architecture import Architecture, export_faults, read_architecture
from rl_jax.models.fp8_rule import why_plain
from rl_jax.models.moe_kernels import kernel_faults
from rl_jax.models.schema import flat_table, mesh_faults, near_divisors
from rl_jax.models.splash import splash_fault
from rl_jax.models.transformer import ForwardConfig
from rl_jax.optim import OptimConfig
from rl_jax.orchestrator.config import OrchestratorConfig
from rl_jax.packing import PackingConfig
from rl_jax.printable import printable
from rl_jax.progress import Dashboard
from rl_jax.rollout.canary import CanaryConfig, CanaryFailed
from rl_jax.rollout.episode import EpisodeConfig
from rl_jax.rollout.evaluation import EvaluateConfig
from rl_jax.rollout.fleet_config import FleetConfig
from rl_jax.run_folder import RunFolder
from rl_jax.sampler import SamplerLost
from rl_jax.trainer.loop import NonFinite, TrainerConfig
from rl_jax.trainer.supervised import SftConfig

logger = logging.getLogger(__name__)

ROUTES_FLAG = "--enable-return-routed-experts"

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130

RUN_FAILURES = (CanaryFailed, CheckpointFailed, NonFinite, SamplerLost, EnvError, OSError, RuntimeError, ValueError)
"""What ends a run with a message; its log has the rest, its last checkpoint is whole."""


@dataclass(frozen=True, kw_only=True)
class RunSection:
    """What the run is called, where its folder is, and how long it trains."""

    name: str = "run"
    """Name of the run; its folder is <dir>/<name>-<time>."""
    dir: str = "runs"
    """Directory of the run folders."""
    steps: int = 100
    """Training steps of the whole run, those before a resume included."""
    seed: int = 0
    """Seed of initial weights, task order and sampling: the same seed and config repeat a synchronous run bit by bit."""

    def __post_init__(self) -> None:
        refuse(
            [
                None if self.steps >= 0 else f"steps={self.steps}: must be at least 0",
                # JAX takes 32 bits of a seed, so that larger ones would draw the weights of smaller ones.
                None if 0 <= self.seed < 2**32 else f"seed={self.seed}: must be between 0 and {2**32 - 1}",
                None
                if self.name.isprintable() and self.name and "/" not in self.name
                else f"name={self.name!r}: must be a plain folder name",
            ]
        )


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which policy: a Hugging Face directory, or a shape that is made from scratch."""

    path: str = ""
    """Hugging Face directory (config.json, safetensors, tokenizer.json) of the Llama, Qwen3 or Qwen3-MoE family; or a
    checkpoint: a run folder, or what bridge.convert made."""
    architecture: Architecture | None = None
    """Shape of a policy made from scratch with a byte-level tokenizer; instead of path."""

    def __post_init__(self) -> None:
        refuse(
            [
                None
                if bool(self.path) != (self.architecture is not None)
                else f"path={self.path!r}: give either model.path or a table model.architecture, not both and not none"
            ]
        )

    def resolve(self) -> Architecture:
        """Return the shape; reads config.json, or the metadata of a checkpoint, if there is a path."""
        if self.architecture:
            return self.architecture
        path = Path(self.path)
        return read_meta(find_checkpoint(path)).architecture if holds_checkpoint(path) else read_architecture(path)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything a run is. Sections are rooms of the code; a room sees its own section only."""

    run: RunSection = field(default_factory=RunSection)
    """Name, folder, length, seed."""
    model: ModelConfig
    """The policy."""
    mesh: MeshConfig = field(default_factory=MeshConfig)
    """Devices of the trainer."""
    hosts: HostsConfig = field(default_factory=HostsConfig)
    """Processes that train together, for a mesh of more devices than one host has."""
    forward: ForwardConfig = field(default_factory=ForwardConfig)
    """How the model computes, in trainer and embedded sampler."""
    packing: PackingConfig = field(default_factory=PackingConfig)
    """Shape of a micro-batch."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    """What a training step does beyond loss and optimizer."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """Optimizer of RL."""
    loss: LossConfig = field(default_factory=LossConfig)
    """Policy loss."""
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    """From the rewards of a group to advantages."""
    envs: tuple[EnvConfig, ...] = ()
    """Environments that are trained on, mixed by weight."""
    pool: PoolConfig = field(default_factory=PoolConfig)
    """Worker processes of the environments."""
    episode: EpisodeConfig = field(default_factory=EpisodeConfig)
    """Sampling of training rollouts."""
    sampler: EngineConfig | FleetConfig = field(default_factory=EngineConfig)
    """Who writes rollouts: the embedded sampler, or a fleet of vLLM servers. Without `type` it is the embedded one."""
    orchestrator: OrchestratorConfig = field(default_factory=OrchestratorConfig)
    """Batches, groups, staleness, concurrency."""
    sft: SftConfig = field(default_factory=SftConfig)
    """Supervised training: the warm start of a run, or all of python -m rl_jax.sft."""
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    """Held-out tasks."""
    canary: CanaryConfig = field(default_factory=CanaryConfig)
    """Agreement of trainer and sampler on fixed prompts."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Checkpoints of the run."""
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    """Where metrics go."""
    serve: ServeConfig = field(default_factory=ServeConfig)
    """The HTTP server of python -m rl_jax.serve."""

    @property
    def all_envs(self) -> tuple[EnvConfig, ...]:
        """Environments of training, evaluation and warm start: the worker processes hold them all."""
        return (*self.envs, *self.evaluate.envs, *self.sft.envs)


def check(config: RunConfig, arch: Architecture, does: Literal["rl", "sft", "evaluate", "serve"]) -> None:
    """Refuse what rooms disagree on, for a command that does one of these.

    Raises:
        ConfigError: with every fault.
    """
    refuse(
        [
            *(mesh_faults(arch, vars(config.mesh)) if does in ("rl", "sft") else ()),
            *(_faults_of_rows(config, arch) if does in ("rl", "sft") else ()),
            *(_faults_of_heads(config, arch) if does in ("rl", "sft") else ()),
            *(_faults_of_context(config, arch) if does != "sft" else ()),
            *(_faults_of_turns(config) if does in ("rl", "evaluate") else ()),
            *(_faults_of_training(config) if does in ("rl", "sft") else ()),
            *_faults_of_envs(config),
            *kernel_faults(config.forward.moe_kernels, arch),
            *(export_faults(arch) if does in ("rl", "sft") else ()),
            *(_faults_of_rl(config, arch) if does == "rl" else ()),
            *(_faults_of_fleet(config, arch, config.sampler) if does == "rl" else ()),
        ]
    )


def _faults_of_rows(config: RunConfig, arch: Architecture) -> Iterator[str]:
    rows, seq_len, shards = config.packing.rows, config.packing.seq_len, config.mesh.num_batch_shards
    if rows % shards:
        near = max(shards, round(rows / shards) * shards)
        yield f"packing.rows={rows}: the mesh splits rows {shards} ways (data*fsdp*expert); try {near}"
    chunks = 2 * config.mesh.context
    if config.mesh.context > 1 and seq_len % chunks:
        near = sorted({max(chunks, seq_len // chunks * chunks), -(-seq_len // chunks) * chunks})
        yield (
            f"packing.seq_len={seq_len}: mesh.context={config.mesh.context} needs a multiple of {chunks}, an early and a "
            f"late chunk of each row on each device; try {' or '.join(map(str, near))}"
        )
    if seq_len > arch.max_positions and not config.model.architecture:
        yield f"packing.seq_len={seq_len}: the model has max_positions={arch.max_positions}"


def _faults_of_heads(config: RunConfig, arch: Architecture) -> Iterator[str]:
    ways = config.mesh.tensor * config.mesh.context
    if config.forward.context_attention == "ulysses" and arch.num_kv_heads % ways:
        yield (
            f"forward.context_attention='ulysses': mesh.tensor*context={ways} must divide "
            f"model.num_kv_heads={arch.num_kv_heads}; try {near_divisors(arch.num_kv_heads, ways)}, or 'all_gather'"
        )
    if config.forward.attention == "splash":
        fault = splash_fault(config.packing.seq_len // config.mesh.context, arch.head_width)
        yield from [fault] if fault else []


def _faults_of_context(config: RunConfig, arch: Architecture) -> Iterator[str]:
    context = config.sampler.max_len
    if context > arch.max_positions:
        yield f"sampler.max_len={context}: the model has max_positions={arch.max_positions}"


def _faults_of_turns(config: RunConfig) -> Iterator[str]:
    max_tokens, context = config.episode.max_tokens, config.sampler.max_len
    if max_tokens >= context:
        yield f"episode.max_tokens={max_tokens}: leaves no room for a prompt in sampler.max_len={context}"

    embedded = config.sampler if isinstance(config.sampler, EngineConfig) else None
    if config.episode.return_routed_experts and embedded and not embedded.routed_experts:
        yield "episode.return_routed_experts=true: set sampler.routed_experts=true, the sampler must keep its routes"


def _faults_of_training(config: RunConfig) -> Iterator[str]:
    data = config.sft.data
    if data and config.sft.steps and not Path(data).is_file():
        yield f"sft.data={data!r}: no such file"
    if config.metrics.wandb and importlib.util.find_spec("wandb") is None:
        yield NO_WANDB


def _faults_of_envs(config: RunConfig) -> Iterator[str]:
    labels = [env.label for env in config.all_envs]
    for label in sorted({label for label in labels if labels.count(label) > 1}):
        yield f"envs: {label!r} names {labels.count(label)} environments of envs, evaluate.envs, sft.envs; set name"


def _faults_of_rl(config: RunConfig, arch: Architecture) -> Iterator[str]:
    group_size, context, seq_len = config.orchestrator.group_size, config.sampler.max_len, config.packing.seq_len
    if context > seq_len:
        yield f"sampler.max_len={context}: a rollout must fit in a row of packing.seq_len={seq_len}; make them equal"
    if not config.envs:
        yield "envs: no environment to train on; add [[envs]] with an id"
    if config.advantage.needs_group and group_size < 2:
        yield (
            f"orchestrator.group_size={group_size}: advantage.type={config.advantage.type!r} compares members of a "
            "group, so with 1 every advantage is 0; use at least 2 (8 or 16 are common) or type 'reinforce_ema'"
        )
    if config.episode.temperature <= 0:
        yield f"episode.temperature={config.episode.temperature}: greedy groups have no variety; use 1.0"
    if config.trainer.router_replay and not arch.num_experts:
        yield "trainer.router_replay=true: the model has no experts"
    if config.trainer.router_replay and not config.episode.return_routed_experts:
        yield "trainer.router_replay=true: set episode.return_routed_experts=true, the sampler must say its routes"


def _faults_of_fleet(config: RunConfig, arch: Architecture, fleet: EngineConfig | FleetConfig) -> Iterator[str]:
    if not isinstance(fleet, FleetConfig):
        return
    if not fleet.urls and not fleet.server.python_path.is_file():
        yield f"sampler.server.python={fleet.server.python!r}: no such file; make fleet installs vLLM there"
    plain = {why_plain(arch, fleet.format, key) for key, param in flat_table(arch).items() if param.is_fp8}
    for reason in sorted(plain - {""} if fleet.format.startswith("fp8") else ()):
        yield f"sampler.format={fleet.format!r}: {reason}; use 'fp8-channel' or other widths"
    if config.episode.return_routed_experts and not fleet.urls and ROUTES_FLAG not in fleet.server.args:
        yield (
            f"episode.return_routed_experts=true: servers need {ROUTES_FLAG} in sampler.server.args, which vLLM has on a "
            "GPU only; elsewhere use the embedded sampler"
        )


def parser(command: str, description: str) -> argparse.ArgumentParser:
    """Return the argument parser that all entries share."""
    args = argparse.ArgumentParser(prog=f"python -m rl_jax.{command}", description=description)
    args.add_argument("--config", action="append", default=[], metavar="FILE", help="TOML file; several merge in order")
    args.add_argument("--set", action="append", default=[], metavar="A.B=VALUE", help="override one key")
    args.add_argument("--dry-run", action="store_true", help="print the resolved config and what would run, and stop")
    return args


def load_config(args: argparse.Namespace, base: Sequence[Path] = ()) -> RunConfig:
    """Load the RunConfig of parsed arguments on top of `base` files."""
    if not args.config and not base:
        raise ConfigError(["--config: give a TOML file, for example --config configs/reverse_text.toml"])
    return load(RunConfig, [*base, *args.config], args.set)


def load_policy_config(args: argparse.Namespace) -> tuple[RunConfig, Path]:
    """Load the config of a command that samples from a policy: the run's own, under --config and --set.

    Returns:
        The config and the policy's directory: --policy, or model.path without it.
    """
    if not args.policy:
        if not args.config:
            raise ConfigError(["--policy: give a run folder, a checkpoint, or a Hugging Face directory"])
        config = load_config(args)
        if not config.model.path:
            raise ConfigError(["--policy: give a run folder, a checkpoint, or a Hugging Face directory"])
        return config, Path(config.model.path)
    policy = Path(args.policy)
    if not policy.is_dir():
        raise ConfigError([f"--policy {policy}: no such directory"])
    base = next((folder / "config.toml" for folder in (policy, *policy.parents[:2]) if _is_run(folder)), None)
    if base is None and not args.config:
        return load(RunConfig, [], [f'model.path="{policy}"', *args.set]), policy
    return load(RunConfig, [*([base] if base else []), *args.config], args.set), policy


def _is_run(folder: Path) -> bool:
    return (folder / "config.toml").is_file()


def print_plan(config: RunConfig, lines: Sequence[str]) -> None:
    """Print the resolved config and what would run."""
    print(to_toml(config))
    print("\n".join(f"# {line}" for line in lines))


class _Terminal(logging.Handler):
    """Shows warnings in one line each; the traceback of a failure is for the log of the run."""

    def emit(self, record: logging.LogRecord) -> None:
        text = printable(record.getMessage()).replace("\n", " | ")
        if record.name == "asyncio" and "/orbax/" in text:  # of many writes that fail, Orbax raises the first
            logger.info("stray exception: %s", text)
            return
        print(f"{record.levelname} {record.name}: {text}", file=sys.stderr)


@contextlib.contextmanager
def _terminal_log() -> Iterator[None]:
    """Let nobody but _Terminal write log records to the terminal: what packages bring shows tracebacks."""
    root, hook = logging.getLogger(), sys.unraisablehook
    before, root.handlers[:] = root.handlers[:], [_Terminal(logging.WARNING)]
    sys.unraisablehook = lambda stray: _log_stray(stray) if stray.object is None else hook(stray)
    try:
        yield
    finally:
        gc.collect()  # tasks that failed unheard tell asyncio's log when they are collected
        root.handlers[:], sys.unraisablehook = before, hook


def _log_stray(stray: "sys.UnraisableHookArgs") -> None:
    """Log what a thread of a package can raise to nobody: tens of times the same when a write of TensorStore fails."""
    error = stray.exc_value
    logger.info("stray exception: %r", error, exc_info=error)


def run_entry(entry: Callable[[argparse.Namespace], int], args: argparse.Namespace) -> int:
    """Run an entry; what the user can mend becomes a message and an exit code, not a traceback."""
    try:
        code = _outcome(entry, args)
    except BaseException:
        if not jax.distributed.is_initialized():
            raise
        traceback.print_exc()
        code = EXIT_FAILED
    if code and jax.distributed.is_initialized():
        group.leave_at_once(code)
    return code


def _outcome(entry: Callable[[argparse.Namespace], int], args: argparse.Namespace) -> int:
    console = Console(stderr=True, soft_wrap=True)
    try:
        with _terminal_log():
            return entry(args)
    except ConfigError as error:
        console.print(f"[bold red]cannot run[/]: {len(error.faults)} fault(s)", highlight=False)
        for fault in error.faults:
            console.print(f"  - {fault}", markup=False, highlight=False)
        return EXIT_BAD_INPUT
    except (SamplerLost, EnvError, OSError) as error:
        console.print(f"failed: {error}", markup=False, highlight=False)
        return EXIT_FAILED
    except KeyboardInterrupt:
        console.print("[bold]stopped[/]")
        return EXIT_INTERRUPTED


def join(config: RunConfig) -> tuple[RunConfig, Hosts]:
    """Meet the other processes of the run, if it has any; return the config as all of them have it.

    Raises:
        ConfigError: they do not come, or their config, code or packages differ.
    """
    hosts = resolve(config.hosts, os.environ)
    config = dataclasses.replace(config, hosts=dataclasses.replace(config.hosts, process_id=None))
    same = {name: table for name, table in dataclasses.asdict(config).items() if name != "hosts"}
    return config, group.join(hosts, same, Path(__file__).resolve().parents[1], versions())


def supervise(
    run: Callable[[Interrupt], None], folder: RunFolder, resume: str, dashboard: Dashboard, hosts: Hosts
) -> int:
    """Run with the folder's log and Ctrl-C; what can end a run becomes an exit code, and a message that says how to go on.

    Raises:
        ConfigError: as `run` does; for `run_entry`.
    """
    hosts.resume = f"start all of them again with: {resume}"
    with folder.locked(), folder.logged(), Interrupt(dashboard) as interrupt:
        hosts.on_stop = interrupt.request
        try:
            run(interrupt)
            return 0
        except (KeyboardInterrupt, *RUN_FAILURES) as error:
            if isinstance(error, ConfigError):
                raise
            ending = ending_of(error, interrupt, hosts)
            hosts.leave(ending)
            if ending.code == EXIT_INTERRUPTED:
                dashboard.say(f"stopped at once; continue with: {resume}")
            else:
                logger.exception("the run ended")
                dashboard.say(f"the run ended: {ending.text}\ndetails in {folder.log}; continue with: {resume}")
            return ending.code


def ending_of(error: BaseException, interrupt: Interrupt, hosts: Hosts) -> Ending:
    """Return why this process ends: by its own error, or by that of another process that caused it."""
    if interrupt.is_forced or isinstance(error, KeyboardInterrupt):
        return Ending(code=EXIT_INTERRUPTED, text="it was stopped at once")
    own = Ending(code=EXIT_FAILED, text=str(error), kind=type(error).__name__)
    return hosts.blame(error) or own


def arguments(args: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse `argv`, or the command line if None."""
    return args.parse_args(sys.argv[1:] if argv is None else argv)


def shown(module: str, *words: str | Path) -> str:
    """Return a command of this project as a shell takes it."""
    return shlex.join(["python", "-m", module, *map(str, words)])


def command_line() -> list[str]:
    """Return the command that runs now, for the record of a run."""
    return [Path(sys.orig_argv[0]).name, *sys.orig_argv[1:]]  # sys.argv has a path in place of `-m rl_jax.train`
