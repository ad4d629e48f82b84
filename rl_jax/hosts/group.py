"""The processes of a run at work: orders from process 0, answers, and the watch that ends all when one is lost.

    process 0, main thread                   process p, main thread
      order(m) ---------------------------->   next_order()            each process makes the same call in the same order,
      ... the same work, together ...          ... the same work ...   as JAX on many hosts asks for
      settle(facts) <------------------------  done(facts)             facts that differ end the run
    watch thread, everywhere
      silence for hosts.timeout_s, a closed connection: "process 2 (host b, pid 71) is lost", and this process ends

An end by the watch is os._exit: the main thread may hang in a collective that nobody will complete. Nothing is lost by
it: every file of a run survives a kill at any moment (docs/hosts.md). Knows no order by its meaning.
"""

import contextlib
import dataclasses
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax

from rl_jax.config import ConfigError
from rl_jax.hosts.config import HostsConfig
from rl_jax.hosts.line import Closed, Line, Message
from rl_jax.hosts.meeting import Meeting, call, host, introduce

logger = logging.getLogger(__name__)

EXIT_LOST = 3
"""Exit code of a process that ends because another one was lost."""
TICK_S = 0.2
"""Time between two looks of the watch."""
BEATS = 8
"""Beats within hosts.timeout_s."""
GRACE_S = 1.0
"""How long word of an end may take to the others, and how long a failure waits for what may have caused it."""
JAX_HEARTBEAT_S = 600
"""JAX's own watch ends processes with no word; it must not come before ours."""
JAX_FAREWELL_S = 60
"""How long JAX waits for the others when a process has ended as it should."""


@dataclass(frozen=True, kw_only=True)
class Ending:
    """Why a process ends, as it tells the others.

    Example: Ending(code=1, text="step 7: the loss of micro-batches [0] is not finite", kind="NonFinite").
    """

    code: int
    """Exit code that the others take over."""
    text: str
    kind: str = ""
    """Class of the exception, if it was one."""


class HostsDiffer(RuntimeError):
    """Processes that made the same step tell different numbers of it."""


