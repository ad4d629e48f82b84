"""The embedded sampler: the engine on its own thread behind the Sampler protocol (step 5 of docs/walk.md).

    event loops                          inbox (one queue)                 engine thread
      | generate_many(wave) ------------> submit, whole wave ------------> admitted between two steps
      | publish / score / pause --------> call --------------------------> runs between two steps, then its future ends
      | <--- call_soon_threadsafe ------- progress, completions <--------- after each step

The thread is the only one that touches the engine. If it fails, every pending and every later call raises SamplerLost.
Within a wave the result depends on the order of submission only: the engine sees all of it or nothing.
"""

import asyncio
import contextlib
import itertools
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TypeVar, cast

import jax
import numpy as np
from jax.sharding import Mesh

from rl_jax.engine.config import EngineConfig
from rl_jax.engine.engine import Engine, Progress
from rl_jax.engine.inbox import Abort, Call, Command, Event, Inbox, Submit, lost, post
from rl_jax.engine.programs import Programs
from rl_jax.mesh import MeshConfig, make_mesh
from rl_jax.models.architecture import Architecture
from rl_jax.models.schema import Params
from rl_jax.models.transformer import ForwardConfig
from rl_jax.sampler import Completion, Request, SamplerHealth, SamplerLost
from rl_jax.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

R = TypeVar("R")


