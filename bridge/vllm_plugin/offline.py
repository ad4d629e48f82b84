"""A vLLM engine inside this process, in float32, for checks and tests: no server, no sampling, exact activations."""

from pathlib import Path
from types import TracebackType
from typing import Any

from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.inputs import TokensPrompt

from bridge.vllm_plugin.cpu_fp8 import ACTIVATIONS

_MAX_RUNNING = 4
_KV_BLOCK = 128  # tokens; what vLLM takes on a CPU


class Scorer:
    """Loads a directory strictly; leaves nothing behind at the end of its `with`, so that the next can load.

    Args:
        max_len: longest prompt in tokens, one for the token that vLLM must sample included.
        options: further arguments of vllm.LLM.
    """

    def __init__(self, folder: Path, max_len: int, **options: Any) -> None:
        settings = {
            "dtype": "float32",
            "load_format": "strict",
            "enforce_eager": True,
            "skip_tokenizer_init": True,
            "max_model_len": max_len,
            "max_num_seqs": _MAX_RUNNING,
            "max_num_batched_tokens": max(max_len, _MAX_RUNNING),
            "block_size": _KV_BLOCK,
            "num_gpu_blocks_override": _MAX_RUNNING * -(-max_len // _KV_BLOCK) + 1,  # no more than it can use
            "enable_prefix_caching": False,
            "disable_log_stats": True,
            "seed": 0,
            "additional_config": {ACTIVATIONS: "exact"},
        }
        self.llm = LLM(model=str(folder), **settings | options)

    def prompt_logprobs(self, prompts: list[list[int]]) -> list[list[float]]:
        """Return the log-probability of every token but the first of each prompt."""
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        outputs = self.llm.generate([TokensPrompt(prompt_token_ids=p) for p in prompts], params, use_tqdm=False)
        return [
            [entry[token].logprob for token, entry in zip(prompt[1:], output.prompt_logprobs[1:], strict=True)]
            for prompt, output in zip(prompts, outputs, strict=True)
        ]

    def __enter__(self) -> "Scorer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        cleanup_dist_env_and_memory()