class Hosts:
    """See the module. One process alone is a group too: it has nobody to tell."""

    def __init__(self, config: HostsConfig, meeting: Meeting | None = None):
        self.config = config
        self.num_processes = config.num_processes
        self.process_id = config.process_id or 0
        self.names = meeting.names if meeting else ["process 0"]
        self.wants_stop: Callable[[], bool] = lambda: False
        """Elsewhere than in process 0: whether somebody asked this process to stop; the watch passes it on."""
        self.on_stop: Callable[[str], None] = lambda who: None
        """In process 0: what a request to stop from another process leads to."""
        self.resume = "start all processes again with --resume"
        """How to go on after a loss; the run sets it when it has a folder."""
        self._lines: dict[int, Line] = meeting.lines if meeting else {}
        self._queues: dict[int, queue.SimpleQueue[Message]] = {p: queue.SimpleQueue() for p in self._lines}
        self._gone: set[int] = set()
        self._is_ending = threading.Event()
        self._ordered_s: float | None = None
        self._pending: set[int] = set()
        self._verdict: Ending | None = None
        self._lock = threading.Lock()
        for process, line in self._lines.items():
            self._open(process, line)
        if self._lines:
            threading.Thread(target=self._watch, name="hosts-watch", daemon=True).start()

    @property
    def is_first(self) -> bool:
        """Whether this is process 0, which holds the run."""
        return self.process_id == 0

    @property
    def is_alone(self) -> bool:
        """Whether there is no other process."""
        return not self._lines

    # ---- process 0

    def order(self, messages: Message | Mapping[int, Message]) -> None:
        """Tell every other process what to do next, all the same or each its own."""
        self._ordered_s, self._pending = time.monotonic(), set(self._lines)
        for process, line in self._lines.items():
            try:
                line.send(messages if isinstance(messages, Message) else messages[process])
            except Closed:
                self._await_end()

    def settle(self, facts: Mapping[str, object]) -> None:
        """Wait until every other process has done what was ordered.

        Raises:
            HostsDiffer: one of them tells other facts.
        """
        for process in self._lines:
            theirs = self._queues[process].get().facts
            wrong = [f"{k}={theirs.get(k)!r} instead of {v!r}" for k, v in facts.items() if theirs.get(k) != v]
            if wrong:
                raise HostsDiffer(
                    f"{self.names[process]} tells {', '.join(wrong)} of the same work: its weights or its batch are not "
                    "those of process 0; the last checkpoint is older than that"
                )
        self._ordered_s = None

    # ---- the others

    def next_order(self) -> Message:
        """Wait for the next order of process 0."""
        return self._queues[0].get()

    def done(self, facts: Mapping[str, object]) -> None:
        """Tell process 0 that the last order is carried out, with what must be the same everywhere."""
        try:
            self._lines[0].send(Message(kind="done", facts=dict(facts)))
        except Closed:
            self._await_end()

    # ---- the end

    def leave(self, ending: Ending) -> None:
        """Tell the others that this process ends, and why; code 0 is the end of the run as it should be."""
        if self._is_ending.is_set():
            return
        self._is_ending.set()
        text = f"{self.names[self.process_id]} ended: {ending.text}"
        self._tell(dataclasses.replace(ending, text=text))

    def close(self) -> None:
        """Close the connections; idempotent."""
        self._is_ending.set()
        for line in self._lines.values():
            line.close()

    def blame(self, error: BaseException) -> Ending | None:
        """Return what ended another process, if that is the cause of `error` here; may end this process instead.

        Collectives fail within a moment of the loss of a process, sometimes before the watch has heard of it.
        """
        if self.is_alone:
            return None
        time.sleep(GRACE_S)
        with self._lock:  # a verdict of loss holds it until this process has ended
            verdict = self._verdict
        return None if verdict is None or verdict.kind == type(error).__name__ else verdict

    def _open(self, process: int, line: Line) -> None:
        line.start(
            self.config.timeout_s / BEATS,
            lambda message: self._take(process, message),
            lambda why: self._lose(process, why),
        )

    def _take(self, process: int, message: Message) -> None:
        if message.kind == "stop":
            self.on_stop(self.names[process])
        elif message.kind == "end":
            self._hear_end(process, Ending(**message.facts))  # type: ignore[arg-type]
        else:
            self._pending.discard(process)
            self._queues[process].put(message)

    def _hear_end(self, process: int, ending: Ending) -> None:
        """Another process told that it ends."""
        self._gone.add(process)
        if not ending.code:
            self._is_ending.set()
            self._queues[process].put(Message(kind="end"))
            return
        with self._lock:
            self._verdict = self._verdict or ending
            if self.is_first and not self._is_ending.is_set():
                self._is_ending.set()
                self._tell(ending)
        # The main thread may have found the same fault, and then knows more; if it hangs, nobody waits for it.
        patience_s = 0.0 if ending.code == EXIT_LOST else 2 * GRACE_S
        timer = threading.Timer(patience_s, self._exit, (ending.code, ending.text))
        timer.daemon = True
        timer.start()

    def _watch(self) -> None:
        told_stop, looked_s = False, time.monotonic()
        while not self._is_ending.wait(TICK_S):
            now_s = time.monotonic()
            if now_s - looked_s > self.config.timeout_s / 2:  # it was this process that was stopped, not the others
                for line in self._lines.values():
                    line.heard_s = now_s
            looked_s = now_s
            for process, line in self._lines.items():
                if now_s - line.heard_s > self.config.timeout_s and process not in self._gone:
                    self._lose(process, f"it has been silent for hosts.timeout_s={self.config.timeout_s:g}")
            limit_s = self.config.order_timeout_s
            if self._ordered_s is not None and now_s - self._ordered_s > limit_s:
                late = min(self._pending, default=0)
                self._lose(late, f"what all do together has not ended there within hosts.order_timeout_s={limit_s:g}")
            if not self.is_first and not told_stop and self.wants_stop():
                told_stop = True
                with contextlib.suppress(Closed):
                    self._lines[0].send(Message(kind="stop"))

    def _lose(self, process: int, why: str) -> None:
        """Another process is gone without a word, or does not answer: tell the rest and end."""
        if self._is_ending.is_set() or process in self._gone:
            return
        text = f"{self.names[process]} is lost: {why}. All processes of the run end; {self.resume}"
        with self._lock:
            self._is_ending.set()
            self._verdict = self._verdict or Ending(code=EXIT_LOST, text=text)
            self._tell(self._verdict)
            self._exit(self._verdict.code, self._verdict.text)

    def _tell(self, ending: Ending) -> None:
        """Send word to all, waiting for none: a connection to a process that hangs may be full."""
        message = Message(kind="end", facts=dataclasses.asdict(ending))
        _within(GRACE_S, [partial(_send, line, message) for p, line in self._lines.items() if p not in self._gone])

    def _exit(self, code: int, text: str) -> None:
        def say() -> None:
            print(f"\n{self.names[self.process_id]} ends: {text}", file=sys.stderr, flush=True)
            logger.info("the process ends: %s", text)  # for run.log: the terminal has it already
            sys.stdout.flush()

        _within(GRACE_S, [say])  # a terminal or disk that takes nothing must not keep the process
        if self.is_first:
            time.sleep(GRACE_S / 2)  # the end of process 0 takes JAX's coordinator away, which kills the others
        os._exit(code)

    def _await_end(self) -> None:
        """Wait for the reader's thread, which knows why a connection broke, to end this process."""
        time.sleep(4 * GRACE_S)
        raise ConnectionError("the connection to another process broke; hosts: no reason was found")


