"""Builds the rooms of a run from its config: what train, sft, evaluate and serve have in common."""

import asyncio
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from bridge import hf
from bridge.push import Pusher, write_model
from rl_jax import checkpoint
from rl_jax.cli import RunConfig
from rl_jax.config import ConfigError, refuse
from rl_jax.engine.config import EngineConfig
from rl_jax.engine.sampler import EmbeddedSampler
from rl_jax.envs.errors import EnvError
from rl_jax.envs.pool import EnvPool
from rl_jax.mesh import make_mesh
from rl_jax.models.architecture import Architecture, read_architecture
from rl_jax.models.moe_kernels import platform_faults
from rl_jax.models.schema import Params, init_params
from rl_jax.rollout.documents import read_documents, solved_tasks
from rl_jax.rollout.episode import EpisodeConfig, Player
from rl_jax.rollout.fleet import VllmFleet
from rl_jax.rollout.fleet_config import FleetConfig
from rl_jax.rollout.server import Launch
from rl_jax.rollout.server_check import check_servers
from rl_jax.sampler import Sampler
from rl_jax.tokenizer import Tokenizer
from rl_jax.trainer.supervised import Pair

logger = logging.getLogger(__name__)


def load_tokenizer(config: RunConfig, arch: Architecture, directory: Path | None = None) -> Tokenizer:
    """Return the tokenizer of the run: the one saved in `directory`, model.path's, or the byte-level one.

    Raises:
        ConfigError: broken files, no stop token, or ids beyond the embedding.
    """
    source = directory or (tokenizer_dir(Path(config.model.path)) if config.model.path else None)
    try:
        tokenizer = Tokenizer.from_dir(source) if source else Tokenizer.byte_level()
        tokenizer.check_fits(arch.vocab_size)
    except ValueError as error:
        path = config.model.path
        key = f"model.path={path!r}" if path else f"model.architecture.vocab_size={arch.vocab_size}"
        raise ConfigError([f"{key}: tokenizer: {error}"]) from error
    return tokenizer


def check_start(config: RunConfig, arch: Architecture) -> None:
    """Refuse a model.path whose tensors do not fit, and servers that cannot sample for the run, before anything starts.

    Raises:
        ConfigError: with every fault.
    """
    if config.model.path and not checkpoint.holds_checkpoint(Path(config.model.path)):
        hf.check_tensors(config.model.path, arch)
    if isinstance(config.sampler, FleetConfig) and config.sampler.urls:
        asyncio.run(check_servers(config.sampler))


def start_mesh(config: RunConfig) -> Mesh:
    """Make the mesh of the trainer.

    Raises:
        ConfigError: there are too few devices, or they cannot run forward.moe_kernels.
    """
    try:
        mesh = make_mesh(config.mesh)
    except ValueError as error:
        raise ConfigError([f"mesh: {error}"]) from error
    refuse(platform_faults(config.forward.moe_kernels, mesh.devices.flat[0].platform))
    return mesh


def load_start(config: RunConfig, arch: Architecture, mesh: Mesh) -> Params:
    """Return the weights that the run starts from: those of model.path, or drawn from the seed."""
    if config.model.path:
        return load_policy(Path(config.model.path), mesh)[1]
    return init_params(arch, mesh, jax.random.key(config.run.seed))


def load_policy(path: Path, mesh: Mesh) -> tuple[Architecture, Params, int]:
    """Return architecture, float32 weights and policy version of a run folder, a checkpoint, or a Hugging Face directory.

    The version is the step of the checkpoint; 0 for a Hugging Face directory.
    """
    if (path / "config.json").is_file():
        arch = read_architecture(path)
        return arch, hf.load_params(path, arch, mesh), 0
    meta, params = checkpoint.load_params(path, mesh)
    return meta.architecture, params, meta.step


def tokenizer_dir(path: Path) -> Path:
    """Return where the tokenizer of a policy (see load_policy) lies."""
    if (path / "config.json").is_file():
        return path
    for folder in (path, *path.parents[:3]):
        if (folder / "tokenizer").is_dir():
            return folder / "tokenizer"
    raise ConfigError([f"{path}: no folder tokenizer beside it; give the folder of a run"])


def start_pool(config: RunConfig) -> EnvPool:
    """Start the worker processes with every environment of the run.

    Raises:
        ConfigError: an environment that cannot be made.
    """
    pool = EnvPool(config.all_envs, config.pool)
    try:
        asyncio.run(pool.start())
    except EnvError as error:
        raise ConfigError([f"envs: {error}"]) from error
    return pool


