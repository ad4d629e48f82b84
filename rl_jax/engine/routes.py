"""The experts that every cached token went through, on the host, page by page beside the KV cache.

They are shared, copied and found again with the pages of a prefix, so a cached prompt still knows its experts.
"""

import numpy as np

from rl_jax.engine.config import EngineConfig
from rl_jax.engine.prefill import Piece
from rl_jax.engine.programs import Decode
from rl_jax.models.architecture import Architecture


class Routes:
    """uint16 [page, row of the page, layer, active expert]."""

    def __init__(self, arch: Architecture, config: EngineConfig):
        if not arch.num_experts:
            raise ValueError("routed_experts=True: the model has no experts; set it to false")
        shape = (config.total_pages, config.page_size, arch.num_layers, arch.num_active_experts)
        self._experts_PMLA = np.zeros(shape, np.uint16)
        self._size = config.page_size

    def keep_pieces(self, call: list[Piece], experts_LBTA: np.ndarray) -> None:
        """Keep what a prefill call returned."""
        for row, piece in enumerate(call):
            at_T = np.arange(piece.start, piece.start + len(piece.tokens_T))
            pages_T = np.array(piece.pages)[at_T // self._size]
            self._experts_PMLA[pages_T, at_T % self._size] = experts_LBTA[:, row, : len(at_T)].swapaxes(0, 1)

    def keep_steps(self, tables_BP: np.ndarray, positions_B: np.ndarray, out: Decode) -> None:
        """Keep what a decode call returned; `positions_B` are those of its first inputs, without the empty rows."""
        assert out.experts_TLBA is not None
        rows_B = np.arange(len(positions_B))
        for step in range(int(out.count_B.max())):
            real_B = rows_B[out.count_B[: len(rows_B)] > step]
            at_B = positions_B[real_B] + step
            pages_B = tables_BP[real_B, at_B // self._size]
            self._experts_PMLA[pages_B, at_B % self._size] = out.experts_TLBA[step].swapaxes(0, 1)[real_B]

    def copy_pages(self, source_C: np.ndarray, target_C: np.ndarray) -> None:
        """Follow a copy of KV pages."""
        self._experts_PMLA[target_C] = self._experts_PMLA[source_C]

    def of(self, pages: list[int], num_tokens: int) -> np.ndarray:
        """Return uint16 [T, L, A] of the first tokens of a sequence."""
        at_T = np.arange(num_tokens)
        return self._experts_PMLA[np.array(pages)[at_T // self._size], at_T % self._size]
