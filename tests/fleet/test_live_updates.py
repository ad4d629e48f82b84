"""Updates of a running engine: after each the served weights are those of a fresh start, and a refused one changes nothing."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tiny_checkpoints import (
    LLAMA_TIED,
    QWEN3_MOE,
    QWEN3_MOE_FP8,
    Tensors,
    Tiny,
    quantisation_config,
    quantised,
    read_folder,
    write_folder,
)

from bridge.vllm_plugin.offline import Scorer
from bridge.wire import Sender

PROMPTS = [[(5 * i + j) % 323 for i in range(30 + 7 * j)] for j in range(2)]
WORDS = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float8_e4m3fn: "F8_E4M3"}
FAMILIES = {
    "fp8-block": (QWEN3_MOE_FP8, True),
    "fp8-channel": (QWEN3_MOE_FP8, False),
    "bf16-moe": (QWEN3_MOE, None),
    "bf16-tied": (LLAMA_TIED, None),
}


def as_stream(tensors: Tensors) -> Iterator[tuple]:
    for name, tensor in tensors.items():
        yield name, WORDS[tensor.dtype], tuple(tensor.shape), tensor.contiguous().view(torch.uint8).numpy()


def moved(plain: Tensors, seed: int, size: float = 1e-3) -> Tensors:
    """Return the weights after a step like an optimiser's: every element moves a little."""
    noise = torch.Generator().manual_seed(seed)
    return {
        name: (tensor.float() * (1 + size * torch.randn(tensor.shape, generator=noise))).to(tensor.dtype)
        for name, tensor in plain.items()
    }


class Replica:
    """An engine with the update backend, driven through vLLM's own Python doors."""

    def __init__(self, folder: Path) -> None:
        self.scorer = Scorer(
            folder,
            max_len=64,
            weight_transfer_config={"backend": "rl_jax"},
            worker_extension_cls="bridge.vllm_plugin.worker.WorkerExtension",
            logprobs_mode="raw_logprobs",
        )
        self.llm = self.scorer.llm
        self.llm.init_weight_transfer_engine({"init_info": {}})

    def ask(self, method: str, **kwargs) -> dict:
        return self.llm.collective_rpc(method, kwargs=kwargs)[0]

    def stage(self, path: Path) -> dict:
        """Stage beside serving; return the last status."""
        self.ask("rl_jax_stage", path=str(path))
        deadline = time.monotonic() + 60
        while (status := self.ask("rl_jax_status"))["state"] == "staging":
            assert time.monotonic() < deadline, status
            time.sleep(0.01)
        return status

    def commit(self, path: Path, version: int) -> None:
        self.llm.start_weight_update()
        self.llm.update_weights({"update_info": {"path": str(path), "phase": "commit"}})
        self.llm.finish_weight_update(str(version))

    def scores(self) -> torch.Tensor:
        return torch.tensor([one for prompt in self.scorer.prompt_logprobs(PROMPTS) for one in prompt])


class Trainer:
    """What the trainer's side needs: plain weights, their form on the wire, folders of versions."""

    def __init__(self, tiny: Tiny, block: bool | None, root: Path) -> None:
        self.root, self.block = root, block
        self.plain_dir = tiny.save(root / "plain")
        self.plain = read_folder(self.plain_dir)
        self.model_dir = self.write("version-0")

    def tensors(self) -> Tensors:
        return self.plain if self.block is None else quantised(self.plain, self.block)

    def write(self, name: str) -> Path:
        tensors = self.tensors()
        quantisation = None if self.block is None else quantisation_config(tensors, self.block)
        return write_folder(self.plain_dir, self.root / name, tensors, quantisation)


def packed_on_cpu(tensors: Tensors) -> set[str]:
    """Unquantised matrices of linear layers and experts, which vLLM keeps in a layout of their own on a CPU."""
    return {
        name
        for name, tensor in tensors.items()
        if tensor.dtype == torch.bfloat16 and tensor.dim() == 2 and "embed_tokens" not in name and "lm_head" not in name
    }


def fresh_scores(folder: Path) -> torch.Tensor:
    with Scorer(folder, max_len=64) as scorer:
        return torch.tensor([one for prompt in scorer.prompt_logprobs(PROMPTS) for one in prompt])


