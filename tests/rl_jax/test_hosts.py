"""Processes that meet: who they are, what they say to each other, and what keeps them from starting."""

import re
import socket
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rl_jax.cli import ModelConfig, RunConfig, RunSection
from rl_jax.config import ConfigError
from rl_jax.half.half import TrainerHalf, write_word
from rl_jax.hosts.config import HostsConfig, first_host, resolve
from rl_jax.hosts.group import TICK_S, Ending, Hosts, HostsDiffer
from rl_jax.hosts.line import Closed, Line, Message
from rl_jax.hosts.meeting import Hello, Meeting, call, code_hash, dotted, host, introduce
from rl_jax.hosts.parts import FIELDS, cut, joined, rows_of
from rl_jax.mesh import MeshConfig, make_mesh
from rl_jax.models.architecture import Architecture
from rl_jax.types import Batch

# ---- who is who


@pytest.mark.parametrize(
    ("table", "environment", "expected"),
    [
        ({}, {"SLURM_PROCID": "3", "JAX_PROCESS_ID": "3"}, (1, 0, "")),
        ({"num_processes": 3, "process_id": 2, "coordinator": "a:71"}, {}, (3, 2, "a:71")),
        (
            {"launcher": "jax"},
            {"JAX_COORDINATOR_ADDRESS": "b:72", "JAX_NUM_PROCESSES": "5", "JAX_PROCESS_ID": "4"},
            (5, 4, "b:72"),
        ),
        (
            {"launcher": "slurm", "port": 73},
            {"SLURM_STEP_NODELIST": "tpu[03-07,9],x", "SLURM_NTASKS": "7", "SLURM_PROCID": "0"},
            (7, 0, "tpu03:73"),
        ),
        (
            {"launcher": "kubernetes", "num_processes": 2, "coordinator": "run-0.run:74"},
            {"JOB_COMPLETION_INDEX": "1"},
            (2, 1, "run-0.run:74"),
        ),
        (  # the table's own values are kept
            {"launcher": "slurm", "num_processes": 2, "process_id": 1, "coordinator": "c:75"},
            {"SLURM_STEP_NODELIST": "d", "SLURM_NTASKS": "7", "SLURM_PROCID": "0"},
            (2, 1, "c:75"),
        ),
    ],
)
def test_launcher_fills_in_what_the_table_leaves_out(
    table: dict[str, object], environment: dict[str, str], expected: tuple[int, int, str]
) -> None:
    found = resolve(HostsConfig(**table), environment)  # type: ignore[arg-type]
    assert (found.num_processes, found.process_id, found.coordinator) == expected


@pytest.mark.parametrize(
    ("table", "environment", "faults"),
    [
        ({"num_processes": 2}, {}, ["hosts.process_id: not known", "hosts.coordinator: not known"]),
        ({"num_processes": 2, "launcher": "slurm", "process_id": 0}, {}, ["srun"]),
        ({"launcher": "jax"}, {"JAX_PROCESS_ID": "one"}, ["JAX_PROCESS_ID='one' in the environment"]),
        (
            {"launcher": "jax"},
            {"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "2", "JAX_COORDINATOR_ADDRESS": "a:1"},
            ["hosts.process_id=2: must be 0 to 1"],
        ),
    ],
)
def test_what_is_not_known_is_named(table: dict[str, object], environment: dict[str, str], faults: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(HostsConfig(**table), environment)  # type: ignore[arg-type]
    assert len(caught.value.faults) == len(faults)
    for found, expected in zip(caught.value.faults, faults, strict=True):
        assert expected in found


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_processes", 0),
        ("process_id", 1),
        ("coordinator", "a"),
        ("coordinator", "a:0"),
        ("port", 2**16),
        ("timeout_s", 0.5),
        ("start_timeout_s", 0.0),
        ("order_timeout_s", -1.0),
    ],
)
def test_bad_value_is_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"^{key}="):
        HostsConfig(**{key: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("n1", "n1"), ("n1,m2", "n1"), ("n[001-015],m", "n001"), ("n[7,9-12]", "n7"), ("", "")],
)
def test_first_host_of_a_slurm_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


