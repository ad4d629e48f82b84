"""The requests being sampled: each can be followed, aborted or held back by its id. Knows no HTTP and no text.

sample --> gate --> sampler.stream --> Piece, Piece ... Piece with its finish
            |            |
            |            +-- abort, or a caller that leaves: the sampler's request is cancelled, its slot is free
            +-- closed by pause: what comes later waits here until resume
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

from rl_jax.http.errors import Refused
from rl_jax.sampler import Completion, Request, Sampler, SamplerLost
from rl_jax.types import FinishReason

PauseMode = Literal["abort", "wait", "keep"]


class Progress(Protocol):
    """What a sampler wrote for a request since it last told."""

    @property
    def tokens_T(self) -> np.ndarray:
        """int32, the tokens sampled since the last Progress."""
        ...

    @property
    def completion(self) -> Completion | None:
        """The whole completion, in the last Progress of a request."""
        ...

    @property
    def logprobs_T(self) -> np.ndarray:
        """float32, for each token."""
        ...

    @property
    def versions_T(self) -> np.ndarray:
        """int32, for each token."""
        ...


class StreamingSampler(Sampler, Protocol):
    """A sampler that tells what it writes while it writes."""

    def stream(self, request: Request) -> AsyncIterator[Progress]:
        """Yield what is written; the last Progress carries the completion. Cancelling the iteration aborts it."""
        ...


@dataclass(frozen=True, kw_only=True)
class Piece:
    """New tokens of one choice of a request, and at its end why it ended.

    Example: Piece(index=1, tokens_T=[98, 259], logprobs_T=[-0.2, -0.1], versions_T=[4, 4], finish=FinishReason.STOP)
    """

    index: int
    """Which of the requests that were sampled together."""
    tokens_T: np.ndarray
    logprobs_T: np.ndarray
    versions_T: np.ndarray
    finish: FinishReason | None = None
    num_cached_tokens: int = 0
    """Of the prompt; known at the end."""
    routed_experts_TLA: np.ndarray | None = None
    """Of prompt and completion; known at the end."""


@dataclass(frozen=True)
class _Flight:
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    events: asyncio.Queue[Piece | asyncio.Task[None]] = field(default_factory=asyncio.Queue)


class InFlight:
    """See the module. Lives on one event loop."""

    def __init__(self, sampler: StreamingSampler):
        self._sampler = sampler
        self._flights: dict[str, _Flight] = {}
        self._sampling: set[asyncio.Task[None]] = set()  # those beyond the gate
        self._gate = asyncio.Event()
        self._gate.set()
        self._is_closing = False

    @property
    def is_paused(self) -> bool:
        """Whether requests wait for `resume`."""
        return not self._gate.is_set()

    async def sample(self, request_id: str, requests: Sequence[Request]) -> AsyncGenerator[Piece, None]:
        """Yield the pieces of all `requests` as they come; index i is requests[i]. Closing the generator aborts them.

        Raises:
            Refused: the id is in use, or the sampler refuses a request.
            SamplerLost: the sampler is gone, or the server is stopping.
        """
        if self._is_closing:
            raise SamplerLost("the server is stopping")
        if request_id in self._flights:
            raise Refused(f"request_id={request_id!r}: is being sampled; expected an id that is not in use", status=409)
        flight = self._flights[request_id] = _Flight()
        try:
            for index, request in enumerate(requests):
                task = asyncio.create_task(self._follow(index, request, flight.events), name=str(index))
                task.add_done_callback(flight.events.put_nowait)
                flight.tasks.append(task)
            async for piece in _pieces(flight):
                yield piece
        finally:
            del self._flights[request_id]
            for task in flight.tasks:
                task.cancel()
            await asyncio.gather(*flight.tasks, return_exceptions=True)

    def abort(self, request_ids: Iterable[str]) -> int:
        """End requests with what they have; returns how many of the ids were being sampled."""
        flights = [self._flights[request_id] for request_id in set(request_ids) if request_id in self._flights]
        for flight in flights:
            for task in flight.tasks:
                task.cancel()
        return len(flights)

    async def pause(self, mode: PauseMode) -> None:
        """Hold back what comes later; end what runs (abort), let it finish (wait), or freeze it (keep)."""
        was_paused = self.is_paused
        if mode == "wait" and was_paused and self._sampling:
            raise Refused(
                f"mode=wait: {len(self._sampling)} frozen requests cannot finish; resume first, or use mode=abort",
                status=409,
            )
        self._gate.clear()
        if mode == "abort":
            self.abort(list(self._flights))
        if mode == "wait" and self._sampling:
            await asyncio.wait(set(self._sampling))
        if self.is_paused:  # else somebody resumed while this waited
            await self._sampler.pause()

    async def resume(self) -> None:
        """Go on with everything."""
        await self._sampler.resume()
        self._gate.set()

    def close(self) -> None:
        """End everything with what it has, and take no more."""
        self._is_closing = True
        self.abort(list(self._flights))

    async def _follow(self, index: int, request: Request, events: asyncio.Queue) -> None:
        await self._gate.wait()
        task = asyncio.current_task()
        assert task is not None
        self._sampling.add(task)
        num_told = 0
        try:
            async for progress in self._sampler.stream(request):
                if not np.isfinite(progress.logprobs_T).all():
                    raise SamplerLost(f"{request.request_id} got the log-probabilities {progress.logprobs_T}")
                events.put_nowait(_piece(index, progress, num_told))
                num_told += len(progress.tokens_T)
        except ValueError as error:  # by the Sampler protocol: a request that can never be served
            raise Refused(str(error)) from error
        finally:
            self._sampling.discard(task)


async def collect(pieces: AsyncGenerator[Piece, None], num_requests: int) -> list[Completion]:
    """Return the completions that all pieces together make."""
    parts: list[list[Piece]] = [[] for _ in range(num_requests)]
    async for piece in pieces:
        parts[piece.index].append(piece)
    return [joined(pieces_of_one) for pieces_of_one in parts]


async def _pieces(flight: _Flight) -> AsyncIterator[Piece]:
    """Yield pieces until every task has ended; each request gets exactly one finish, or its task's error is raised."""
    unfinished = set(range(len(flight.tasks)))
    for _ in flight.tasks:
        while not isinstance(event := await flight.events.get(), asyncio.Task):
            unfinished -= {event.index} if event.finish else set()
            yield event
        index = int(event.get_name())
        if event.cancelled() and index in unfinished:
            unfinished.remove(index)
            yield _aborted(index)
        elif not event.cancelled():
            event.result()
            if index in unfinished:
                raise SamplerLost("it stopped before the completion was finished")


