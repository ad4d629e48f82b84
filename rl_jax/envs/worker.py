"""The process that runs environments: reads requests, calls the user's code, writes plain answers (step 6 of docs/walk.md).

Started by rl_jax/envs/process.py as `python -m rl_jax.envs.worker` with a socket as standard input. The user's code sees
an empty standard input, and what it prints goes to standard error. Knows no run, no JAX.
"""

import faulthandler
import math
import os
import random
import reprlib
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import SupportsFloat, cast

from rl_jax.config import ConfigError
from rl_jax.envs.base import Environment, MultiTurn, Solved, Task
from rl_jax.envs.registry import EnvConfig, resolve
from rl_jax.envs.wire import Answer, EnvInfo, Request, Setup, receive, send

ORPHAN_S = 2.0
"""An alarm ends a call this much after its limit; the pool, if it lives, does so at the limit."""


class InvalidReward(ValueError):
    """A reward that is neither a finite number nor a mapping of such that holds "reward"."""


def main() -> None:
    """Serve requests until the pool, or the run itself, is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the run, which decides when a worker ends
    connection = _claim_stdin()
    setup = cast(Setup, receive(connection))
    sys.path[:] = setup.sys_path
    if setup.max_memory_bytes:
        resource.setrlimit(resource.RLIMIT_AS, (setup.max_memory_bytes, setup.max_memory_bytes))
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # the pool asks where a late call hangs
    environments: dict[str, Environment] = {}
    for i, config in enumerate(setup.configs):
        _answer(connection, i, setup.start_timeout_s, lambda c=config: _construct(c, environments))
    while True:
        try:
            request = cast(Request, receive(connection))
        except (EOFError, ConnectionError):
            os._exit(0)  # a thread that an environment left running must not keep the process
        _answer(connection, request.number, setup.deadline_s, lambda r=request: _serve(environments[r.env], r))


def _claim_stdin() -> socket.socket:
    """Move the socket away from descriptors 0 and 1, where the user's code reads and prints."""
    connection = socket.socket(fileno=os.dup(0))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return connection


def _answer(connection: socket.socket, number: int, limit_s: float, call: Callable[[], Answer]) -> None:
    """Send what a call of the user's code came to, once: a child that it forked and let come back here must not answer."""
    worker = os.getpid()
    answer = _watched(limit_s, call)
    if os.getpid() != worker:
        os._exit(0)
    send(connection, replace(answer, number=number))


def _watched(limit_s: float, call: Callable[[], Answer]) -> Answer:
    """Return `call()`, or what it raised.

    The pool kills a worker at the limit. The alarm, which the kernel serves, is for the worker whose run was itself
    killed: no call outlives its run by more than the limit. Where the user's code uses the alarm, it has it.
    """
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, limit_s + ORPHAN_S)
    try:
        return call()
    except InvalidReward as error:
        return Answer(kind="invalid", value=str(error))
    except ConfigError as error:
        return Answer(kind="config", value=error.faults)
    except BaseException as error:  # noqa: BLE001 - the user's code: what it raises is an answer
        return Answer(kind="error", value=_describe(error))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _describe(error: BaseException) -> str:
    """Return type, message and place of an exception."""
    text = "".join(traceback.format_exception_only(error)).strip()[:2000]
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{text} ({place.filename}:{place.lineno} in {place.name})"


def _construct(config: EnvConfig, environments: dict[str, Environment]) -> Answer:
    """Make an environment and try it: task 0, twice, must give the same prompt."""
    environment = environments[config.label] = resolve(config)
    size = getattr(environment, "size", None)
    if size is not None and size < 1:
        raise ConfigError([f"id={config.id!r}: it has size={size}, no task; change its settings"])
    first, second = (_prompt(_task(environment, index=0)) for _ in range(2))
    if first != second:
        raise ConfigError(
            [
                f"id={config.id!r}: task(0) gave {reprlib.repr(first)}, then {reprlib.repr(second)}; a task must depend on "
                "its index alone, for example through random.Random(index)"
            ]
        )
    return Answer(kind="ok", value=EnvInfo(size=size, is_multi_turn=isinstance(environment, MultiTurn)))


def _serve(environment: Environment, request: Request) -> Answer:
    """Call the method that the request names and return its value in plain types."""
    task = _task(environment, request.index)
    if request.method == "task":
        return Answer(kind="ok", value=_prompt(task))
    if request.method == "reward":
        return Answer(kind="ok", value=_numbers(environment.reward(task, list(request.completions))))
    if request.method == "solution":
        if not isinstance(environment, Solved):
            raise TypeError("it has no method `solution(task) -> str`, see rl_jax/envs/base.py")
        return Answer(kind="ok", value=_text("solution", environment.solution(task)))
    assert isinstance(environment, MultiTurn), f"{request}: the pool asks single-turn environments for no reply"
    reply = environment.reply(task, list(request.completions))
    return Answer(kind="ok", value=None if reply is None else _text("reply", reply))


def _task(environment: Environment, index: int) -> Task:
    # An environment that draws from Python's global generator still makes the same task in every process.
    random.seed(index)
    task = environment.task(index)
    if not isinstance(task, Task):
        raise TypeError(f"task({index}) returned {reprlib.repr(task)}, expected rl_jax.envs.base.Task")
    return task


def _prompt(task: Task) -> str | list[dict[str, str]]:
    if isinstance(task.prompt, str):
        return _text("prompt", task.prompt)
    messages = [dict(message) for message in task.prompt]
    for message in messages:
        if not {"role", "content"} <= message.keys() or not all(isinstance(v, str) for v in message.values()):
            raise TypeError(f"prompt message {reprlib.repr(message)}: expected text under 'role' and 'content'")
    return [{key: _text("prompt", value) for key, value in message.items()} for message in messages]


def _text(method: str, value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{method} returned {reprlib.repr(value)}, expected text")
    try:
        value.encode()  # no tokenizer, file or database takes a lone surrogate
    except UnicodeEncodeError as error:
        raise ValueError(f"{method}: character {error.start} is {value[error.start]!r}, which is no text") from error
    return str(value)


def _numbers(reward: object) -> dict[str, float]:
    """Return the reward and its parts as floats, or raise InvalidReward."""
    values = dict(reward) if isinstance(reward, Mapping) else {"reward": reward}
    if "reward" not in values:
        raise InvalidReward(f"expected an entry 'reward', got the keys {reprlib.repr(list(values))}")
    if odd := [name for name in map(str, values) if not name.isprintable()]:
        raise InvalidReward(f"names of parts {reprlib.repr(odd)}: expected printable text, they name metrics")
    return {str(name): _number(str(name), value) for name, value in values.items()}


def _number(name: str, value: object) -> float:
    fault = f"{name}={reprlib.repr(value)} ({type(value).__name__}): expected a finite number"
    if not isinstance(value, SupportsFloat):  # a string is none, although float() would read it
        raise InvalidReward(fault)
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError) as error:  # an array of many numbers, an integer of 400 digits
        raise InvalidReward(fault) from error
    if not math.isfinite(number):
        raise InvalidReward(fault)
    return number


if __name__ == "__main__":
    main()
