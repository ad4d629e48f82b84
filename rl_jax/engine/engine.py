"""The engine: admits requests to slots and pages, computes prompts, decodes, hands out what was written.

Synchronous and single-threaded; a deterministic function of the order of its calls. rl_jax/engine/sampler.py runs it on a
thread. The life of a request:

    add -> waiting -> admitted (slot, all pages it can ever need, prompt computed or found) -> decoded -> Progress
             |  first come, first served: it waits until a slot and its pages are free, so nothing is ever preempted
             +-- abort, at any time

The KV of a prompt but its last token is computed once for all requests with this prompt: full pages are shared, the last,
partial page is copied. The last token is the first input of decoding. A publish between two steps changes the weights of
later steps; running requests keep the KV that older weights wrote, new ones never see it.
"""

import itertools
from collections import deque
from dataclasses import dataclass, replace

import numpy as np

from rl_jax.engine.config import rising
from rl_jax.engine.pages import PagePool, prefix_keys
from rl_jax.engine.prefill import Piece, calls, cut, padded
from rl_jax.engine.programs import Decode, Programs
from rl_jax.engine.routes import Routes
from rl_jax.engine.running import Running, Sequence
from rl_jax.engine.sampling import check_params
from rl_jax.models.schema import Params
from rl_jax.sampler import Completion, Request
from rl_jax.tokenizer import StreamDecoder, Tokenizer
from rl_jax.types import FinishReason


@dataclass(frozen=True, kw_only=True)
class Progress:
    """What one step wrote for one request."""

    ticket: int
    tokens_T: np.ndarray
    logprobs_T: np.ndarray
    versions_T: np.ndarray
    completion: Completion | None
    """The whole completion, once it is finished."""


@dataclass(frozen=True)
class _Waiting:
    ticket: int
    request: Request
    is_streamed: bool


