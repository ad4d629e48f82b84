"""The fleet's half of tests/system/test_vllm_parity.py: makes tiny models, scores real text by vLLM and transformers.

.venv-fleet/bin/python tests/fleet/parity.py OUT TEXT...   (in the environment bridge.verify_vllm.ENVIRONMENT)

Leaves a folder for each model, with model files, prompts.json, and scores.json: {"vllm": ..., "transformers": ...}.
"""

import json
import sys
from pathlib import Path

import torch
import transformers
from tiny_checkpoints import LLAMA, LLAMA_TIED, QWEN3, QWEN3_MOE, QWEN3_MOE_TIED, QWEN3_TIED, Tiny

from bridge.vllm_plugin.offline import Scorer

SHORT, LONG = [2, 64, 258], [4096]
CASES: dict[str, tuple[Tiny, str, list[int]]] = {
    "llama": (LLAMA, "5GB", SHORT),
    "llama-tied": (LLAMA_TIED, "100KB", SHORT),
    "qwen3": (QWEN3, "100KB", SHORT),
    "qwen3-tied": (QWEN3_TIED, "5GB", LONG),
    "qwen3-moe": (QWEN3_MOE, "300KB", SHORT),
    "qwen3-moe-tied": (QWEN3_MOE_TIED, "5GB", LONG),
}
"""Name -> model, largest file, prompt lengths in tokens."""


def transformers_scores(folder: Path, prompts: list[list[int]]) -> list[list[float]]:
    """Return float32 log-probabilities of every token but the first, by a plain forward pass."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    scores = []
    for prompt in prompts:
        with torch.no_grad():
            logprobs = torch.log_softmax(model(torch.tensor([prompt])).logits[0], -1)
        scores.append([float(logprobs[t, token]) for t, token in enumerate(prompt[1:])])
    return scores


def main(out: Path, texts: list[Path]) -> None:
    """Score every case; a token is a byte of the texts."""
    text = b"".join(path.read_bytes() for path in texts)
    for number, (name, (tiny, max_shard_size, lengths)) in enumerate(CASES.items()):
        folder = tiny.save(out / name, seed=number, max_shard_size=max_shard_size, dtype=torch.float32)
        starts = [97 * number + 1009 * i for i in range(len(lengths))]
        prompts = [list(text[start : start + length]) for start, length in zip(starts, lengths, strict=True)]
        with Scorer(folder, max_len=max(map(len, prompts)) + 1) as scorer:
            by_vllm = scorer.prompt_logprobs(prompts)
        scores = {"vllm": by_vllm, "transformers": transformers_scores(folder, prompts)}
        (folder / "prompts.json").write_text(json.dumps(prompts))
        (folder / "scores.json").write_text(json.dumps(scores))


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(path) for path in sys.argv[2:]])
