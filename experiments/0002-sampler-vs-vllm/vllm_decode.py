"""The rival: vLLM on CPU, offline and in one process, which is its fastest way there. Runs in the fleet environment."""

import time

import torch
import vllm
from vllm import LLM, SamplingParams

from experiments.worker import Values, serve

engines: list[LLM] = []


def load(folder: str, max_len: int, batches: list[int], **ignored: object) -> Values:
    """Start vLLM on a Hugging Face directory."""
    engines.append(
        LLM(
            folder,
            dtype="float32",
            enforce_eager=True,
            max_model_len=max_len,
            max_num_seqs=max(batches),
            seed=0,
            disable_log_stats=True,
        )
    )
    return {"version": f"vllm {vllm.__version__}, torch {torch.__version__}, {torch.get_num_threads()} threads"}


def decode(batch: int, prompt_tokens: int, max_tokens: int, logprobs: bool) -> Values:
    """Return sampled tokens a second; the first round, which warms up, is not timed."""
    params = SamplingParams(
        max_tokens=max_tokens, temperature=1.0, ignore_eos=True, detokenize=False, logprobs=0 if logprobs else None
    )
    for _ in range(2):
        started = time.perf_counter()
        prompts = [{"prompt_token_ids": list(range(prompt_tokens))}] * batch
        outputs = engines[0].generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - started
        assert all(len(output.outputs[0].token_ids) == max_tokens for output in outputs)
    return {"tokens/s": batch * max_tokens / seconds}


def greedy(prompts: list[list[int]], max_tokens: int) -> Values:
    """Return greedy completions of the prompts, in order."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, detokenize=False)
    outputs = engines[0].generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    return {"tokens": [list(output.outputs[0].token_ids) for output in outputs]}


serve({"load": load, "decode": decode, "greedy": greedy})
