"""rl_jax/rollout/server.py and leash.py: servers start, are started again, say how they died, and outlive nobody.

The command is vLLM's; a script in place of the fleet's Python gives it to the fake server.
"""

import asyncio
import dataclasses
import itertools
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import psutil
import pytest
from fleet_fakes import FakeSource, make_request

from rl_jax import rooms
from rl_jax.cli import RunConfig
from rl_jax.config import load
from rl_jax.mesh import make_mesh
from rl_jax.models.schema import init_params
from rl_jax.rollout.client import ServerLost
from rl_jax.rollout.fleet import VllmFleet
from rl_jax.rollout.fleet_config import FleetConfig
from rl_jax.rollout.server import Launch, ServerConfig, ServerProcess, command, environment
from rl_jax.sampler import SamplerLost
from rl_jax.tokenizer import Tokenizer

FAKES = Path(__file__).with_name("fleet_fakes.py")
ROOT = Path(__file__).resolve().parents[2]
LAUNCH = Launch(model_dir=Path("/model"), dtype="float32", max_len=64, max_running=8)


def script(folder: Path, text: str) -> str:
    """Return an executable that stands in for the fleet's Python."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def fake_python(folder: Path) -> str:
    return script(folder, f'PYTHONPATH={ROOT} exec {sys.executable} {FAKES} "$@"')


def fleet_config(python: str, **server: object) -> FleetConfig:
    return FleetConfig(
        **{"max_len": 64, "max_running": 8, "format": "float32", "poll_s": 0.1, "lost_after_s": 60.0},
        server=ServerConfig(**{"python": python, "start_timeout_s": 60.0, "stop_grace_s": 1.0, **server}),
    )


def start(config: FleetConfig, folder: Path) -> VllmFleet:
    (folder / "model").mkdir()
    (folder / "model" / "config.json").touch()
    launch = dataclasses.replace(LAUNCH, model_dir=folder / "model")
    return VllmFleet(config, FakeSource(), launch=launch, logs=folder / "logs", say=lambda text: None)


def until(condition: Callable[[], bool], patience_s: float = 30.0) -> None:
    end_s = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < end_s, "it never came"
        time.sleep(0.02)


def test_the_command_and_its_variables():
    config = ServerConfig(python="/fleet/python", threads=2, args=("--block-size", "32"), env={"A": "b"})
    words = command(config, LAUNCH, 8123)
    assert words[:5] == ["/fleet/python", "-m", "vllm.entrypoints.cli.main", "serve", "/model"]
    options = dict(itertools.pairwise(words))
    for name, value in {
        **{"--port": "8123", "--dtype": "float32", "--max-model-len": "64", "--max-num-seqs": "8"},
        **{"--logprobs-mode": "processed_logprobs", "--weight-transfer-config": '{"backend":"rl_jax"}'},
        **{"--block-size": "32", "--host": "127.0.0.1"},
    }.items():
        assert options[name] == value
    assert {"--enable-scale-out", "--enforce-eager"} <= set(words)
    variables = environment(config)
    assert (variables["OMP_NUM_THREADS"], variables["A"], variables["VLLM_SERVER_DEV_MODE"]) == ("2", "b", "1")
    on_gpu = ServerConfig(device="gpu")
    assert "--enforce-eager" not in command(on_gpu, LAUNCH, 1)
    assert "VLLM_CPU_KVCACHE_SPACE" not in environment(on_gpu)


def test_a_killed_server_is_started_again_and_brought_up(tmp_path: Path):
    fleet = start(fleet_config(fake_python(tmp_path), max_restarts=1), tmp_path)
    try:
        fleet.start()
        asyncio.run(fleet.publish(None, 0))
        (leash,) = [p for p in psutil.Process().children() if "leash.py" in " ".join(p.cmdline())]
        (server,) = leash.children()
        server.kill()
        completion = asyncio.run(fleet.generate(make_request(5)))  # waits for the restart
        assert (completion.versions_T == 0).all()
        metrics = fleet.sync_metrics()
        assert (metrics["fleet/num_restarts"], metrics["fleet/num_evictions"]) == (1, 1)
        assert not leash.is_running()
        (second,) = [p for p in psutil.Process().children() if "leash.py" in " ".join(p.cmdline())]
        second.children()[0].kill()
        with pytest.raises(SamplerLost, match="lost for good: replica0 gone: http"):
            asyncio.run(fleet.generate(make_request(6)))
    finally:
        asyncio.run(fleet.close())
    assert not [p for p in psutil.Process().children() if "leash.py" in " ".join(p.cmdline())]


def test_servers_of_a_run_in_a_relative_folder_find_their_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = load(RunConfig, [ROOT / "tests" / "system" / "vllm.toml"])
    arch, folder = config.model.resolve(), Path("runs/one")
    fleet_settings = fleet_config(fake_python(tmp_path))
    monkeypatch.chdir(tmp_path)
    Tokenizer.byte_level().save(folder / "tokenizer")
    weights = init_params(arch, make_mesh(config.mesh), jax.random.key(0))
    says: list[str] = []
    fleet = rooms.make_fleet(config, arch, fleet_settings, weights, folder / "fleet", folder / "tokenizer", says.append)
    asyncio.run(fleet.close())
    assert sorted(path.name for path in (folder / "fleet").iterdir()) == ["model", "replica0.log", "updates"]


def test_a_server_that_dies_at_its_start_says_why(tmp_path: Path):
    python = script(tmp_path, "echo 'RuntimeError: Engine core initialization failed'; exit 3")
    fleet = start(fleet_config(python), tmp_path)
    try:
        with pytest.raises(
            ServerLost, match=r"exit code 3; the end of .*replica0.log:\nRuntimeError: Engine core init"
        ):
            fleet.start()
    finally:
        asyncio.run(fleet.close())


def test_a_server_that_never_answers_is_given_up(tmp_path: Path):
    python = script(tmp_path, "echo loading; exec sleep 60")
    fleet = start(fleet_config(python, start_timeout_s=3.0), tmp_path)
    try:
        with pytest.raises(ServerLost, match=r"start_timeout_s=3; the end of .*:\nloading"):
            fleet.start()
    finally:
        asyncio.run(fleet.close())


def test_no_server_outlives_a_run_that_is_killed(tmp_path: Path):
    python = script(tmp_path, "trap '' TERM; sleep 60 & sleep 60")  # and it does not end when it is asked to
    code = (
        "import pathlib, time\n"
        "from rl_jax.rollout.server import *\n"
        f"launch = Launch(model_dir=pathlib.Path('/m'), dtype='float32', max_len=8, max_running=1)\n"
        f"config = ServerConfig(python={python!r}, stop_grace_s=0.2)\n"
        f"server = ServerProcess(config, launch, pathlib.Path({str(tmp_path)!r}) / 'logs' / 's.log')\n"
        "server.start()\nprint(server._process.pid, flush=True)\ntime.sleep(60)\n"
    )
    run = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert run.stdout is not None
    with run:
        leash = psutil.Process(int(run.stdout.readline()))
        until(lambda: len(leash.children(recursive=True)) == 3)
        processes = [leash, *leash.children(recursive=True)]
        run.send_signal(signal.SIGKILL)
    _, alive = psutil.wait_procs(processes, timeout=30)
    assert not alive


def test_the_end_kills_what_does_not_end_when_asked(tmp_path: Path):
    python = script(tmp_path, "trap '' TERM; echo up; sleep 60 & sleep 60")
    server = ServerProcess(ServerConfig(python=python, stop_grace_s=0.2), LAUNCH, tmp_path / "logs" / "s.log")
    server.start()
    until(lambda: server.tail() == "up")
    sleeping = [p for p in psutil.Process().children(recursive=True) if "sleep" in p.name()]
    assert sleeping
    server.end()
    assert not server.is_running
    _, alive = psutil.wait_procs(sleeping, timeout=30)
    assert not alive
