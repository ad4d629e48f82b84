"""Keeps a server on a leash: runs one command in a process group of its own, and ends the group when stdin closes.

    run ---- pipe ----> leash ---- new session ----> server and its children
     |                    |
     dies, however  ->    reads end of file: SIGTERM to the group, after a grace SIGKILL

The kernel closes the pipe also of a run that was killed, so no server outlives its run. A script of its own that
imports the standard library only: it starts in a moment. The first line on stdin is the order, in JSON:
{"command": [...], "grace_s": 10.0}.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading


def end_group(process: "subprocess.Popen[bytes]", grace_s: float) -> None:
    """Ask the group to end, and kill it if it has not after `grace_s`."""
    _signal_group(process, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(grace_s)
    _signal_group(process, signal.SIGKILL)


def _signal_group(process: "subprocess.Popen[bytes]", number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # the group is empty
        os.killpg(process.pid, number)


def _end_at_end_of_file(process: "subprocess.Popen[bytes]", grace_s: float) -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    end_group(process, grace_s)


def main() -> int:
    """Run the order that comes on stdin; returns the exit code of its command, 128 + n if signal n ended it."""
    order = json.loads(_first_line())
    process = subprocess.Popen(order["command"], stdin=subprocess.DEVNULL, start_new_session=True)
    grace_s = float(order["grace_s"])
    signal.signal(signal.SIGTERM, lambda *_: end_group(process, grace_s))
    threading.Thread(target=_end_at_end_of_file, args=(process, grace_s), daemon=True).start()
    code = process.wait()
    _signal_group(process, signal.SIGKILL)  # what the server has left behind
    return code if code >= 0 else 128 - code


def _first_line() -> bytes:
    """Read one line and no byte more: the thread reads the rest from the descriptor itself."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(sys.stdin.fileno(), 1)
        if not byte:
            raise SystemExit("leash: stdin closed before the order was complete")
        line += byte
    return line


if __name__ == "__main__":
    sys.exit(main())
