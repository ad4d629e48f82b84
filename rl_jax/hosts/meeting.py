"""How the processes of a run find each other: process 0 listens, the others call, and nobody begins before all agree.

    process 0                                     process p
      listen at hosts.coordinator  <-------------- call, until hosts.start_timeout_s
      compare number, config, code <-------------- hello: who I am, my config, my code
      if all are there and agree:  --------------> welcome: address of JAX's own coordinator
      if not:                      --------------> refused: every fault, with the host that it is of

Knows no JAX and no run.
"""

import contextlib
import hashlib
import ipaddress
import os
import platform
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rl_jax.config import ConfigError
from rl_jax.hosts.config import HostsConfig
from rl_jax.hosts.line import Closed, Line, Message

MAX_DIFFERENCES = 5
AGAIN_S = 0.1
"""Time between two calls for a process 0 that does not listen yet."""
HELLO_TIMEOUT_S = 10.0
"""A caller that has not said hello by then is none of ours."""
MISSING = "(not there)"


@dataclass(frozen=True, kw_only=True)
class Hello:
    """What a process says of itself.

    Example: Hello(process_id=1, num_processes=2, host="tpu-4", pid=71, code="9f3c..", versions={"jax": "0.10.2"},
    config={"run.steps": 40, "mesh.fsdp": 4}).
    """

    process_id: int
    num_processes: int
    host: str
    pid: int
    code: str
    """Hash of the source files of the project."""
    versions: dict[str, str]
    config: dict[str, object]
    """Every value of the config by its dotted key."""

    @property
    def name(self) -> str:
        """How messages call the process."""
        return f"process {self.process_id} (host {self.host}, pid {self.pid})"


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """The end of a meeting that came about."""

    names: list[str]
    """How messages call each process."""
    jax_address: str
    """Where JAX's own coordinator is to listen, in process 0."""
    lines: dict[int, Line]
    """By process: in process 0 to every other one, elsewhere to process 0."""


def introduce(hosts: HostsConfig, config: Mapping[str, object], code: Path, versions: dict[str, str]) -> Hello:
    """Return what this process says of itself; `code` is the directory of the project's packages."""
    assert hosts.process_id is not None, "resolve() fills it in"
    return Hello(
        process_id=hosts.process_id,
        num_processes=hosts.num_processes,
        host=socket.gethostname(),
        pid=os.getpid(),
        code=code_hash(code),
        versions=versions | {"python": platform.python_version()},
        config=dotted(config),
    )


def code_hash(root: Path) -> str:
    """Return a hash of the Python files of rl_jax and bridge in `root`, names included."""
    total = hashlib.blake2b(digest_size=8)
    for path in sorted(p for room in ("rl_jax", "bridge") for p in (root / room).rglob("*.py")):
        total.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return total.hexdigest()


