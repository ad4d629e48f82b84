"""One replica of a simulated fleet: its sequences share decode steps, so all of them get tokens at one rate.

Between two events nothing joins or leaves, and a step of n sequences with c tokens of context takes base(n) + token_s * c
seconds, where c grows by n a step. So s steps take (base + token_s * c) * s + token_s * n * s^2 / 2 seconds: exact, and
no step is ever simulated by itself. What is prefilled between decode steps stops them for its seconds ("debt").
"""

import heapq
import math
from collections import deque
from dataclasses import dataclass
from typing import Protocol


class SpeedModel(Protocol):
    """Seconds of a decode step, and of a prefill."""

    @property
    def token_s(self) -> float:
        """Seconds that a token of context adds to a step."""
        ...

    def base_s(self, num_running: int) -> float:
        """Return the seconds of a step without context."""
        ...

    def prefill_s(self, new_tokens: int, context_tokens: float) -> float:
        """Return the seconds to compute tokens behind a context."""
        ...


@dataclass(kw_only=True, eq=False)
class Request:
    """One turn on its way through a replica."""

    rollout: int
    """Index of its rollout."""
    new_tokens: int
    """Tokens to prefill."""
    context: int
    """Tokens in the cache before them."""
    sampled_tokens: int
    """Steps to decode."""

    @property
    def reserved(self) -> int:
        """Tokens of cache that it needs at its end: it is admitted when they are free, and so never preempted."""
        return self.context + self.new_tokens + self.sampled_tokens


class Replica:
    """See the module. Times only go forward: `advance` before anything else at a new time."""

    def __init__(self, speed: SpeedModel, *, slots: int, kv_tokens: int, prefills: bool):
        """`prefills`: it computes prompts itself, between decode steps; else they come computed."""
        self._speed = speed
        self._slots = slots
        self._kv_tokens = kv_tokens
        self._prefills = prefills
        self._running: list[tuple[float, int, Request]] = []
        self._waiting: deque[Request] = deque()
        self._order = 0
        self._now_s = 0.0
        self._steps = 0.0
        self._debt_s = 0.0
        self._context = 0.0
        self._reserved = 0
        self.is_paused = False
        self.stamp = 0
        """Rises with every change: an event that was planned under another stamp is void."""
        self.load = 0
        """Rollouts that were sent here and have not ended."""
        self.busy_s = 0.0
        """Seconds with a sequence running and no pause."""
        self.running_s = 0.0
        """Integral of the running sequences over time."""
        self.num_tokens = 0

    @property
    def num_running(self) -> int:
        """Sequences that decode, or stand still in a pause."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for a slot or for cache."""
        return len(self._waiting)

    def advance(self, now_s: float) -> None:
        """Let time pass up to `now_s`; nothing may end before it."""
        passed_s = now_s - self._now_s
        self._now_s = now_s
        self.running_s += passed_s * len(self._running)
        if self.is_paused or not self._running:
            return
        self.busy_s += passed_s
        paid_s = min(self._debt_s, passed_s)
        self._debt_s -= paid_s
        self._step(self._steps_in(passed_s - paid_s))

    def submit(self, request: Request) -> None:
        """Take in a request at the present time; see `admit`."""
        self._waiting.append(request)

    def admit(self) -> list[Request]:
        """Start what fits, first come first served; return it. Nothing starts in a pause."""
        started = []
        while self._waiting and not self.is_paused and len(self._running) < self._slots:
            request = self._waiting[0]
            if self._reserved + request.reserved > self._kv_tokens:
                break
            self._waiting.popleft()
            self._start(request)
            started.append(request)
        return started

    def next_end_s(self) -> float:
        """Return when the next running sequence ends, if nothing changes before; inf = never."""
        if self.is_paused or not self._running:
            return math.inf
        steps = max(self._running[0][0] - self._steps, 0.0)
        step_s, growth_s = self._step_s()
        return self._now_s + self._debt_s + steps * (step_s + growth_s * steps / 2)

    def finish(self) -> list[Request]:
        """Return what ends now: called at the time that `next_end_s` gave."""
        self._step(self._running[0][0] - self._steps)
        ended = []
        while self._running and self._running[0][0] <= self._steps + 1e-9:
            _, _, request = heapq.heappop(self._running)
            self._context -= request.reserved
            self._reserved -= request.reserved
            self.num_tokens += request.sampled_tokens
            ended.append(request)
        if not self._running:
            self._context, self._debt_s = 0.0, 0.0
        return ended

    def _start(self, request: Request) -> None:
        self._order += 1
        heapq.heappush(self._running, (self._steps + request.sampled_tokens, self._order, request))
        self._context += request.context + request.new_tokens
        self._reserved += request.reserved
        if self._prefills:
            self._debt_s += self._speed.prefill_s(request.new_tokens, request.context)

    def _step(self, steps: float) -> None:
        self._steps += steps
        self._context += steps * len(self._running)

    def _step_s(self) -> tuple[float, float]:
        """Return the seconds of the next step, and by how much each step is longer than the one before."""
        num, token_s = len(self._running), self._speed.token_s
        return self._speed.base_s(num) + token_s * self._context, token_s * num

    def _steps_in(self, seconds: float) -> float:
        """Return the steps, a fraction allowed, that so many seconds hold."""
        step_s, growth_s = self._step_s()
        return 2 * seconds / (step_s + math.sqrt(step_s**2 + 2 * growth_s * seconds))
