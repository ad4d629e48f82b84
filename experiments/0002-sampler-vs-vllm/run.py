"""Decode speed of the embedded sampler against vLLM on CPU, same weights: python -m experiments 0002."""

import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path

import jax
import numpy as np
from matplotlib.figure import Figure

from bridge import hf
from experiments.harness import FLEET_PYTHON, TRAINER_PYTHON, Report, conditions, is_quick, publish
from experiments.worker import Worker
from rl_jax.cli import RunConfig
from rl_jax.config import load
from rl_jax.mesh import MeshConfig, make_mesh
from rl_jax.models.schema import init_params
from rl_jax.tokenizer import Tokenizer

HERE = Path(__file__).parent
CONFIG = "configs/reverse_text.toml"
BATCHES = [1, 16, 64]
PROMPT_TOKENS, MAX_TOKENS = 16, 112
ROUNDS = 3
VLLM_ENV = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the default binding slows an engine inside the process several times
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
SIDES = ("ours", "vLLM 1 thread", "vLLM 2 threads")
Speeds = dict[str, dict[int, list[float]]]


def write_policy(folder: Path) -> None:
    """Write a Hugging Face directory with random weights of the demo's shape, tokenizer included."""
    arch = load(RunConfig, [CONFIG]).model.resolve()
    Tokenizer.byte_level().save(folder / "tokenizer")
    params = init_params(arch, make_mesh(MeshConfig()), jax.random.key(0))
    hf.save_params(folder / "policy", arch, params, folder / "tokenizer")


def open_workers(stack: ExitStack, folder: Path) -> tuple[dict[str, Worker], str]:
    """Start all sides on the same weights; returns them and vLLM's version."""
    workers = {"ours": stack.enter_context(Worker(TRAINER_PYTHON, HERE / "jax_decode.py", folder / "ours.log"))}
    for threads, side in enumerate(SIDES[1:], start=1):
        env = {**VLLM_ENV, "OMP_NUM_THREADS": str(threads)}
        log = folder / f"vllm{threads}.log"
        workers[side] = stack.enter_context(Worker(FLEET_PYTHON, HERE / "vllm_decode.py", log, env))
    arguments = {"folder": str(folder / "policy"), "config": CONFIG, "max_len": PROMPT_TOKENS + MAX_TOKENS}
    told = [worker.ask("load", **arguments, batches=BATCHES) for worker in workers.values()]
    return workers, str(told[1]["version"]).rsplit(",", 1)[0]


def agreement(workers: dict[str, Worker]) -> tuple[int, int]:
    """Return on how many of how many greedy tokens ours and vLLM agree: the proof that both run the same model."""
    prompts = np.random.default_rng(0).integers(0, 256, (16, PROMPT_TOKENS)).tolist()
    answers = [workers[side].ask("greedy", prompts=prompts, max_tokens=32)["tokens"] for side in SIDES[:2]]
    ours, theirs = (np.array(tokens) for tokens in answers)
    return int((ours == theirs).sum()), ours.size


def measure(workers: dict[str, Worker], rounds: int, max_tokens: int) -> Speeds:
    """Let all sides take turns at every batch size."""
    speeds: Speeds = {}
    for batch in BATCHES:
        for _ in range(rounds):
            for side, worker in workers.items():
                for logprobs in (False, True) if side != "ours" else (True,):
                    options = {} if side == "ours" else {"logprobs": logprobs}
                    answer = worker.ask(
                        "decode", batch=batch, prompt_tokens=PROMPT_TOKENS, max_tokens=max_tokens, **options
                    )
                    label = side if logprobs else f"{side}, no log-probabilities"
                    speeds.setdefault(label, {}).setdefault(batch, []).append(answer["tokens/s"])
    return speeds


def draw(medians: dict[str, dict[int, float]]) -> Figure:
    """Draw tokens a second over the batch size."""
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.add_subplot()
    for label, values in medians.items():
        style = "--" if "no log" in label else "-"
        axes.plot(list(values), list(values.values()), f"o{style}", label=label)
    axes.set(xscale="log", yscale="log", xlabel="requests at a time", ylabel="tokens/s")
    axes.set_xticks(BATCHES, [str(batch) for batch in BATCHES])
    axes.legend(frameon=False, fontsize=8)
    return figure


def main() -> None:
    """Measure and report."""
    is_small = is_quick(__doc__)
    where = conditions()
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        write_policy(Path(name))
        workers, version = open_workers(stack, Path(name))
        same, total = agreement(workers)
        rounds, max_tokens = (1, 32) if is_small else (ROUNDS, MAX_TOKENS)
        speeds = measure(workers, rounds, max_tokens)
    where["versions"] += f", {version}"
    medians = {
        label: {batch: statistics.median(values) for batch, values in found.items()} for label, found in speeds.items()
    }
    rows = []
    for batch in BATCHES:
        ours = medians["ours"][batch]
        best = [
            max(v[batch] for label, v in medians.items() if label != "ours" and ("no log" in label) == bare)
            for bare in (False, True)
        ]
        shown = [f"{speed:,.0f}" for speed in (ours, *best)]
        rows.append([str(batch), *shown, f"{ours / best[0]:.2f}x", f"{ours / best[1]:.2f}x"])
    columns = ["requests", "ours", "vLLM", "vLLM bare", "ours / vLLM", "ours / vLLM bare"]
    notes = [
        f"prompts of {PROMPT_TOKENS} tokens, completions of {max_tokens}, temperature 1, float32; medians of {rounds}",
        "vLLM: the faster of 1 and 2 threads; bare: without the log-probabilities that RL needs (ours has them always)",
        f"greedy tokens that agree: {same} of {total}",
    ]
    raw: dict[str, object] = {"tokens/s": speeds, "greedy_same": same, "greedy_total": total}
    report = Report(title="Decode, tokens/s", columns=columns, rows=rows, notes=notes, raw=raw, figure=draw(medians))
    publish(HERE, report, where, is_small)


main()
