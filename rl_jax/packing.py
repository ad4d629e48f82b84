"""Rollouts or documents -> micro-batches of one fixed shape (step 10 of docs/walk.md).

One packer serves RL and SFT. Knows neither devices nor the model; the shape never changes, so nothing recompiles.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int32

from rl_jax.config import refuse
from rl_jax.types import Batch, Rollout


@dataclass(frozen=True, kw_only=True)
class PackingConfig:
    """Shape of every micro-batch."""

    rows: int = 8
    """Rows of a micro-batch; must be a multiple of the devices that share the batch."""
    seq_len: int = 512
    """Tokens of a row: the longest rollout, prompt included, must fit."""

    def __post_init__(self) -> None:
        refuse(
            [
                None if self.rows >= 1 else f"rows={self.rows}: must be at least 1",
                None if self.seq_len >= 2 else f"seq_len={self.seq_len}: must be at least 2 (a token and its target)",
            ]
        )


def pack(rollouts: Sequence[Rollout], advantages: Sequence[float] | np.ndarray, config: PackingConfig) -> list[Batch]:
    """Pack the rollouts of a step, first-fit-decreasing, into micro-batches of [config.rows, config.seq_len].

    Same input, same output. Rows come longest rollout first, so the rows of one micro-batch cost about the same; the
    last micro-batch is padded with empty rows. `Batch.rollouts_BT` holds indices into `rollouts`.

    Raises:
        ValueError: a rollout does not fit in a row, has arrays of different lengths, a sampled first token, or a
            log-probability or advantage that is not finite.
    """
    if len(rollouts) != len(advantages):
        raise ValueError(f"{len(rollouts)} rollouts but {len(advantages)} advantages: expected one for each")
    return _pack([_of_rollout(r, float(a)) for r, a in zip(rollouts, advantages, strict=True)], config)


def pack_documents(documents: Sequence[tuple[np.ndarray, np.ndarray]], config: PackingConfig) -> list[Batch]:
    """Pack (tokens_T, trained_T) pairs for supervised training; log-probabilities and advantages are 0.

    tokens_T is int32; trained_T is bool and marks the tokens to be predicted. The first has nothing before it, so its mark is ignored.

    Raises:
        ValueError: a document does not fit in a row, or its two arrays have different lengths.
    """
    return _pack([_of_document(i, *document) for i, document in enumerate(documents)], config)


def pack_routes(batches: Sequence[Batch], rollouts: Sequence[Rollout]) -> list[Int32[np.ndarray, "B T L A"]]:
    """Place the sampler's expert choices beside the tokens that they were made for: one array for each batch.

    -1 = missing: padding, the last token of a rollout (it never went through the sampler), a rollout without routes.

    Raises:
        ValueError: no rollout carries routes, or routes do not cover all tokens but the last, or differ in layers or
            experts per token.
    """
    shapes_LA = {r.routed_experts_TLA.shape[1:] for r in rollouts if r.routed_experts_TLA is not None}
    if len(shapes_LA) != 1:
        raise ValueError(
            f"routed experts have (layers, experts per token) in {sorted(shapes_LA)}: expected exactly one shape; "
            "sample with return_routed_experts from one model"
        )
    (shape_LA,) = shapes_LA
    return [_place_routes(batch, rollouts, shape_LA) for batch in batches]


def fill_frac(batches: Sequence[Batch]) -> float:
    """Return the share of slots that hold a token; 0 for no batches."""
    num_slots = sum(batch.tokens_BT.size for batch in batches)
    return sum(int((batch.segments_BT > 0).sum()) for batch in batches) / max(num_slots, 1)


@dataclass(frozen=True, kw_only=True)
class _Sequence:
    """What the packer needs of a rollout or a document."""

    name: str
    tokens_T: np.ndarray
    trained_T: np.ndarray
    logprobs_T: np.ndarray
    advantage: float = 0.0
    temperature: float = 1.0


def _of_rollout(rollout: Rollout, advantage: float) -> _Sequence:
    name = f"rollout {rollout.rollout_id}"
    sampled_T, logprobs_T = rollout.sampled_T, rollout.logprobs_T
    if not len(rollout.tokens_T) == len(sampled_T) == len(logprobs_T):
        raise ValueError(
            f"{name}: tokens_T, sampled_T and logprobs_T have lengths {len(rollout.tokens_T)}, {len(sampled_T)} and "
            f"{len(logprobs_T)}: expected equal"
        )
    if sampled_T[:1].any():
        raise ValueError(f"{name}: sampled_T[0] is True: nothing comes before token 0, so it cannot be trained")
    if not (np.isfinite(logprobs_T[sampled_T]).all() and np.isfinite(advantage)):
        raise ValueError(
            f"{name}: advantage {advantage} and sampler log-probabilities {logprobs_T[sampled_T]} must be finite"
        )
    return _Sequence(
        name=name,
        tokens_T=rollout.tokens_T,
        trained_T=sampled_T,
        logprobs_T=logprobs_T,
        advantage=advantage,
        temperature=rollout.temperature or 1.0,  # greedy tokens carry log-probabilities of temperature 1
    )


def _of_document(index: int, tokens_T: np.ndarray, trained_T: np.ndarray) -> _Sequence:
    if len(tokens_T) != len(trained_T):
        raise ValueError(f"document {index}: {len(tokens_T)} tokens but {len(trained_T)} marks: expected equal")
    zeros_T = np.zeros(len(tokens_T), np.float32)
    return _Sequence(name=f"document {index}", tokens_T=tokens_T, trained_T=trained_T, logprobs_T=zeros_T)


def _pack(sequences: Sequence[_Sequence], config: PackingConfig) -> list[Batch]:
    rows = _first_fit_decreasing(sequences, config.seq_len)
    starts = range(0, len(rows), config.rows)
    return [_fill(rows[start : start + config.rows], sequences, config) for start in starts]


def _first_fit_decreasing(sequences: Sequence[_Sequence], seq_len: int) -> list[list[int]]:
    """Return the indices of the sequences of each row."""
    for sequence in sequences:
        if not 0 < len(sequence.tokens_T) <= seq_len:
            raise ValueError(
                f"{sequence.name} has {len(sequence.tokens_T)} tokens: expected 1 to seq_len={seq_len}; raise seq_len "
                "or bound prompt and completion so that they fit together"
            )
    rows: list[list[int]] = []
    free_R = np.zeros(len(sequences), np.int64)
    for index in sorted(range(len(sequences)), key=lambda i: -len(sequences[i].tokens_T)):
        length = len(sequences[index].tokens_T)
        fits_R = free_R[: len(rows)] >= length
        row = int(fits_R.argmax()) if fits_R.any() else len(rows)
        if row == len(rows):
            rows.append([])
            free_R[row] = seq_len
        rows[row].append(index)
        free_R[row] -= length
    return rows


def _fill(rows: Sequence[Sequence[int]], sequences: Sequence[_Sequence], config: PackingConfig) -> Batch:
    """Write the rows of one micro-batch; everything about a target sits one slot before its token."""
    shape = (config.rows, config.seq_len)
    batch = Batch(
        tokens_BT=np.zeros(shape, np.int32),
        targets_BT=np.zeros(shape, np.int32),
        positions_BT=np.zeros(shape, np.int32),
        segments_BT=np.zeros(shape, np.int32),
        mask_BT=np.zeros(shape, np.bool_),
        logprobs_BT=np.zeros(shape, np.float32),
        advantages_BT=np.zeros(shape, np.float32),
        temperatures_BT=np.ones(shape, np.float32),
        rollouts_BT=np.full(shape, -1, np.int32),
    )
    for b, row in enumerate(rows):
        start = 0
        for segment, index in enumerate(row, start=1):
            sequence = sequences[index]
            end = start + len(sequence.tokens_T)
            whole, before_target = np.s_[b, start:end], np.s_[b, start : end - 1]
            batch.tokens_BT[whole] = sequence.tokens_T
            batch.positions_BT[whole] = np.arange(end - start)
            batch.segments_BT[whole] = segment
            batch.rollouts_BT[whole] = index
            trained_T = sequence.trained_T[1:]
            batch.targets_BT[before_target] = sequence.tokens_T[1:]
            batch.mask_BT[before_target] = trained_T
            batch.logprobs_BT[before_target] = np.where(trained_T, sequence.logprobs_T[1:], 0)
            batch.advantages_BT[before_target] = np.where(trained_T, sequence.advantage, 0)
            batch.temperatures_BT[before_target] = np.where(trained_T, sequence.temperature, 1)
            start = end
    return batch


def _place_routes(batch: Batch, rollouts: Sequence[Rollout], shape_LA: tuple[int, ...]) -> np.ndarray:
    routes_BTLA = np.full((*batch.tokens_BT.shape, *shape_LA), -1, np.int32)
    for b, start in np.argwhere((batch.rollouts_BT >= 0) & (batch.positions_BT == 0)):
        rollout = rollouts[int(batch.rollouts_BT[b, start])]
        routes_TLA, num_tokens = rollout.routed_experts_TLA, len(rollout.tokens_T)
        if routes_TLA is None:
            continue
        if not num_tokens - 1 <= len(routes_TLA) <= num_tokens:
            raise ValueError(
                f"rollout {rollout.rollout_id}: routed experts for {len(routes_TLA)} tokens of {num_tokens}: expected "
                "all but the last, or all"
            )
        routes_BTLA[b, start : start + len(routes_TLA)] = routes_TLA
    return routes_BTLA
