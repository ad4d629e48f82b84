"""Our side: rl_jax.engine, as a run uses it, with slots for the largest batch."""

import dataclasses
from pathlib import Path

import numpy as np

from bridge import hf
from experiments.worker import Values, serve
from rl_jax.cli import RunConfig
from rl_jax.config import load as load_config
from rl_jax.engine.bench import decode_tokens_per_s
from rl_jax.engine.engine import Engine
from rl_jax.engine.programs import Programs
from rl_jax.mesh import MeshConfig, make_mesh
from rl_jax.models.architecture import read_architecture
from rl_jax.sampler import Request, SamplingParams

engines: list[Engine] = []


def load(folder: str, config: str, max_len: int, batches: list[int]) -> Values:
    """Start the engine on a Hugging Face directory."""
    run, arch, mesh = load_config(RunConfig, [config]), read_architecture(folder), make_mesh(MeshConfig())
    sizes = dataclasses.replace(
        run.sampler, num_slots=max(batches), slot_buckets=tuple(batches), max_len=max_len, num_pages=0
    )
    programs = Programs(arch, run.forward, sizes, mesh)
    engines.append(Engine(programs, programs.place(hf.load_params(Path(folder), arch, mesh))))
    return {}


def decode(batch: int, prompt_tokens: int, max_tokens: int) -> Values:
    """Return sampled tokens a second."""
    return {"tokens/s": decode_tokens_per_s(engines[0], batch, prompt_tokens, max_tokens)}


def greedy(prompts: list[list[int]], max_tokens: int) -> Values:
    """Return greedy completions of the prompts, in order."""
    params, completions = SamplingParams(max_tokens=max_tokens, temperature=0.0), {}
    for ticket, prompt in enumerate(prompts):
        engines[0].add(ticket, Request(request_id=str(ticket), tokens_T=np.array(prompt, np.int32), params=params))
    while engines[0].has_work:
        completions |= {p.ticket: p.completion.tokens_T.tolist() for p in engines[0].step() if p.completion}
    return {"tokens": [completions[ticket] for ticket in range(len(prompts))]}


serve({"load": load, "decode": decode, "greedy": greedy})
