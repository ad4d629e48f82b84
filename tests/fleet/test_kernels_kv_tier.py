"""The KV tier inside a real vLLM on a CPU: pages that the device forgot come back, and nothing else does."""

import gc
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny_checkpoints import QWEN3_MOE, QWEN3_TIED
from vllm import LLM, SamplingParams
from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown, get_kv_transfer_group
from vllm.inputs import TokensPrompt

from kernels.kv_tier.settings import TierConfig, fingerprint

BLOCK, NUM_BLOCKS = 32, 13
PAGE_BYTES = 2 * 2 * 2 * BLOCK * 32 * 4  # layers, keys and values, heads, places, width, float32
GREEDY = SamplingParams(temperature=0.0, max_tokens=9, logprobs=0, detokenize=False)
PROMPTS = [[random.Random(seed).randrange(323) for _ in range(length)] for seed, length in enumerate((200, 161, 300))]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return QWEN3_MOE.save(tmp_path_factory.mktemp("moe"))


class Engine:
    """A vLLM in this process whose device holds little more than one prompt; with a tier when `extra` is given."""

    def __init__(self, folder: Path, extra: dict | None = None, workers: int = 1):
        tier = {
            "kv_connector": "PageTierConnector",
            "kv_connector_module_path": "kernels.kv_tier.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": extra,
        }
        options = {"kv_transfer_config": tier} if extra is not None else {}
        self.llm = LLM(
            model=str(folder),
            dtype="float32",
            enforce_eager=True,
            max_model_len=BLOCK * (NUM_BLOCKS - 2),
            max_num_seqs=4,
            seed=0,
            disable_log_stats=True,
            skip_tokenizer_init=True,
            block_size=BLOCK,
            num_gpu_blocks_override=NUM_BLOCKS,
            tensor_parallel_size=workers,
            **options,
        )
        if extra is not None:
            if workers == 1:  # else they are in processes of their own
                self.store = get_kv_transfer_group().worker.store
            self.scheduler_half = self.llm.llm_engine.engine_core.engine_core.scheduler.connector.scheduler

    def ask(self, tokens: list[int], salt: str | None = "v1") -> tuple[list[int], list[float], int]:
        """Return sampled tokens, their log-probabilities, and how many tokens of the prompt were not computed."""
        prompt = TokensPrompt(prompt_token_ids=tokens, **({"cache_salt": salt} if salt is not None else {}))
        [answer] = self.llm.generate([prompt], GREEDY, use_tqdm=False)
        [output] = answer.outputs
        logprobs = [entry[token].logprob for token, entry in zip(output.token_ids, output.logprobs, strict=True)]
        return list(output.token_ids), logprobs, answer.num_cached_tokens

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        ensure_kv_transfer_shutdown()
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        gc.collect()


def same(one: tuple, other: tuple) -> bool:
    """Return whether two answers have equal tokens and log-probabilities to 1e-5."""
    return one[0] == other[0] and max(abs(a - b) for a, b in zip(one[1], other[1], strict=True)) < 1e-5


def damage(folder: Path) -> int:
    """Flip a bit in every page on disk; return how many there are."""
    paths = list(folder.glob("*/*.page"))
    for path in paths:
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    return len(paths)


def test_pages_come_back_from_ram_from_disk_and_after_a_restart(checkpoint, tmp_path):
    branch = PROMPTS[2][: 5 * BLOCK] + PROMPTS[0][:20]
    with Engine(checkpoint) as engine:
        *truth, truth_of_branch = [engine.ask(tokens) for tokens in (*PROMPTS, branch)]
    extra = {"ram_bytes": 7 * PAGE_BYTES + 1, "disk_path": str(tmp_path), "disk_bytes": 100 * (PAGE_BYTES + 100)}
    with Engine(checkpoint, extra) as engine:
        assert engine.store.page_bytes == PAGE_BYTES
        assert [same(engine.ask(tokens), right) for tokens, right in zip(PROMPTS, truth, strict=True)] == [True] * 3
        # Full blocks of prompt and answer: 208 // 32 + 169 // 32 + 308 // 32.
        assert engine.store.counts.put == 6 + 5 + 9
        assert engine.store.counts.spilled == 6 + 5 + 9 - 7
        answer = engine.ask(PROMPTS[0])
        assert same(answer, truth[0])
        assert answer[2] == 6 * BLOCK  # all full blocks, though the device had room for the last prompt only
        assert engine.store.counts.disk_hits == 6
        assert engine.ask(PROMPTS[0], "v2")[2] == 0  # other weights
        found = engine.ask(branch)
        assert same(found, truth_of_branch)
        assert found[2] == 5 * BLOCK
        put = engine.store.counts.put
        engine.ask(PROMPTS[1][::-1], None)
        assert engine.store.counts.put == put  # without a salt nothing is kept
        assert not engine.scheduler_half.requests
        assert engine.scheduler_half.num_unsalted == 1
    assert len(list(tmp_path.glob("*/*.page"))) == put
    with Engine(checkpoint, extra) as engine:
        engine.ask([1, 2, 3], None)  # the first step reports what the disk brought along
        answer = engine.ask(PROMPTS[1])
        assert same(answer, truth[1])
        assert answer[2] == 5 * BLOCK
        assert engine.store.counts.disk_hits == 5
        assert damage(tmp_path) == put
        assert same(engine.ask(PROMPTS[0]), truth[0])  # the scheduler counts on it, it does not check: computed again
        assert engine.store.disk.num_corrupt == 6
        # Reset, as with new weights: nothing of before is found, and the tier begins anew.
        assert engine.llm.reset_prefix_cache(reset_connector=True)
        before = engine.store.counts.put
        again = engine.ask(PROMPTS[0])
        assert same(again, truth[0])
        assert again[2] == 0
        assert engine.store.counts.put == before + 6
        assert len(list(tmp_path.glob("*/*.page"))) == 0
        engine.ask(PROMPTS[2])
        assert engine.ask(PROMPTS[0])[2] == 6 * BLOCK