def _piece(index: int, progress: Progress, num_told: int) -> Piece:
    whole = progress.completion
    if whole is None:
        return Piece(
            index=index, tokens_T=progress.tokens_T, logprobs_T=progress.logprobs_T, versions_T=progress.versions_T
        )
    return Piece(
        index=index,
        tokens_T=whole.tokens_T[num_told:],
        logprobs_T=whole.logprobs_T[num_told:],
        versions_T=whole.versions_T[num_told:],
        finish=whole.finish,
        num_cached_tokens=whole.num_cached_tokens,
        routed_experts_TLA=whole.routed_experts_TLA,
    )


def _aborted(index: int) -> Piece:
    nothing_T = np.zeros(0, np.int32)
    return Piece(
        index=index,
        tokens_T=nothing_T,
        logprobs_T=nothing_T.astype(np.float32),
        versions_T=nothing_T,
        finish=FinishReason.ABORT,
    )


def joined(pieces: Sequence[Piece]) -> Completion:
    last = pieces[-1]
    assert last.finish is not None
    return Completion(
        tokens_T=np.concatenate([piece.tokens_T for piece in pieces]),
        logprobs_T=np.concatenate([piece.logprobs_T for piece in pieces]),
        versions_T=np.concatenate([piece.versions_T for piece in pieces]),
        finish=last.finish,
        num_cached_tokens=last.num_cached_tokens,
        routed_experts_TLA=last.routed_experts_TLA,
    )