class Engine:
    """See the module. Weights come from programs.place."""

    def __init__(self, programs: Programs, params: Params, version: int = 0, tokenizer: Tokenizer | None = None):
        arch, config = programs.arch, programs.config
        if config.max_len > arch.max_positions:
            raise ValueError(f"max_len={config.max_len}: the model has positions for {arch.max_positions} tokens only")
        self.version = version
        self.num_sampled_tokens = self.num_prompt_tokens = self.num_cached_tokens = 0
        self._programs, self._config, self._params, self._tokenizer = programs, config, params, tokenizer
        self._num_swaps = 0  # names the weights in prefix keys: one version may be published twice
        self._running = Running(config)
        self._waiting: deque[_Waiting] = deque()
        self._pool = PagePool(config.total_pages)
        self._score_pages = self._pool.take(config.max_pages)  # scoring never waits for running requests
        self._routes = Routes(arch, config) if config.routed_experts else None

    @property
    def num_running(self) -> int:
        """Requests in slots."""
        return len(self._running.sequences)

    @property
    def num_waiting(self) -> int:
        """Requests that no slot or no pages were free for yet."""
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._waiting or self._running.sequences)

    @property
    def kv_used_frac(self) -> float:
        """Share of the pages for requests that are held by running ones."""
        reserved = len(self._score_pages)
        return (self._pool.num_held - reserved) / (self._pool.num_usable - reserved)

    def check(self, request: Request) -> None:
        """Raise ValueError if this engine can never serve the request; reads only what never changes."""
        prompt_T, params = request.tokens_T, request.params
        check_params(params)
        self._check_tokens(f"request {request.request_id}", prompt_T)
        if len(prompt_T) >= self._config.max_len:
            raise ValueError(
                f"request {request.request_id}: its prompt has {len(prompt_T)} tokens, the context "
                f"max_len={self._config.max_len}, which leaves no room for a completion; shorten the prompt"
            )
        if params.stop and self._tokenizer is None:
            raise ValueError(f"request {request.request_id}: stop={params.stop} needs a sampler with a tokenizer")
        if params.return_routed_experts and not self._config.routed_experts:
            raise ValueError(
                f"request {request.request_id}: return_routed_experts needs a sampler with routed_experts=true"
            )

    def add(self, ticket: int, request: Request, is_streamed: bool = False) -> None:
        """Queue a request that passed `check`, under a ticket that is unique among the unfinished ones."""
        self._waiting.append(_Waiting(ticket, request, is_streamed))

    def abort(self, ticket: int) -> Completion | None:
        """End a request now; returns what it has, or None if it is not here any more."""
        for waiting in self._waiting:
            if waiting.ticket == ticket:
                self._waiting.remove(waiting)
                nothing_T = np.zeros(0, np.int32)
                return Completion(
                    tokens_T=nothing_T,
                    logprobs_T=nothing_T.astype(np.float32),
                    versions_T=nothing_T,
                    finish=FinishReason.ABORT,
                )
        for sequence in self._running.sequences.values():
            if sequence.ticket == ticket:
                return self._finish(sequence, FinishReason.ABORT)
        return None

    def publish(self, params: Params, version: int) -> None:
        """Sample from `params` as policy `version` from the next step on, and forget every cached prefix."""
        if version < self.version:
            raise ValueError(
                f"version {version} is older than {self.version}, which is being sampled; versions only rise"
            )
        self._params, self.version = params, version
        self._num_swaps += 1
        self._pool.forget_all()

    def step(self) -> list[Progress]:
        """Admit what fits, decode config.decode_steps tokens for every running request, return what is to be told."""
        self._admit()
        if not self._running.sequences:
            return []
        used, slots = self._running.slots()
        out = self._programs.decode(self._params, slots)
        self._check_finite(out, used)
        if self._routes:
            self._routes.keep_steps(self._running.tables[used], self._running.positions[used], out)
        self._running.collect(used, out, self.version)
        self.num_sampled_tokens += int(out.count_B.sum())
        is_stopped_B = out.is_stopped_B[: len(used)]
        is_over_B = is_stopped_B | (self._running.index[used] >= self._running.limit[used])
        progress = []
        for row, sequence in enumerate(list(self._running.sequences.values())):
            if sequence.decoder or sequence.is_streamed or is_over_B[row]:
                finish = FinishReason.STOP if is_stopped_B[row] else FinishReason.LENGTH
                progress.append(self._look_at(sequence, finish if is_over_B[row] else None))
        return [p for p in progress if p]

    def score(self, tokens_T: np.ndarray) -> np.ndarray:
        """Return float32 [T]: log-probability of each token given those before it, at temperature 1; 0 at index 0.

        Computed by the prefill of the sampler, through its paged cache.
        """
        self._check_tokens("score", tokens_T)
        if len(tokens_T) > self._config.max_len:
            raise ValueError(f"score: {len(tokens_T)} tokens, at most max_len={self._config.max_len} fit")
        logprobs_T = np.zeros(len(tokens_T), np.float32)
        pieces = cut(self._config, tokens_T[:-1], 0, self._score_pages, tokens_T[1:])
        for call in calls(self._config, pieces):
            _, logprobs_BT = self._programs.prefill(self._params, padded(self._config, call))
            assert logprobs_BT is not None
            for row, piece in enumerate(call):
                end = piece.start + len(piece.tokens_T)
                logprobs_T[piece.start + 1 : end + 1] = logprobs_BT[row, : len(piece.tokens_T)]
        return logprobs_T

    def warm_up(self) -> int:
        """Compile every program for every bucket but those of filtered sampling; returns num_compilations."""
        config, scratch, nobody = self._config, np.zeros(1, np.int32), np.zeros(0, np.int64)
        for num_slots in config.slot_buckets or rising(1, config.num_slots, 4):
            for num_pages in config.page_buckets:
                self._programs.decode(self._params, self._running.rows(nobody, num_slots, num_pages))
            copies = np.zeros(num_slots, np.int32)
            self._programs.copy_pages(copies, copies)
        for length, num_pages in itertools.product(config.prefill_lengths, config.page_buckets):
            end = min(num_pages * config.page_size, config.max_len)
            piece = Piece(tokens_T=scratch.repeat(min(length, end)), start=max(0, end - length), pages=[])
            for num_rows in {1, min(2, config.prefill_tokens // length)}:
                self._programs.prefill(self._params, padded(config, [piece] * num_rows))
        return self._programs.num_compilations

    def _check_tokens(self, what: str, tokens_T: np.ndarray) -> None:
        vocab = self._programs.arch.vocab_size
        if tokens_T.ndim != 1 or not len(tokens_T):
            raise ValueError(f"{what}: tokens have shape {tokens_T.shape}, expected [T] with at least one")
        if tokens_T.min() < 0 or tokens_T.max() >= vocab:
            raise ValueError(f"{what}: token ids span {tokens_T.min()}..{tokens_T.max()}, the model has 0..{vocab - 1}")

    def _check_finite(self, out: Decode, used: np.ndarray) -> None:
        step_TB = np.arange(self._config.decode_steps)[:, None]
        bad_TB = (step_TB < np.asarray(out.count_B)[None, :]) & ~np.isfinite(out.logprobs_TB)
        bad_B = np.any(bad_TB, axis=0)[: len(used)]
        if bad_B.any():
            ids = [self._running.sequences[slot].request.request_id for slot in used[bad_B].tolist()]
            raise FloatingPointError(f"non-finite log-probability under weights {self.version}, requests {ids}")

    def _admit(self) -> None:
        """Move waiting requests to slots while there is room, and compute what is missing of their prompts."""
        pieces: list[Piece] = []
        copies: list[tuple[int, int]] = []
        while self._waiting and self._running.free_slots:
            if not self._place(self._waiting[0], pieces, copies):
                break
            self._waiting.popleft()
        self._run_pieces(pieces)
        if copies:
            # Sources may be pages that the pieces above have just filled.
            source_C, target_C = np.array(copies, np.int32).T
            self._copy(source_C, target_C)
            self._pool.release(source_C.tolist())

    def _place(self, waiting: _Waiting, pieces: list[Piece], copies: list[tuple[int, int]]) -> bool:
        """Give a request its slot and pages; returns False if too few are available."""
        request, size = waiting.request, self._config.page_size
        prefix_T = np.asarray(request.tokens_T[:-1], np.int32)
        limit = min(request.params.max_tokens, self._config.max_len - len(request.tokens_T))
        num_full, has_tail = len(prefix_T) // size, len(prefix_T) % size > 0
        keys = prefix_keys(self._num_swaps, prefix_T, size)
        shared = self._pool.find_all(keys[:num_full])
        self._pool.hold(shared)
        num_needed = -(-(len(prefix_T) + limit) // size) - len(shared)
        if num_needed > self._pool.num_available:
            self._pool.release(shared)
            return False
        tail = self._pool.find(keys[-1]) if has_tail and len(shared) == num_full else None
        if tail is not None:
            self._pool.hold([tail])
            if num_needed > self._pool.num_available:  # the tail was the page that is lacking: compute it again
                self._pool.release([tail])
                tail = None
        pages = shared + self._pool.take(num_needed)
        num_cached = len(shared) * size
        if tail is not None:
            copies.append((tail, pages[num_full]))
            num_cached = len(prefix_T)
        pieces.extend(cut(self._config, prefix_T, num_cached, pages))
        for key, page in zip(keys, pages, strict=False):
            self._pool.remember(key, page)
        self._start(waiting, pages, num_cached, limit)
        return True

    def _start(self, waiting: _Waiting, pages: list[int], num_cached: int, limit: int) -> None:
        request = waiting.request
        decoder = StreamDecoder(self._tokenizer) if request.params.stop and self._tokenizer else None
        sequence = Sequence(
            ticket=waiting.ticket,
            request=request,
            slot=self._running.free_slots.pop(),
            pages=pages,
            swap=self._num_swaps,
            num_cached=num_cached,
            is_streamed=waiting.is_streamed,
            decoder=decoder,
        )
        self._running.add(sequence, limit)
        self.num_prompt_tokens += len(request.tokens_T)
        self.num_cached_tokens += num_cached

    def _run_pieces(self, pieces: list[Piece]) -> None:
        for call in calls(self._config, pieces):
            experts_LBTA, _ = self._programs.prefill(self._params, padded(self._config, call))
            if self._routes and experts_LBTA is not None:
                self._routes.keep_pieces(call, experts_LBTA)

    def _copy(self, source_C: np.ndarray, target_C: np.ndarray) -> None:
        count = len(source_C)
        padding = self._config.slots_for(count) - count
        pairs = np.pad(np.stack([source_C, target_C]), ((0, 0), (0, padding)))
        self._programs.copy_pages(pairs[0], pairs[1])
        if self._routes:
            self._routes.copy_pages(source_C, target_C)

    def _look_at(self, sequence: Sequence, finish: FinishReason | None) -> Progress | None:
        """Search what a step wrote for stop strings, and finish the request if it is over."""
        running, slot, start = self._running, sequence.slot, sequence.num_seen
        end = int(running.index[slot])
        if sequence.decoder:
            for i in range(start, end):
                if sequence.ends_with(int(running.out_tokens[slot, i])):
                    end, finish = i + 1, FinishReason.STOP
                    running.index[slot] = end
                    break
        sequence.num_seen = end
        written = running.tokens_between(slot, start, end)
        completion = self._finish(sequence, finish) if finish else None
        if completion is None and not sequence.is_streamed:
            return None
        return Progress(
            ticket=sequence.ticket,
            tokens_T=written.tokens_T,
            logprobs_T=written.logprobs_T,
            versions_T=written.versions_T,
            completion=completion,
        )

    def _finish(self, sequence: Sequence, finish: FinishReason) -> Completion:
        """Free the slot and the pages of a request; its full pages stay known as a prefix of what may follow."""
        count = int(self._running.index[sequence.slot])
        completion = self._running.tokens_between(sequence.slot, 0, count)
        inputs_T = np.concatenate([sequence.request.tokens_T, completion.tokens_T])[:-1]
        experts_TLA = None
        size = self._config.page_size
        if self._routes and sequence.request.params.return_routed_experts:
            experts_TLA = self._routes.of(sequence.pages, len(inputs_T))
        if sequence.swap == self._num_swaps:
            whole_T = inputs_T[: len(inputs_T) // size * size]
            for key, page in zip(prefix_keys(self._num_swaps, whole_T, size), sequence.pages, strict=False):
                self._pool.remember(key, page)
        self._running.remove(sequence)
        self._pool.release(sequence.pages)
        return replace(completion, finish=finish, num_cached_tokens=sequence.num_cached, routed_experts_TLA=experts_TLA)