class EmbeddedSampler:
    """See the module and the protocol in rl_jax/sampler.py.

    Args:
        weights: parameters of any float dtype on any mesh; copied, see Programs.place.
        version: policy version of `weights`.
        mesh: where it runs; default: the first local device. Only its tensor axis may be larger than 1.
        tokenizer: needed for stop strings only.
    """

    def __init__(
        self,
        arch: Architecture,
        forward: ForwardConfig,
        config: EngineConfig,
        weights: Params,
        *,
        version: int = 0,
        mesh: Mesh | None = None,
        tokenizer: Tokenizer | None = None,
    ):
        mesh = mesh or make_mesh(MeshConfig(), jax.local_devices()[:1])
        self._programs = Programs(arch, forward, config, mesh)
        self._engine = Engine(self._programs, self._programs.place(weights), version, tokenizer)
        self._config = config
        self._tickets = itertools.count()
        self._inbox = Inbox()
        self._receivers: dict[int, tuple[asyncio.AbstractEventLoop, Callable[[Event], None]]] = {}
        self._is_paused = self._is_closing = False
        self._busy_s = 0.0
        self._thread = threading.Thread(target=self._run, name="sampler-engine", daemon=True)
        self._thread.start()

    @property
    def num_compilations(self) -> int:
        """Programs compiled since the start: constant in steady state."""
        return self._programs.num_compilations

    async def generate(self, request: Request) -> Completion:
        """Write one completion. Cancelling the call aborts the request."""
        return (await self.generate_many([request]))[0]

    async def generate_many(self, requests: Sequence[Request]) -> list[Completion]:
        """Write the completions of requests that are submitted as one wave; cancelling aborts all of them.

        Raises:
            ValueError: some request can never be served; none of them is started then.
        """
        future: asyncio.Future[list[Completion]] = asyncio.get_running_loop().create_future()
        done: dict[int, Completion] = {}

        def sink(event: Event) -> None:
            if future.done():
                return
            if isinstance(event, SamplerLost):
                future.set_exception(event)
            elif event.completion:
                done[event.ticket] = event.completion
                if len(done) == len(tickets):
                    future.set_result([done[ticket] for ticket in tickets])

        if not requests:
            return []
        tickets = self._submit(requests, sink, is_streamed=False)
        try:
            return await future
        except asyncio.CancelledError:
            self._abort(tickets)
            raise

    async def stream(self, request: Request) -> AsyncIterator[Progress]:
        """Yield what each step wrote; the last Progress carries the whole completion. Leaving the loop aborts it.

        With stop strings, the tokens of the string are among those given out.
        """
        events: asyncio.Queue[Event] = asyncio.Queue()
        tickets = self._submit([request], events.put_nowait, is_streamed=True)
        event = None
        try:
            while not (isinstance(event, Progress) and event.completion):
                event = await events.get()
                if isinstance(event, SamplerLost):
                    raise event
                yield event
        finally:
            self._abort(tickets)

    async def publish(self, weights: object, version: int) -> None:
        """Sample from a copy of `weights` as policy `version` from the next decode step on; returns when that holds.

        Running requests go on with the KV that older weights wrote; their later tokens carry the new version.

        Raises:
            ValueError: the version is lower than the one being sampled, or the weights do not fit the model.
        """
        params = self._programs.place(cast(Params, weights))
        await self._call(lambda: self._engine.publish(params, version))

    async def score(self, tokens_T: np.ndarray) -> np.ndarray:
        """Return float32 [T]: log-probability of each token given those before it (temperature 1); 0 at index 0."""
        return await self._call(lambda: self._engine.score(tokens_T))

    async def pause(self) -> None:
        """Stop decoding; running requests keep their KV. Publishing, scoring and aborting go on."""
        await self._call(lambda: self._set_paused(True))

    async def resume(self) -> None:
        """Go on decoding."""
        await self._call(lambda: self._set_paused(False))

    async def warm_up(self) -> int:
        """Compile all programs but those of filtered sampling; returns how many there are."""
        return await self._call(self._engine.warm_up)

    async def health(self) -> SamplerHealth:
        """Return the state now."""
        self._inbox.check()
        engine = self._engine
        return SamplerHealth(
            version=engine.version,
            num_running=engine.num_running,
            num_waiting=engine.num_waiting,
            max_running=self._config.num_slots,
            kv_used_frac=engine.kv_used_frac,
            num_sampled_tokens=engine.num_sampled_tokens,
            num_prompt_tokens=engine.num_prompt_tokens,
            num_cached_tokens=engine.num_cached_tokens,
            busy_s=self._busy_s,
        )

    async def close(self) -> None:
        """Abort everything: pending requests end with what they have. Later calls raise SamplerLost."""
        with contextlib.suppress(SamplerLost):  # it is gone already
            await self._call(self._set_closing)
        await asyncio.to_thread(self._thread.join)

    def _submit(self, requests: Sequence[Request], sink: Callable[[Event], None], *, is_streamed: bool) -> list[int]:
        for request in requests:
            self._engine.check(request)
        tickets = [next(self._tickets) for _ in requests]
        self._inbox.put(Submit(tickets, list(requests), asyncio.get_running_loop(), sink, is_streamed))
        return tickets

    def _abort(self, tickets: list[int]) -> None:
        with contextlib.suppress(SamplerLost):  # then everything was aborted
            self._inbox.put(Abort(tickets))

    async def _call(self, function: Callable[[], R]) -> R:
        """Run a function on the engine thread between two steps."""
        future: asyncio.Future[R] = asyncio.get_running_loop().create_future()

        def sink(result: object) -> None:
            if future.done():
                return
            if isinstance(result, ValueError | SamplerLost):
                future.set_exception(result)
            else:
                future.set_result(cast(R, result))

        self._inbox.put(Call(function, asyncio.get_running_loop(), sink))
        return await future

    def _set_paused(self, is_paused: bool) -> None:
        self._is_paused = is_paused

    def _set_closing(self) -> None:
        self._is_closing = True

    def _run(self) -> None:
        """Body of the engine thread."""
        try:
            while not self._is_closing:
                self._read_inbox()
                if self._engine.has_work and not self._is_paused and not self._is_closing:
                    started = time.perf_counter()
                    progress = self._engine.step()
                    self._busy_s += time.perf_counter() - started
                    self._deliver(progress)
            self._finish_all()
            self._tell_lost(RuntimeError("it was closed"))
        except BaseException as error:  # noqa: BLE001 - whatever ends this thread, its callers must hear of it
            logger.error("the sampler's engine thread failed: %r", error)
            self._tell_lost(error)

    def _read_inbox(self) -> None:
        """Handle the commands that are there; wait for one if there is nothing else to do."""
        wait = self._is_paused or not self._engine.has_work
        while not self._is_closing and (command := self._inbox.get(wait=wait)) is not None:
            self._handle(command)
            wait = False

    def _handle(self, command: Command) -> None:
        if isinstance(command, Abort):
            for ticket in command.tickets:
                self._receivers.pop(ticket, None)
                self._engine.abort(ticket)
        elif isinstance(command, Submit):
            for ticket, request in zip(command.tickets, command.requests, strict=True):
                self._receivers[ticket] = (command.loop, command.sink)
                self._engine.add(ticket, request, command.is_streamed)
        else:
            try:
                result: object = command.function()
            except ValueError as error:  # the caller's mistake; the engine is as it was
                result = error
            post(command.loop, [lambda: command.sink(result)])

    def _deliver(self, progress: Sequence[Progress]) -> None:
        """Hand the progress of one step to its receivers, one wake-up for each event loop."""
        posts: dict[asyncio.AbstractEventLoop, list[Callable[[], None]]] = {}
        for event in progress:
            receivers = self._receivers
            loop, sink = receivers.pop(event.ticket) if event.completion else receivers[event.ticket]
            posts.setdefault(loop, []).append(lambda sink=sink, event=event: sink(event))
        for loop, calls in posts.items():
            post(loop, calls)

    def _finish_all(self) -> None:
        ended = [(ticket, self._engine.abort(ticket)) for ticket in list(self._receivers)]
        nothing_T = np.zeros(0, np.int32)
        self._deliver(
            [
                Progress(
                    ticket=ticket,
                    tokens_T=nothing_T,
                    logprobs_T=nothing_T.astype(np.float32),
                    versions_T=nothing_T,
                    completion=completion,
                )
                for ticket, completion in ended
                if completion
            ]
        )

    def _tell_lost(self, reason: BaseException) -> None:
        """Fail what is pending and what comes later."""
        left = self._inbox.close(reason)
        waiting = list(self._receivers.values())
        waiting += [(command.loop, command.sink) for command in left if isinstance(command, Submit | Call)]
        for loop, sink in waiting:
            post(loop, [lambda sink=sink: sink(lost(reason))])
