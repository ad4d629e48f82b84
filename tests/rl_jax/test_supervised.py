"""Batches of documents: every document once an epoch, in an order that depends on seed and epoch alone."""

from collections import Counter

import numpy as np
import pytest

from rl_jax.config import ConfigError
from rl_jax.envs.registry import EnvConfig
from rl_jax.packing import PackingConfig
from rl_jax.trainer.supervised import Pair, SftConfig, supervised_batches
from rl_jax.types import Batch

NUM_DOCUMENTS, PACKING = 11, PackingConfig(rows=3, seq_len=17)


def documents() -> list[Pair]:
    """Document i is [100 + i] and then i % 3 + 2 trained tokens 200 + i."""
    return [
        (np.array([100 + i] + [200 + i] * (i % 3 + 2), np.int32), np.array([False] + [True] * (i % 3 + 2)))
        for i in range(NUM_DOCUMENTS)
    ]


def seen_in(batches: list[Batch]) -> list[int]:
    """Return the documents of a step by their first tokens."""
    return sorted(int(token) - 100 for batch in batches for token in batch.tokens_BT.ravel() if 100 <= token < 200)


def seen(size: int, seed: int, step: int) -> list[int]:
    config = SftConfig(batch_size=size)
    return seen_in(supervised_batches(documents(), config, PACKING, seed, step))


@pytest.mark.parametrize("size", [1, 4, 11, 23])
def test_each_document_comes_once_before_any_comes_again(size: int) -> None:
    num_steps = NUM_DOCUMENTS  # size epochs
    counts: Counter[int] = Counter()
    for step in range(num_steps):
        counts.update(seen(size, 3, step))
        assert sum(counts.values()) == size * (step + 1)
        values = [counts[i] for i in range(NUM_DOCUMENTS)]
        assert max(values) - min(values) <= 1
    assert set(counts.values()) == {size}


def test_order_depends_on_seed_and_epoch() -> None:
    orders = [tuple(seen(1, seed, step)[0] for step in range(NUM_DOCUMENTS)) for seed in (0, 1)]
    later = tuple(seen(1, 0, NUM_DOCUMENTS + step)[0] for step in range(NUM_DOCUMENTS))
    assert len({*orders, later}) == 3
    assert orders[0] == tuple(seen(1, 0, step)[0] for step in range(NUM_DOCUMENTS))


def test_only_answers_are_trained() -> None:
    for batch in supervised_batches(documents(), SftConfig(batch_size=7), PACKING, 0, 0):
        assert (batch.targets_BT[batch.mask_BT] >= 200).all()
        assert not batch.mask_BT[batch.targets_BT < 200].any()


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"steps": -1}, "steps=-1"),
        ({"steps": 2}, "needs documents; give envs or data"),
        ({"steps": 2, "data": "x.jsonl", "envs": (EnvConfig(id="reverse_text"),)}, "not both"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"max_documents": 0}, "max_documents=0"),
    ],
)
def test_config_that_cannot_be(fields: dict, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        SftConfig(**fields)