# ---- the line


def pair() -> tuple[Line, Line]:
    one, other = _tcp_pair()
    return Line(one, "the other"), Line(other, "the one")


def _tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        return one, listener.accept()[0]


def test_message_arrives_bit_by_bit_between_beats() -> None:
    sender, receiver = pair()
    rng = np.random.default_rng(0)
    arrays = [
        rng.random((3, 5)) < 0.5,
        rng.integers(0, 9, (2, 0, 7)).astype(np.uint16),
        np.asfortranarray(rng.normal(size=(11, 13)).astype(np.float32)),
        np.float64(1 / 3) * np.ones((), np.float64),
        rng.integers(0, 255, 3 << 20).astype(np.uint8),  # more than the buffers of a socket hold
    ]
    facts: dict[str, object] = {"step": 7, "text": "\u00e4", "table": {"a": [1, 2.5, None]}}
    heard: list[Message] = []
    ended, came = threading.Event(), threading.Event()

    def take(message: Message) -> None:
        heard.append(message)
        came.set()

    receiver.start(0.01, take, lambda why: ended.set())
    sender.start(0.001, take, lambda why: None)
    sender.send(Message(kind="odd", facts=facts, arrays=arrays))
    assert came.wait(10)
    (found,) = heard
    assert (found.kind, found.facts) == ("odd", facts)
    for array, expected in zip(found.arrays, arrays, strict=True):
        assert array.dtype == expected.dtype
        np.testing.assert_array_equal(array, expected)
    before_s = receiver.heard_s
    assert _becomes_true(lambda: receiver.heard_s > before_s)  # beats go on
    sender.close()
    assert ended.wait(30)
    receiver.close()
    with pytest.raises(Closed):
        receiver.send(Message(kind="late"))


def _becomes_true(condition: Callable[[], bool]) -> bool:
    end_s = time.monotonic() + 30
    while not condition() and time.monotonic() < end_s:
        time.sleep(0.01)
    return condition()


def test_what_is_no_process_of_ours_is_not_believed() -> None:
    one, other = _tcp_pair()
    one.sendall(struct.pack("!II", 2**31, 0) + b"GET / HTTP/1.1\r\n\r\n")
    with pytest.raises(ValueError, match="no process of rl_jax"):
        Line(other, "a browser").receive()
    one.close()
    other.close()


# ---- the meeting

CONFIG = {"run": {"steps": 3}, "envs": ({"id": "a"}, {"id": "b"}), "optim": {"lr": 1e-3}}
ROOT = Path(__file__).resolve().parents[2]


def table(process: int, num_processes: int = 3, **values: object) -> HostsConfig:
    return HostsConfig(num_processes=num_processes, process_id=process, **values)  # type: ignore[arg-type]


def hello(hosts: HostsConfig, **values: object) -> Hello:
    return replace(introduce(hosts, CONFIG, ROOT, {"jax": "1.2"}), **values)  # type: ignore[arg-type]


