"""The running requests as columns of NumPy, one row a slot: the host's side of every decode call.

Vector operations only: nothing here costs Python time per token.
"""

from dataclasses import dataclass, field
from typing import cast

import jax
import numpy as np

from rl_jax.engine.config import EngineConfig
from rl_jax.engine.programs import Decode, Slots
from rl_jax.engine.sampling import Filters, uses_filters
from rl_jax.sampler import Completion, Request
from rl_jax.tokenizer import StreamDecoder
from rl_jax.types import FinishReason


@dataclass(kw_only=True)
class Sequence:
    """One running request."""

    ticket: int
    request: Request
    slot: int
    pages: list[int]
    swap: int
    """Number of weight swaps before its prompt was computed."""
    num_cached: int
    """Prompt tokens whose KV was there already."""
    is_streamed: bool
    """Its caller wants to see it grow."""
    decoder: StreamDecoder | None
    """Present if it has stop strings."""
    text: str = ""
    num_seen: int = 0
    """Sampled tokens that were looked at for stop strings, or given to the caller."""

    def ends_with(self, token_id: int) -> bool:
        """Return whether a stop string appears in the text with this token; call once for each token."""
        assert self.decoder is not None
        piece = self.decoder.push(token_id)
        longest = max(map(len, self.request.params.stop))
        self.text = self.text[-longest:] + piece
        return any(stop in self.text for stop in self.request.params.stop)


@dataclass
class Running:
    """State of the slots; `sequences` maps a slot in use to its Sequence, in order of admission."""

    config: EngineConfig
    sequences: dict[int, Sequence] = field(default_factory=dict)

    def __post_init__(self) -> None:
        num, length = self.config.num_slots, self.config.max_len
        self.free_slots = list(range(num))[::-1]
        self.tokens = np.zeros(num, np.int32)
        self.positions = np.zeros(num, np.int32)
        self.index = np.zeros(num, np.int32)
        self.limit = np.zeros(num, np.int32)
        self.seeds = np.zeros((num, 2), np.uint32)
        self.temperature = np.ones(num, np.float32)
        self.top_p, self.min_p = np.ones(num, np.float32), np.zeros(num, np.float32)
        self.top_k = np.zeros(num, np.int32)
        self.is_filtered = np.zeros(num, bool)
        self.stops = np.full((num, 4), -1, np.int32)
        self.tables = np.zeros((num, self.config.max_pages), np.int32)
        self.out_tokens = np.zeros((num, length), np.int32)
        self.out_logprobs = np.zeros((num, length), np.float32)
        self.out_versions = np.zeros((num, length), np.int32)

    def add(self, sequence: Sequence, limit: int) -> None:
        """Fill the slot of a sequence: its next input token is the last one of its prompt."""
        params, prompt_T, slot = sequence.request.params, sequence.request.tokens_T, sequence.slot
        self.sequences[slot] = sequence
        self.tokens[slot] = prompt_T[-1]
        self.positions[slot] = len(prompt_T) - 1
        self.index[slot], self.limit[slot] = 0, limit
        self.seeds[slot] = params.seed >> 32, params.seed & 0xFFFFFFFF
        self.temperature[slot] = params.temperature
        self.is_filtered[slot] = is_filtered = uses_filters(params)
        self.top_p[slot] = params.top_p if is_filtered else 1.0
        self.top_k[slot] = min(params.top_k, np.iinfo(np.int32).max) if is_filtered else 0
        self.min_p[slot] = params.min_p if is_filtered else 0.0
        self._set_stops(slot, params.stop_token_ids)
        self.tables[slot] = 0
        self.tables[slot, : len(sequence.pages)] = sequence.pages

    def remove(self, sequence: Sequence) -> None:
        """Free the slot of a sequence."""
        del self.sequences[sequence.slot]
        self.free_slots.append(sequence.slot)

    def slots(self) -> tuple[np.ndarray, Slots]:
        """Return which slots run, and the arguments of the next decode call, padded to a compiled size."""
        used = np.fromiter(self.sequences, np.int64, len(self.sequences))
        steps = np.minimum(self.config.decode_steps, self.limit[used] - self.index[used])
        num_pages = self.config.pages_for(int((self.positions[used] + steps).max()))
        return used, self.rows(used, self.config.slots_for(len(used)), num_pages)

    def rows(self, used: np.ndarray, num_rows: int, num_pages: int) -> Slots:
        """Return the columns of the `used` slots, then empty rows up to `num_rows`."""
        padding = num_rows - len(used)

        def padded(column: np.ndarray, filler: float = 0) -> jax.Array:
            empty = np.full((padding, *column.shape[1:]), filler, column.dtype)
            return cast(jax.Array, np.concatenate([column[used], empty]))  # jit takes NumPy as it is

        filters = None
        if self.is_filtered[used].any():
            filters = Filters(top_p_B=padded(self.top_p, 1), top_k_B=padded(self.top_k), min_p_B=padded(self.min_p))
        return Slots(
            tokens_B=padded(self.tokens),
            positions_B=padded(self.positions),
            index_B=padded(self.index),
            limit_B=padded(self.limit),
            seeds_B2=padded(self.seeds),
            temperature_B=padded(self.temperature),
            stop_BX=padded(self.stops),
            tables_BP=padded(self.tables[:, :num_pages]),
            filters=filters,
        )

    def _set_stops(self, slot: int, ids: tuple[int, ...]) -> None:
        while len(ids) > self.stops.shape[1]:  # a wider table is another compilation, so it grows in large steps
            self.stops = np.concatenate([self.stops, *(np.full_like(self.stops, -1),) * 3], axis=1)
        self.stops[slot] = -1
        self.stops[slot, : len(ids)] = ids

    def collect(self, used: np.ndarray, out: Decode, version: int) -> None:
        """Append what a decode call wrote to the rows of the `used` slots."""
        counts = np.asarray(out.count_B)[: len(used)]
        for step in range(int(counts.max())):
            is_real = counts > step
            slots = used[is_real]
            at = (slots, self.index[slots] + step)
            self.out_tokens[at] = out.tokens_TB[step, : len(used)][is_real]
            self.out_logprobs[at] = out.logprobs_TB[step, : len(used)][is_real]
            self.out_versions[at] = version
        self.index[used] += counts
        self.positions[used] += counts
        self.tokens[used] = self.out_tokens[used, self.index[used] - 1]

    def tokens_between(self, slot: int, start: int, stop: int) -> Completion:
        """Return sampled tokens start..stop-1 of a slot as an unfinished completion."""
        return Completion(
            tokens_T=self.out_tokens[slot, start:stop].copy(),
            logprobs_T=self.out_logprobs[slot, start:stop].copy(),
            versions_T=self.out_versions[slot, start:stop].copy(),
            finish=FinishReason.ABORT,
        )