@pytest.mark.parametrize("name", FAMILIES)
def test_updates_serve_what_a_fresh_start_serves(tmp_path: Path, name: str):
    trainer = Trainer(*FAMILIES[name], tmp_path)
    sender = Sender(tmp_path / "updates", base=(0, trainer.model_dir))
    replica = Replica(trainer.model_dir)
    with replica.scorer:
        before = replica.scores()
        for version in (1, 2, 3):
            trainer.plain = moved(trainer.plain, version)
            update = sender.write(version, as_stream(trainer.tensors()))
            status = replica.stage(update.path)
            assert (status["state"], status["version"], status["kind"]) == ("staged", version, update.kind)
            if version == 1:
                assert torch.equal(replica.scores(), before), "staged is not served"
            replica.commit(update.path, version)
            served = replica.ask("rl_jax_read_back")
            assert served["digest"] == update.digest
            assert served["different"] == []
            assert served["num_equal"] + len(served["unreadable"]) == served["num_tensors"] == len(trainer.tensors())
            assert set(served["unreadable"]) == packed_on_cpu(trainer.tensors())
            assert replica.llm.get_weight_version() == str(version)
        after = replica.scores()
    fresh = fresh_scores(trainer.write("version-3"))
    assert torch.equal(after, fresh)
    assert (after - before).abs().max() > 1e-3


def test_a_refused_update_leaves_the_replica_serving(tmp_path: Path):
    trainer = Trainer(LLAMA_TIED, None, tmp_path)
    sender = Sender(tmp_path / "updates", base=(0, trainer.model_dir))
    replica = Replica(trainer.model_dir)
    with replica.scorer:
        before = replica.scores()
        trainer.plain = moved(trainer.plain, 1)
        first = sender.write(1, as_stream(trainer.tensors()))
        trainer.plain = moved(trainer.plain, 2)
        second = sender.write(2, as_stream(trainer.tensors()))

        status = replica.stage(second.path)
        assert status["state"] == "refused"
        assert "it starts from version 1" in status["fault"]
        for path, phase, message in (
            (second.path, "stage", "it starts from version 1"),
            (second.path, "commit", "it starts from version 1"),
            (tmp_path, "stage", "not a readable update"),
            (first.path, "later", "update_info.phase is 'later'; expected one of stage, commit"),
        ):
            replica.llm.start_weight_update()
            with pytest.raises(ValueError, match=message):
                replica.llm.update_weights({"update_info": {"path": str(path), "phase": phase}})
        assert torch.equal(replica.scores(), before)

        # The synchronous stage, as a trainer without the worker extension uses it; then a full update.
        replica.llm.start_weight_update()
        replica.llm.update_weights({"update_info": {"path": str(first.path), "phase": "stage"}})
        replica.llm.update_weights({"update_info": {"path": str(first.path), "phase": "commit"}})
        replica.llm.finish_weight_update("1")
        full = sender.update_for(None)
        assert full.kind == "full"
        assert replica.stage(full.path)["state"] == "staged"
        replica.commit(full.path, 2)
        after = replica.scores()
        assert replica.ask("rl_jax_read_back")["digest"] == second.digest
    assert torch.equal(after, fresh_scores(trainer.write("version-2")))


@pytest.mark.slow(reason="200 updates of a real engine: 105 s on a busy machine; three updates are always tested")
def test_two_hundred_deltas_do_not_drift(tmp_path: Path):
    trainer = Trainer(QWEN3_MOE_FP8, True, tmp_path)
    sender = Sender(tmp_path / "updates", base=(0, trainer.model_dir))
    replica = Replica(trainer.model_dir)
    kinds = set()
    with replica.scorer:
        for version in range(1, 201):
            trainer.plain = moved(trainer.plain, version)
            update = sender.write(version, as_stream(trainer.tensors()))
            kinds.add(update.kind)
            assert replica.stage(update.path)["state"] == "staged"
            replica.commit(update.path, version)
            served = replica.ask("rl_jax_read_back")
            assert (served["digest"], served["different"]) == (update.digest, [])
            assert set(served["unreadable"]) == packed_on_cpu(trainer.tensors())
        after = replica.scores()
    assert kinds == {"delta"}
    assert torch.equal(after, fresh_scores(trainer.write("version-200")))