def meet(
    hellos: list[Callable[[HostsConfig], Hello]],
    ids: list[int] | None = None,
    num_processes: int = 3,
    start_timeout_s: float = 30.0,
) -> list[Meeting | ConfigError]:
    """Let process 0 and the others meet, in threads of this process; return what came of it for each."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"

    def one(process: int, say: Callable[[HostsConfig], Hello]) -> Meeting | ConfigError:
        hosts = table(process, num_processes, coordinator=address, start_timeout_s=start_timeout_s)
        try:
            return (call if process else host)(hosts, say(hosts))
        except ConfigError as error:
            return error

    ids = ids or list(range(len(hellos)))
    with ThreadPoolExecutor(len(hellos)) as pool:
        return list(pool.map(one, ids, hellos))


def test_all_meet_and_hear_the_same() -> None:
    met = meet([hello, hello, hello])
    assert all(isinstance(one, Meeting) for one in met)
    zero, one, two = met
    assert isinstance(zero, Meeting) and isinstance(one, Meeting) and isinstance(two, Meeting)
    assert zero.names == one.names == two.names
    assert [name.split(" ")[1] for name in zero.names] == ["0", "1", "2"]
    assert zero.jax_address == one.jax_address == two.jax_address
    assert sorted(zero.lines) == [1, 2]
    two.lines[0].send(Message(kind="told", facts={"by": 2}))
    assert zero.lines[2].receive().facts == {"by": 2}
    for line in (*zero.lines.values(), *one.lines.values(), *two.lines.values()):
        line.close()


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"config": dotted(CONFIG | {"optim": {"lr": 2e-3}})}, "optim.lr=0.002, process 0 has 0.001"),
        ({"config": dotted(CONFIG | {"envs": ({"id": "a"},)})}, "envs.1.id='(not there)', process 0 has 'b'"),
        ({"versions": {"jax": "1.3"}}, "jax='1.3', process 0 has '1.2'"),
        ({"code": "f00"}, "its source files differ (f00, process 0 has "),
        ({"num_processes": 4}, "num_processes=4, process 0 has 2"),
    ],
)
def test_who_differs_is_refused_with_host_and_key(values: dict[str, object], expected: str) -> None:
    def other(hosts: HostsConfig) -> Hello:
        mine = hello(hosts, host="far", pid=71)
        return replace(mine, **values)  # type: ignore[arg-type]

    if "versions" in values:
        values = {"versions": hello(table(1)).versions | {"jax": "1.3"}}
    for end in meet([hello, other], num_processes=2):
        assert isinstance(end, ConfigError)
        (fault,) = end.faults
        assert fault.startswith("process 1 (host far, pid 71): ")
        assert expected in fault


def test_two_with_one_number_are_refused() -> None:
    ends = meet([hello, hello, lambda hosts: hello(hosts, host="far")], ids=[0, 1, 1])
    for end in ends:
        assert isinstance(end, ConfigError)
        assert "hosts.process_id=1: " in str(end)
        assert "both have it" in str(end)
        assert "host far" in str(end)


def test_who_does_not_come_is_named() -> None:
    end, other = meet([hello, hello], start_timeout_s=3.0)
    assert isinstance(end, ConfigError) and isinstance(other, ConfigError)
    assert "process 2 of 3 did not call 127.0.0.1:" in str(end)
    assert str(end) == str(other)


def test_address_where_nobody_listens_is_named_after_the_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    with pytest.raises(ConfigError, match=r"hosts.coordinator='127.0.0.1:\d+': process 0 does not answer"):
        call(table(1, coordinator=address, start_timeout_s=0.3), hello(table(1)))


def test_taken_address_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match="process 0 cannot listen there"):
            host(table(0, coordinator=address), hello(table(0)))


def test_code_hash_sees_content_and_names(tmp_path: Path) -> None:
    (tmp_path / "bridge").mkdir()
    file = tmp_path / "bridge" / "a.py"
    found = set()
    for text, name in (("x = 1", "a.py"), ("x = 2", "a.py"), ("x = 2", "b.py")):
        file.unlink(missing_ok=True)
        file = tmp_path / "bridge" / name
        file.write_text(text)
        found.add(code_hash(tmp_path))
    assert len(found) == 3


# ---- the group at work


def group() -> tuple[Hosts, Hosts]:
    one, other = pair()
    names = ["process 0 (host a, pid 7)", "process 1 (host b, pid 8)"]
    first = Hosts(table(0, 2, coordinator="a:1"), Meeting(names=names, jax_address="", lines={1: one}))
    second = Hosts(table(1, 2, coordinator="a:1"), Meeting(names=names, jax_address="", lines={0: other}))
    return first, second


def end(first: Hosts, second: Hosts) -> None:
    first.leave(Ending(code=0, text=""))
    assert second.next_order().kind == "end"
    for hosts in (first, second):
        hosts.close()


def test_orders_are_carried_out_in_order_and_answers_compared() -> None:
    first, second = group()
    assert (first.is_first, first.is_alone, second.is_first, second.is_alone) == (True, False, False, False)
    for step in (1, 2):
        first.order({1: Message(kind="train", facts={"step": step})})
        assert second.next_order().facts == {"step": step}
        second.done({"step": step, "loss": (0.1).hex()})
        first.settle({"step": step, "loss": (0.1).hex()})
    first.order(Message(kind="train"))
    assert second.next_order().facts == {}
    second.done({"step": 3, "loss": (0.1).hex()})
    with pytest.raises(HostsDiffer, match=re.escape("process 1 (host b, pid 8) tells loss='0x1.999999999999ap-4'")):
        first.settle({"step": 3, "loss": np.nextafter(0.1, 1).hex()})
    end(first, second)


def test_a_request_to_stop_reaches_process_0_once() -> None:
    first, second = group()
    asked: list[str] = []
    first.on_stop = asked.append
    second.wants_stop = lambda: True
    assert _becomes_true(lambda: bool(asked))
    time.sleep(3 * TICK_S)
    assert asked == ["process 1 (host b, pid 8)"]
    end(first, second)


def test_one_process_is_a_group_that_nobody_hears() -> None:
    hosts = Hosts(HostsConfig())
    hosts.order(Message(kind="train"))
    hosts.settle({"step": 1})
    assert hosts.is_first and hosts.is_alone
    assert hosts.blame(ValueError()) is None


def test_a_run_folder_of_another_file_system_is_refused(tmp_path: Path) -> None:
    arch = Architecture(
        family="qwen3", vocab_size=7, width=4, num_layers=1, num_heads=2, num_kv_heads=1, head_width=2, mlp_width=5
    )
    config = RunConfig(model=ModelConfig(architecture=arch), run=RunSection(dir="shared"))
    half = TrainerHalf(config, arch, make_mesh(MeshConfig()))
    for folder in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(ConfigError, match=r"run\.dir='shared': this host does not see the run folder"):
            half.open(folder, "", word="one")
        write_word(tmp_path)
    half.open(tmp_path, "", word=write_word(tmp_path))
    half.close()


# ---- the batch


def batch(rows: int, length: int, seed: int) -> Batch:
    rng = np.random.default_rng(seed)
    shape = (rows, length)
    whole = {name: rng.integers(0, 7, shape).astype(np.int32) for name in ("tokens_BT", "targets_BT", "positions_BT")}
    whole |= {name: rng.integers(0, 3, shape).astype(np.int32) for name in ("segments_BT", "rollouts_BT")}
    floats = ("logprobs_BT", "advantages_BT", "temperatures_BT")
    whole |= {name: rng.normal(size=shape).astype(np.float32) for name in floats}
    return Batch(**whole, mask_BT=rng.random(shape) < 0.3)


@pytest.mark.parametrize("has_routes", [False, True])
def test_a_part_arrives_at_its_rows_with_the_counts_of_the_whole(has_routes: bool) -> None:
    """All devices here are of process 0; process 1 has no row, and knows the counts all the same."""
    mesh = make_mesh(MeshConfig(data=2, expert=2))
    batches = [batch(8, 5, seed) for seed in (1, 2)]
    routes = [np.random.default_rng(i).integers(0, 4, (8, 5, 3, 2)).astype(np.uint16) for i in range(2)]
    assert rows_of(mesh, 0, 8).tolist() == list(range(8))
    for process in (0, 1):
        message = cut("train", mesh, process, batches, routes if has_routes else None)
        found, found_routes = joined(mesh, process, message)
        assert (found_routes is not None) == has_routes
        for i, (part, whole) in enumerate(zip(found, batches, strict=True)):
            assert part.num_trained_tokens == int(whole.mask_BT.sum())
            assert part.num_tokens == int((whole.segments_BT > 0).sum())
            for name in FIELDS:
                expected = getattr(whole, name) if process == 0 else np.zeros_like(getattr(whole, name))
                np.testing.assert_array_equal(getattr(part, name), expected, err_msg=name)
            if found_routes is not None and process == 0:
                np.testing.assert_array_equal(found_routes[i], routes[i])


def test_a_changed_bit_is_found() -> None:
    mesh = make_mesh(MeshConfig())
    message = cut("train", mesh, 0, [batch(2, 3, 1)], None)
    message.arrays[FIELDS.index("advantages_BT")][1, 2] += 1
    with pytest.raises(ValueError, match="its part of the batch has hash"):
        joined(mesh, 0, message)