def leave_at_once(code: int) -> None:
    """End the process without JAX's farewell, which waits for processes that may be gone."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def join(config: HostsConfig, run_config: Mapping[str, object], root: Path, versions: dict[str, str]) -> Hosts:
    """Meet the other processes and start JAX with them; before anything touches a device.

    Args:
        config: as resolve() returns it.
        run_config: what must be the same in all processes.
        root: directory of the project's packages, which must be the same too.
        versions: of the packages that must be the same.
    Raises:
        ConfigError: they do not come, or differ.
    """
    if config.num_processes == 1:
        return Hosts(config)
    hello = introduce(config, run_config, root, versions)
    meeting = host(config, hello) if config.process_id == 0 else call(config, hello)
    hosts = Hosts(config, meeting)  # from here on the loss of a process is noticed
    jax.config.update(
        "jax_enable_preemption_service", False
    )  # it would swallow SIGTERM, which rl_jax.interrupt handles
    try:
        jax.distributed.initialize(
            meeting.jax_address,
            num_processes=config.num_processes,
            process_id=hosts.process_id,
            cluster_detection_method="deactivate",
            initialization_timeout=int(config.start_timeout_s),
            heartbeat_timeout_seconds=JAX_HEARTBEAT_S,
            shutdown_timeout_seconds=JAX_FAREWELL_S,
        )
    except (RuntimeError, ValueError) as error:
        raise ConfigError([f"hosts: JAX cannot join the processes at {meeting.jax_address}: {error}"]) from error
    return hosts


def _within(seconds: float, calls: Sequence[Callable[[], None]]) -> None:
    """Make calls that may hang, beside each other, and wait for none of them longer than this."""
    threads = [threading.Thread(target=call, daemon=True) for call in calls]
    end_s = time.monotonic() + seconds
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, end_s - time.monotonic()))


def _send(line: Line, message: Message) -> None:
    with contextlib.suppress(Closed):  # it ended first
        line.send(message)