def dotted(config: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Return the values of nested tables by dotted key; a list of tables counts from 0."""
    found: dict[str, object] = {}
    for key, value in config.items():
        items = list(value) if isinstance(value, list | tuple) else []
        tables = isinstance(value, Mapping) or (bool(items) and all(isinstance(item, Mapping) for item in items))
        inner = value if isinstance(value, Mapping) else {str(i): item for i, item in enumerate(items)}
        found |= dotted(inner, f"{prefix}{key}.") if tables and inner else {prefix + str(key): _plain(value)}
    return found


def _plain(value: object) -> object:
    """Return a value as JSON gives it back, so that both sides compare the same."""
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def differences(ours: Mapping[str, object], theirs: Mapping[str, object]) -> list[str]:
    """Say how two flat tables differ, key by key."""
    keys = sorted(ours.keys() | theirs.keys())
    found = [
        f"{key}={theirs.get(key, MISSING)!r}, process 0 has {ours.get(key, MISSING)!r}"
        for key in keys
        if key not in ours or key not in theirs or ours[key] != theirs[key]
    ]
    more = [f"and {len(found) - MAX_DIFFERENCES} more keys"] if len(found) > MAX_DIFFERENCES else []
    return found[:MAX_DIFFERENCES] + more


def host(hosts: HostsConfig, hello: Hello) -> Meeting:
    """Wait as process 0 for all others and let them in, or none of them.

    Raises:
        ConfigError: the address cannot be taken, somebody is missing or is there twice, or they differ.
    """
    with _listener(hosts) as listener:
        called, faults = _answer_calls(hosts, hello, listener)
    missing = [str(p) for p in range(1, hosts.num_processes) if p not in {theirs.process_id for theirs, _ in called}]
    if missing and not faults:
        faults = [
            f"hosts: process {', '.join(missing)} of {hosts.num_processes} did not call {hosts.coordinator} within "
            f"hosts.start_timeout_s={hosts.start_timeout_s:g}; start the same command on every host, each with its own "
            "hosts.process_id"
        ]
    if faults:
        for _, line in called:
            _refuse(line, faults)
        raise ConfigError(faults)
    lines = {theirs.process_id: line for theirs, line in called}
    named = {theirs.process_id: theirs.name for theirs, _ in called} | {0: hello.name}
    names = [named[p] for p in range(hosts.num_processes)]
    jax_address = f"{hosts.address[0]}:{_free_port(hosts)}"
    for line in lines.values():
        line.send(Message(kind="welcome", facts={"names": names, "jax_address": jax_address}))
    return Meeting(names=names, jax_address=jax_address, lines=lines)


def call(hosts: HostsConfig, hello: Hello) -> Meeting:
    """Call process 0 and wait until it lets everybody in.

    Raises:
        ConfigError: nobody answers at the address, or process 0 refuses.
    """
    line = Line(_dial(hosts), f"process 0 at {hosts.coordinator}")
    line.set_timeout(hosts.start_timeout_s + HELLO_TIMEOUT_S)
    try:
        line.send(Message(kind="hello", facts=asdict(hello)))
        answer = line.receive()
    except (Closed, ValueError, KeyError, TypeError) as error:
        line.close()
        raise ConfigError([_unanswered(hosts, f"took the call and gave no answer ({error})")]) from error
    line.set_timeout(None)
    if answer.kind == "refused":
        line.close()
        raise ConfigError([str(fault) for fault in _list(answer.facts["faults"])])
    names = [str(name) for name in _list(answer.facts["names"])]
    line.peer = names[0]
    return Meeting(names=names, jax_address=str(answer.facts["jax_address"]), lines={0: line})


def _answer_calls(
    hosts: HostsConfig, hello: Hello, listener: socket.socket
) -> tuple[list[tuple[Hello, Line]], list[str]]:
    """Take calls until everybody is there, the time is up, or somebody differs."""
    end_s = time.monotonic() + hosts.start_timeout_s
    called: list[tuple[Hello, Line]] = []
    faults: list[str] = []
    while len(called) < hosts.num_processes - 1 and (left_s := end_s - time.monotonic()) > 0 and not faults:
        listener.settimeout(left_s)
        try:
            connection, address = listener.accept()
        except TimeoutError:
            break
        line = Line(connection, f"the caller from {address[0]}")
        line.set_timeout(HELLO_TIMEOUT_S)
        try:
            theirs = Hello(**line.receive().facts)  # type: ignore[arg-type]
        except (Closed, ValueError, TypeError, KeyError):
            line.close()  # a port scanner, or a process that has ended since
            continue
        line.set_timeout(None)
        line.peer = theirs.name
        faults = _faults(hello, theirs, [known for known, _ in called])
        called.append((theirs, line))
    return called, faults


def _faults(ours: Hello, theirs: Hello, others: Sequence[Hello]) -> list[str]:
    """Say what keeps a process from joining, key by key."""
    same = [known for known in (ours, *others) if known.process_id == theirs.process_id]
    if same:
        return [
            f"hosts.process_id={theirs.process_id}: {same[0].name} and {theirs.name} both have it; give each process a "
            "number of its own"
        ]
    faults = [f"{theirs.name}: {text}; give all hosts one config" for text in differences(ours.config, theirs.config)]
    faults += [
        f"{theirs.name}: {text}; install the same packages" for text in differences(ours.versions, theirs.versions)
    ]
    if ours.num_processes != theirs.num_processes:
        faults.append(f"{theirs.name}: num_processes={theirs.num_processes}, process 0 has {ours.num_processes}")
    if ours.code != theirs.code:
        faults.append(
            f"{theirs.name}: its source files differ ({theirs.code}, process 0 has {ours.code}); check out one commit"
        )
    return faults


def _listener(hosts: HostsConfig) -> socket.socket:
    name, port = hosts.address
    try:
        family, _, _, _, address = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)[0]
        # A name may stand for an address that other hosts see and this one does not have; a loopback stays one.
        is_private = ipaddress.ip_address(address[0]).is_loopback
        return socket.create_server((address[0], port) if is_private else ("", port), family=family, backlog=1024)
    except OSError as error:
        why = f"process 0 cannot listen there ({error.strerror or error})"
        raise ConfigError([f"hosts.coordinator={hosts.coordinator!r}: {why}; name a free port of its host"]) from error


def _dial(hosts: HostsConfig) -> socket.socket:
    end_s, why = time.monotonic() + hosts.start_timeout_s, "nobody listens there"
    while (left_s := end_s - time.monotonic()) > 0:
        try:
            connection = socket.create_connection(hosts.address, timeout=left_s)
        except OSError as error:
            why = str(error.strerror or error)
            time.sleep(min(AGAIN_S, left_s))
            continue
        return connection
    raise ConfigError([_unanswered(hosts, f"does not answer ({why})")])


def _unanswered(hosts: HostsConfig, what: str) -> str:
    return (
        f"hosts.coordinator={hosts.coordinator!r}: process 0 {what}, tried for "
        f"hosts.start_timeout_s={hosts.start_timeout_s:g}; start process 0 there, or mend the address"
    )


def _refuse(line: Line, faults: Sequence[str]) -> None:
    with contextlib.suppress(Closed):  # it has ended by itself
        line.send(Message(kind="refused", facts={"faults": list(faults)}))
    line.close()


def _free_port(hosts: HostsConfig) -> int:
    with socket.create_server(("", 0)) as probe:
        return probe.getsockname()[1]


def _list(value: object) -> list[object]:
    assert isinstance(value, list), value
    return value
