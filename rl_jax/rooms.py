"""Builds the rooms of a run from its config: what train, sft, evaluate and serve have in common."""

import asyncio
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from bridge import hf
from rl_jax import checkpoint
from rl_jax.cli import RunConfig
from rl_jax.config import ConfigError
from rl_jax.engine.sampler import EmbeddedSampler
from rl_jax.envs.errors import EnvError
from rl_jax.envs.pool import EnvPool
from rl_jax.mesh import make_mesh
from rl_jax.models.architecture import Architecture, read_architecture
from rl_jax.models.schema import Params, init_params
from rl_jax.rollout.documents import read_documents, solved_tasks
from rl_jax.rollout.episode import EpisodeConfig, Player
from rl_jax.sampler import Sampler
from rl_jax.tokenizer import Tokenizer
from rl_jax.trainer.supervised import Pair


def load_tokenizer(config: RunConfig, arch: Architecture, directory: Path | None = None) -> Tokenizer:
    """Return the tokenizer of the run: the one saved in `directory`, model.path's, or the byte-level one.

    Raises:
        ConfigError: broken files, no stop token, or ids beyond the embedding.
    """
    source = directory or (Path(config.model.path) if config.model.path else None)
    try:
        tokenizer = Tokenizer.from_dir(source) if source else Tokenizer.byte_level()
        tokenizer.check_fits(arch.vocab_size)
    except ValueError as error:
        raise ConfigError([f"model.path={config.model.path!r}: tokenizer: {error}"]) from error
    return tokenizer


def check_start(config: RunConfig, arch: Architecture) -> None:
    """Refuse a model.path whose tensors do not fit, before anything starts.

    Raises:
        ConfigError: with every fault.
    """
    if config.model.path:
        hf.check_tensors(config.model.path, arch)


def start_mesh(config: RunConfig) -> Mesh:
    """Make the mesh of the trainer.

    Raises:
        ConfigError: there are too few devices.
    """
    try:
        return make_mesh(config.mesh)
    except ValueError as error:
        raise ConfigError([f"mesh: {error}"]) from error


def load_start(config: RunConfig, arch: Architecture, mesh: Mesh) -> Params:
    """Return the weights that the run starts from: those of model.path, or drawn from the seed."""
    if config.model.path:
        return hf.load_params(config.model.path, arch, mesh)
    return init_params(arch, mesh, jax.random.key(config.run.seed))


def load_policy(path: Path, mesh: Mesh) -> tuple[Architecture, Params]:
    """Return architecture and float32 weights of a run folder, a checkpoint of one, or a Hugging Face directory."""
    if (path / "config.json").is_file():
        arch = read_architecture(path)
        return arch, hf.load_params(path, arch, mesh)
    meta, params = checkpoint.load_params(path, mesh)
    return meta.architecture, params


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


def make_sampler(config: RunConfig, arch: Architecture, tokenizer: Tokenizer, weights: Params) -> EmbeddedSampler:
    """Start the embedded sampler with `weights` as version 0 and compile its programs."""
    sampler = EmbeddedSampler(arch, config.forward, config.sampler, weights, tokenizer=tokenizer)
    asyncio.run(sampler.warm_up())
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
    """Return the prompts that the canary scores: the first tasks of the environments in turn."""
    return asyncio.run(_canary_sequences(config, pool, tokenizer))


async def _canary_sequences(config: RunConfig, pool: EnvPool, tokenizer: Tokenizer) -> list[np.ndarray]:
    sequences = []
    for i in range(config.canary.num_prompts):
        env = config.envs[i % len(config.envs)].label
        size = await pool.info(env)
        index = i // len(config.envs)
        if size is None or index < size:
            task = await pool.task(env, index)
            sequences.append(tokenizer.prompt_ids(task.prompt)[: config.sampler.max_len])
    return sequences