@pytest.mark.slow(reason="starts an engine with two worker processes: 269 s on a busy machine")
def test_two_workers_in_processes_of_their_own(tmp_path):
    """Each keeps its half of every page; a page counts only when both have it, after a restart too."""
    folder = QWEN3_TIED.save(tmp_path / "qwen3")
    extra = {"ram_bytes": 4 * PAGE_BYTES, "disk_path": str(tmp_path / "tier"), "disk_bytes": 100 * PAGE_BYTES}
    with Engine(folder, workers=2) as engine:
        truth = [engine.ask(tokens) for tokens in PROMPTS]
    with Engine(folder, extra, workers=2) as engine:
        assert all(same(engine.ask(tokens), right) for tokens, right in zip(PROMPTS, truth, strict=True))
        answer = engine.ask(PROMPTS[0])
        assert same(answer, truth[0])
        assert answer[2] == 6 * BLOCK
    assert len(list((tmp_path / "tier").iterdir())) == 2
    with Engine(folder, extra, workers=2) as engine:
        engine.ask([1, 2, 3], None)
        answer = engine.ask(PROMPTS[2])
        assert same(answer, truth[2])
        assert answer[2] == 9 * BLOCK


def test_a_size_that_holds_nothing_is_refused_at_the_start(checkpoint):
    with pytest.raises(ValueError, match="ram_bytes=10: must hold at least one page"):
        Engine(checkpoint, {"ram_bytes": 10})
    ensure_kv_transfer_shutdown()


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"ram_byte": 1}, "unknown keys"),
        ({}, "ram_bytes: must be a number of bytes, got None"),
        ({"ram_bytes": True}, "ram_bytes: must be a number of bytes, got True"),
        ({"ram_bytes": 7, "disk_path": "x", "disk_bytes": "9"}, "disk_bytes: must be a number of bytes, got '9'"),
        ({"ram_bytes": 7, "disk_path": None, "disk_bytes": 9}, "disk_path: must be a folder, got None"),
        ({"ram_bytes": 7, "disk_path": "x", "disk_bytes": 9, "salt": "optional"}, "pages on disk outlive the weights"),
        ({"ram_bytes": 10**6, "disk_path": "x"}, "go together"),
        ({"ram_bytes": 10**6, "salt": "maybe"}, "must be .* got 'maybe'"),
    ],
)
def test_bad_settings_are_refused(extra, message):
    with pytest.raises(ValueError, match=message):
        TierConfig.parse(extra)


def test_good_settings():
    extra = {"ram_bytes": 7, "disk_path": "x", "disk_bytes": 9, "salt": "required"}
    assert TierConfig.parse(extra) == TierConfig(7, Path("x"), 9, True)
    assert TierConfig.parse({"ram_bytes": 7, "salt": "optional"}) == TierConfig(7, None, 0, False)


def test_pages_of_other_models_layouts_and_places_lie_in_other_folders():
    def folder(rank: int = 0, cache: torch.Tensor | None = None, rope: float = 1e4, **changes) -> str:
        model = {"model": "m", "revision": None, "dtype": torch.float32, "quantization": None}
        made = SimpleNamespace(
            model_config=SimpleNamespace(
                **{k: changes.get(k, v) for k, v in model.items()},
                hf_config=SimpleNamespace(to_dict=lambda: {"rope_theta": rope, "architectures": ["A"]}),
            ),
            cache_config=SimpleNamespace(cache_dtype=changes.get("cache_dtype", "auto")),
            parallel_config=SimpleNamespace(tensor_parallel_size=changes.get("size", 2), data_parallel_rank=0),
        )
        return fingerprint(made, rank, {"layer.0": torch.zeros(3, 2, 4) if cache is None else cache})

    others = [
        folder(rank=1),
        folder(size=4),
        folder(rope=5e5),
        folder(model="n"),
        folder(revision="r"),
        folder(dtype=torch.float16),
        folder(quantization="fp8"),
        folder(cache_dtype="fp8"),
        folder(cache=torch.zeros(3, 4, 2)),
        folder(cache=torch.zeros(3, 4, 2).transpose(1, 2)),
        folder(cache=torch.zeros(3, 2, 4).half()),
    ]
    assert len({folder(), *others}) == 1 + len(others)
    assert folder() == folder(cache=torch.ones(5, 2, 4))  # however many pages the device has
