"""Process 1, 2 ... of many: makes the calls of the trainer's half that process 0 orders, until it says the end.

Knows no run: no folder but that of the checkpoints, no sampler, no metrics.
"""

from collections.abc import Callable
from pathlib import Path
from typing import cast

from bridge.export import Format
from rl_jax.cli import shown
from rl_jax.half.half import TrainerHalf
from rl_jax.half.lead import facts_of
from rl_jax.hosts.group import Hosts
from rl_jax.hosts.line import Message
from rl_jax.hosts.parts import joined

Facts = dict[str, object]


def follow(half: TrainerHalf, hosts: Hosts) -> None:
    """Carry out orders until the end of the run."""
    calls = _calls(half, hosts)
    while (message := hosts.next_order()).kind != "end":
        hosts.done(calls[message.kind](message))


def _calls(half: TrainerHalf, hosts: Hosts) -> dict[str, Callable[[Message], Facts]]:
    def without_answer(call: Callable[[], object]) -> Callable[[Message], Facts]:
        def made(message: Message) -> Facts:
            call()
            return {}

        return made

    def opened(message: Message) -> Facts:
        folder, config_hash, word = (str(message.facts[name]) for name in ("folder", "config_hash", "word"))
        hosts.resume = f"start all of them again with: {shown(f'rl_jax.{half.entry}', '--resume', folder)}"
        half.open(Path(folder), config_hash, word)
        return {}

    def restored(message: Message) -> Facts:
        meta, _ = half.restore(cast(int, message.facts["step"]), bool(message.facts["rewinds"]))
        return {"step": meta.step}

    def begun(message: Message) -> Facts:
        half.begin()
        return {"step": half.trainer.version}

    def trained(message: Message) -> Facts:
        batches, routes_BTLA = joined(half.mesh, hosts.process_id, message)
        return facts_of(half.train(batches, routes_BTLA))

    def trained_sft(message: Message) -> Facts:
        return facts_of(half.train_sft(joined(half.mesh, hosts.process_id, message)[0]))

    def exported(message: Message) -> Facts:
        half.export(cast(Format, message.facts["fmt"]))
        return {}

    def scored(message: Message) -> Facts:
        half.score(list(message.arrays), float(cast(float, message.facts["temperature"])))
        return {}

    def saved(message: Message) -> Facts:
        half.save(b"")
        return {"step": half.trainer.version}

    return {
        "open": opened,
        "load": without_answer(half.load),
        "restore": restored,
        "warm_up": without_answer(half.warm_up),
        "end_warm_up": without_answer(half.end_warm_up),
        "begin": begun,
        "train": trained,
        "train_sft": trained_sft,
        "weights": without_answer(half.weights),
        "export": exported,
        "master_weights": without_answer(half.master_weights),
        "score": scored,
        "save": saved,
        "wait": without_answer(half.wait),
    }
