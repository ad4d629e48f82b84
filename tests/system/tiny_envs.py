"""Environments for the system tests: two to learn from, and one for every way to fail."""

import os
import signal
import time
import zlib
from collections.abc import Callable
from pathlib import Path

Judged = tuple[str, Callable[[str], object]]

_num_judged = 0


def checksum(index: int) -> Judged:
    """Reward what a checksum of the text says: members of a group differ, whatever the policy is."""

    def judge(completion: str) -> float:
        _obey_test()
        return zlib.crc32(f"{index} {completion}".encode()) % 997 / 997

    return f"task {index}", judge


def letters(index: int) -> Judged:
    """Reward the share of letters in the text."""
    return f"task {index}", lambda completion: sum(c.isascii() and c.isalpha() for c in completion) / 8


def raises(index: int) -> Judged:
    """Fail to judge."""

    def judge(completion: str) -> float:
        raise KeyError(f"no answer for task {index}")

    return f"task {index}", judge


def not_a_number(index: int) -> Judged:
    """Reward with a NaN."""
    return f"task {index}", lambda completion: float("nan")


def text(index: int) -> Judged:
    """Reward with a string, although one that is a number."""
    return f"task {index}", lambda completion: "1.0"


def hangs(index: int) -> Judged:
    """Never come to an end."""

    def judge(completion: str) -> float:
        while True:
            pass

    return f"task {index}", judge


def too_long(index: int) -> Judged:
    """Ask more than the context holds."""
    return f"task {index} " + "very " * 100 + "long", lambda completion: 1.0


def broken(index: int) -> Judged:
    """Have no task of an odd index, and fail to judge the others, in words that no terminal and no database takes."""
    if index % 2:
        raise LookupError(f"no task {index} \ud800")

    def judge(completion: str) -> float:
        raise ValueError("cannot judge \ud800 \x1b[2J\nat all")

    return f"task {index}", judge


def _obey_test() -> None:
    """Judge number KILL_AT kills the run, once there is a path that matches KILL_AFTER; from SLOW_FROM on, each waits."""
    global _num_judged
    _num_judged += 1
    told = os.environ
    if _num_judged == int(told.get("KILL_AT", "0")):
        pattern = told.get("KILL_AFTER", "/")
        while not (pattern == "/" or list(Path("/").glob(pattern.removeprefix("/")))):
            time.sleep(0.01)
        os.kill(os.getppid(), signal.SIGKILL)
    if _num_judged >= int(told.get("SLOW_FROM", "1000000")):
        time.sleep(3)
