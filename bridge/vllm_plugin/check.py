"""The fleet's half of bridge.verify: python -m bridge.vllm_plugin.check --model DIR [--twin DIR] --answer FILE

Loads the directory with every element checked and, if a twin is named, compares prompt log-probabilities in float32.
"""

import argparse
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path

from bridge.vllm_plugin.offline import Scorer

NUM_PROMPTS = 4
PROMPT_TOKENS = 64


def main(argv: Sequence[str] | None = None) -> int:
    """Write {"load_fault", "max_difference", "worst_prompt", "worst_token"} as JSON."""
    args = argparse.ArgumentParser(prog="python -m bridge.vllm_plugin.check")
    args.add_argument("--model", type=Path, required=True)
    args.add_argument("--twin", type=Path)
    args.add_argument("--answer", type=Path, required=True)
    found = args.parse_args(argv)
    answer = {"load_fault": "", "max_difference": 0.0, "worst_prompt": 0, "worst_token": 0}
    prompts = _prompts(json.loads((found.model / "config.json").read_text()))
    try:
        of_model = _score(found.model, prompts)
    except (ValueError, AssertionError, RuntimeError, KeyError) as error:
        answer["load_fault"] = f"{type(error).__name__}: {error}"
    else:
        if found.twin:
            answer |= _worst(of_model, _score(found.twin, prompts))
    found.answer.write_text(json.dumps(answer))
    return 0


def _prompts(config: dict) -> list[list[int]]:
    rng = random.Random(0)
    length = min(PROMPT_TOKENS, config["max_position_embeddings"] - 1)
    return [[rng.randrange(config["vocab_size"]) for _ in range(length)] for _ in range(NUM_PROMPTS)]


def _score(folder: Path, prompts: list[list[int]]) -> list[list[float]]:
    with Scorer(folder, max_len=len(prompts[0]) + 1) as scorer:
        return scorer.prompt_logprobs(prompts)


def _worst(left: list[list[float]], right: list[list[float]]) -> dict[str, float | int]:
    """Return the largest difference and where it is; NaN counts as infinite."""
    worst = {"max_difference": 0.0, "worst_prompt": 0, "worst_token": 0}
    for prompt, (ours, theirs) in enumerate(zip(left, right, strict=True)):
        for token, (a, b) in enumerate(zip(ours, theirs, strict=True), start=1):
            if not abs(a - b) <= worst["max_difference"]:
                difference = abs(a - b) if a == a and b == b else float("inf")
                worst = {"max_difference": difference, "worst_prompt": prompt, "worst_token": token}
    return worst


if __name__ == "__main__":
    sys.exit(main())
