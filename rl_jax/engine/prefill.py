"""Pieces of prompts -> the few fixed shapes that prefill is compiled for."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import jax
import numpy as np

from rl_jax.engine.config import EngineConfig, pick
from rl_jax.engine.programs import Pieces


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Tokens to compute, at most the longest of prefill_lengths."""

    tokens_T: np.ndarray
    """int32"""
    start: int
    """Position of the first one."""
    pages: list[int]
    """Pages of the whole sequence."""
    targets_T: np.ndarray | None = None
    """int32 tokens to score, or None."""


def cut(
    config: EngineConfig, tokens_T: np.ndarray, start: int, pages: list[int], targets_T: np.ndarray | None = None
) -> list[Piece]:
    """Cut the tokens from `start` on into pieces."""
    longest = config.prefill_lengths[-1]
    return [
        Piece(
            tokens_T=tokens_T[at : at + longest],
            start=at,
            pages=pages,
            targets_T=None if targets_T is None else targets_T[at : at + longest],
        )
        for at in range(start, len(tokens_T), longest)
    ]


def calls(config: EngineConfig, pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Group pieces, in order, into calls of at most prefill_tokens padded tokens."""
    call: list[Piece] = []
    for piece in pieces:
        longest = pick(config.prefill_lengths, max(len(p.tokens_T) for p in [*call, piece]))
        if call and longest * (len(call) + 1) > config.prefill_tokens:
            yield call
            call = []
        call.append(piece)
    if call:
        yield call


def padded(config: EngineConfig, call: Sequence[Piece]) -> Pieces:
    """Return the arguments of one prefill call: one row, or as many as prefill_tokens holds."""
    length = pick(config.prefill_lengths, max(len(piece.tokens_T) for piece in call))
    num_rows = 1 if len(call) == 1 else config.prefill_tokens // length
    num_pages = config.pages_for(max(piece.start + len(piece.tokens_T) for piece in call))
    tokens_BT, targets_BT = np.zeros((2, num_rows, length), np.int32)
    starts_B, counts_B = np.zeros((2, num_rows), np.int32)
    tables_BP = np.zeros((num_rows, num_pages), np.int32)
    for row, piece in enumerate(call):
        starts_B[row], counts_B[row] = piece.start, len(piece.tokens_T)
        tokens_BT[row, : counts_B[row]] = piece.tokens_T
        pages = piece.pages[:num_pages]
        tables_BP[row, : len(pages)] = pages
        if piece.targets_T is not None:
            targets_BT[row, : counts_B[row]] = piece.targets_T
    arrays = (tokens_BT, starts_B, counts_B, tables_BP, targets_BT if call[0].targets_T is not None else None)
    return Pieces(*cast(tuple[jax.Array, ...], arrays))  # jit takes NumPy as it is