def make_sampler(
    config: RunConfig, arch: Architecture, tokenizer: Tokenizer, weights: Params, version: int = 0
) -> EmbeddedSampler:
    """Start the embedded sampler with `weights` as policy `version` and compile its programs.

    Where the config names a fleet, its sizes are the default ones with the fleet's max_len.

    Raises:
        ConfigError: the devices cannot run forward.moe_kernels.
    """
    refuse(platform_faults(config.forward.moe_kernels, jax.local_devices()[0].platform))
    named = config.sampler
    sizes = named if isinstance(named, EngineConfig) else EngineConfig(max_len=named.max_len)
    sampler = EmbeddedSampler(arch, config.forward, sizes, weights, version=version, tokenizer=tokenizer)
    asyncio.run(sampler.warm_up())
    return sampler


def make_fleet(
    config: RunConfig,
    arch: Architecture,
    fleet: FleetConfig,
    weights: Params | None,
    folder: Path,
    tokenizer_dir: Path,
    say: Callable[[str], None],
) -> VllmFleet:
    """Start or reach the vLLM servers; they have no policy version before the first publish.

    Args:
        weights: what servers of ours start from; None where fleet.urls names running ones.
        folder: where servers of ours log, what they start from, and the updates unless the config names a place.
    Raises:
        ConfigError: a server that cannot sample for this run. ServerLost: one that does not answer.
    """
    launch, folder = None, folder.absolute()  # servers have a working directory of their own
    if not fleet.urls:
        assert weights is not None, "servers of ours start from weights"
        model_dir = folder / "model"
        for left in (model_dir, folder / ".model.converting"):  # of an earlier attempt
            shutil.rmtree(left, ignore_errors=True)
        source = Path(config.model.path or ".") / "config.json"
        kept = source if config.model.path and source.is_file() else None  # a checkpoint has none
        write_model(model_dir, arch, weights, fleet.format, tokenizer_dir=tokenizer_dir, source_config=kept)
        launch = Launch(
            model_dir=model_dir, dtype=fleet.compute_dtype, max_len=fleet.max_len, max_running=fleet.max_running
        )
    updates = Path(fleet.updates_dir).absolute() if fleet.updates_dir else folder / "updates"
    sampler = VllmFleet(fleet, Pusher(arch, fleet.format, updates), launch=launch, logs=folder, say=say)
    try:
        sampler.start()
    except BaseException:
        asyncio.run(sampler.close())
        raise
    return sampler


def make_player(
    config: RunConfig, episode: EpisodeConfig, sampler: Sampler, pool: EnvPool, tokenizer: Tokenizer, name: str
) -> Player:
    """Return who plays episodes; `name` keeps the requests of training and evaluation apart."""
    context = config.sampler.max_len
    return Player(
        episode, sampler=sampler, pool=pool, tokenizer=tokenizer, context_len=context, seed=config.run.seed, name=name
    )


def load_documents(config: RunConfig, tokenizer: Tokenizer, pool: EnvPool | None) -> list[Pair]:
    """Return the documents of supervised training that fit in a row."""
    limit = config.packing.seq_len
    if config.sft.data:
        documents = read_documents(config.sft.data, tokenizer, limit)
    else:
        assert pool is not None, "documents of environments need the pool"
        made = solved_tasks(pool, config.sft.envs, tokenizer, config.sft.max_documents, limit)
        try:
            documents = asyncio.run(made)
        except EnvError as error:
            raise ConfigError([f"sft.envs: {error}"]) from error
    return [(document.tokens_T, document.trained_T) for document in documents]


def canary_sequences(config: RunConfig, pool: EnvPool, tokenizer: Tokenizer) -> list[np.ndarray]:
    """Return the prompts that the canary scores: the first tasks of the environments in turn, but those that fail.

    Raises:
        ConfigError: all of them fail.
    """
    return asyncio.run(_canary_sequences(config, pool, tokenizer))


async def _canary_sequences(config: RunConfig, pool: EnvPool, tokenizer: Tokenizer) -> list[np.ndarray]:
    sequences, failed = [], []
    for i in range(config.canary.num_prompts):
        env = config.envs[i % len(config.envs)].label
        size = await pool.info(env)
        index = i // len(config.envs)
        if size is None or index < size:
            try:
                prompt_T = tokenizer.prompt_ids((await pool.task(env, index)).prompt)
            except (EnvError, ValueError) as error:  # ValueError: the chat template refuses the messages
                failed.append(f"canary.num_prompts={config.canary.num_prompts}: {env}, task {index}: {error}")
                logger.warning("left out: %s", failed[-1])
            else:
                sequences.append(prompt_T[: config.sampler.max_len])
    if failed and not sequences:
        raise ConfigError(failed[:3])
    return sequences
