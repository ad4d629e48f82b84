"""Starts and ends one vLLM server on this machine (step 5 of docs/walk.md).

The server runs under the Python of the fleet environment, in a process group of its own that ends with the run
(rl_jax/rollout/leash.py), and writes to a log of its own. Knows no HTTP beyond the address, no request, no weights.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rl_jax.config import refuse

TAIL_CHARS = 3000
END_S = 5.0
"""Beyond the grace, until the leash itself is killed."""
ROOT = Path(__file__).resolve().parents[2]
OFFLINE = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
"""Nothing of a run leaves its machines, and nothing is fetched meanwhile."""
SAID_BY_THE_RUN = {
    *("--host", "--port", "--served-model-name", "--dtype", "--max-model-len", "--max-num-seqs", "--logprobs-mode"),
    *("--generation-config", "--weight-transfer-config", "--worker-extension-cls"),
}
"""Options that no `args` may change: the client counts on them."""
NOT_FOR_SERVERS = ("PYTHONPATH", "VLLM_ENABLE_V1_MULTIPROCESSING", "JAX_PLATFORMS", "XLA_FLAGS")


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """The vLLM servers that the run starts on this machine; without effect where `urls` names running ones."""

    count: int = 1
    """Servers to start; each holds the whole model."""
    python: str = ".venv-fleet/bin/python"
    """Python of the fleet environment (make fleet), relative to the project or absolute. It has vLLM and no JAX."""
    device: Literal["cpu", "gpu"] = "cpu"
    """"cpu" adds what vLLM needs there: eager mode, no binding of threads, a KV cache in main memory."""
    kv_cache_gib: int = 1
    """Memory of the KV cache on a CPU in GiB; a GPU takes what --gpu-memory-utilization leaves."""
    threads: int = 1
    """Threads of one server on a CPU."""
    args: tuple[str, ...] = ()
    """Further words of the vllm serve command, for example ["--tensor-parallel-size", "8"]."""
    env: dict[str, str] = field(default_factory=dict)
    """Further environment variables."""
    start_timeout_s: float = 300.0
    """Seconds until a started server must answer."""
    stop_grace_s: float = 10.0
    """Seconds between SIGTERM and SIGKILL."""
    max_restarts: int = 3
    """Times that a server which was lost is started again, each."""

    def __post_init__(self) -> None:
        refuse(
            [
                None if self.count >= 1 else f"count={self.count}: must be at least 1",
                None if self.threads >= 1 else f"threads={self.threads}: must be at least 1",
                None if self.kv_cache_gib >= 1 else f"kv_cache_gib={self.kv_cache_gib}: must be at least 1",
                None if self.start_timeout_s > 0 else f"start_timeout_s={self.start_timeout_s}: must be positive",
                None if self.stop_grace_s >= 0 else f"stop_grace_s={self.stop_grace_s}: must be at least 0",
                *(
                    f"args={list(self.args)}: {word} is said by the run; see sampler.max_len, max_running, dtype, server"
                    for word in SAID_BY_THE_RUN & {word.partition("=")[0] for word in self.args}
                ),
                None if self.max_restarts >= 0 else f"max_restarts={self.max_restarts}: must be at least 0",
            ]
        )

    @property
    def python_path(self) -> Path:
        """Where the Python of the fleet environment lies."""
        return Path(self.python) if Path(self.python).is_absolute() else ROOT / self.python


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What a server of this run serves, and how long and how many its requests are."""

    model_dir: Path
    dtype: str
    max_len: int
    max_running: int


def command(config: ServerConfig, launch: Launch, port: int) -> list[str]:
    """Return the command of one server."""
    return [
        *(str(config.python_path), "-m", "vllm.entrypoints.cli.main", "serve", str(launch.model_dir)),
        *("--host", "127.0.0.1", "--port", str(port), "--served-model-name", "policy"),
        *("--dtype", launch.dtype, "--max-model-len", str(launch.max_len), "--max-num-seqs", str(launch.max_running)),
        *("--logprobs-mode", "processed_logprobs", "--generation-config", "vllm", "--seed", "0"),
        *("--enable-scale-out", "--enable-prompt-tokens-details", "--disable-uvicorn-access-log"),
        *("--weight-transfer-config", '{"backend":"rl_jax"}'),
        *("--worker-extension-cls", "bridge.vllm_plugin.worker.WorkerExtension"),
        *(["--enforce-eager"] if config.device == "cpu" else []),
        *config.args,
    ]


def environment(config: ServerConfig) -> dict[str, str]:
    """Return the variables that a server gets beside those of the run."""
    on_cpu = {
        "VLLM_CPU_KVCACHE_SPACE": str(config.kv_cache_gib),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(config.threads),
        "TORCHDYNAMO_DISABLE": "1",  # else half a minute of C++ compilation at the first request
    }
    open_routes = {"VLLM_SERVER_DEV_MODE": "1"}  # those of weight updates
    return OFFLINE | open_routes | (on_cpu if config.device == "cpu" else {}) | config.env


class ServerProcess:
    """One server process at a time; `start` may be called again after it has ended."""

    def __init__(self, config: ServerConfig, launch: Launch, log: Path):
        """`log`: its output is appended there."""
        self.log = log
        self.url = ""
        self._config = config
        self._launch = launch
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0

    def start(self) -> None:
        """Start it on a free port; `url` says where it will answer."""
        assert not self.is_running, f"{self.url} runs already"
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._log_start = self.log.stat().st_size if self.log.exists() else 0
        order = {
            "command": command(self._config, self._launch, port),
            "grace_s": self._config.stop_grace_s,
        }
        with self.log.open("ab") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-I", str(Path(__file__).with_name("leash.py"))],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # out of reach of the terminal's Ctrl-C: the run ends it, in its order
                env=_without({**os.environ, **environment(self._config)}),
                cwd=self.log.parent,  # python -m looks for modules in the working directory first
            )
        assert self._process.stdin is not None, "asked for as a pipe"
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()

    @property
    def is_running(self) -> bool:
        """Whether the process lives; it may not answer yet."""
        return self._process is not None and self._process.poll() is None

    @property
    def how_it_ended(self) -> str:
        """How the process ended, with the last words of its log."""
        code = self._process.poll() if self._process else None
        how = "did not start" if self._process is None else f"exit code {code}"
        if code is not None and code > 128:
            with contextlib.suppress(ValueError):
                how = f"signal {signal.Signals(code - 128).name}"
        return f"{how}; the end of {self.log}:\n{self.tail()}"

    def tail(self) -> str:
        """Return the last words of its log since the last start."""
        try:
            with self.log.open("rb") as log:
                size = log.seek(0, os.SEEK_END)
                log.seek(max(self._log_start, size - TAIL_CHARS))
                return log.read().decode(errors="replace").strip()
        except OSError as error:
            return f"it cannot be read ({error.strerror})"

    def kill(self) -> None:
        """Kill the whole group at once, and do not wait for it."""
        if self._process is not None and self.is_running:
            _kill_children(self._process.pid)

    def end(self) -> None:
        """End the whole group, asked first and killed after a grace; returns when it is gone."""
        process = self._process
        if process is None:
            return
        assert process.stdin is not None, "asked for as a pipe"
        with contextlib.suppress(OSError):  # it is gone already
            process.stdin.close()
        try:
            process.wait(self._config.stop_grace_s + END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _kill_children(leash: int) -> None:
    """Kill the process group that a leash holds; the leash then ends by itself."""
    children = Path(f"/proc/{leash}/task/{leash}/children")
    with contextlib.suppress(OSError):  # the leash is gone, or this is no Linux: then the grace passes first
        for child in children.read_text().split():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(int(child), signal.SIGKILL)


def _without(environment: dict[str, str]) -> dict[str, str]:
    """Return the environment without what is for the trainer only."""
    return {name: value for name, value in environment.items() if name not in NOT_FOR_SERVERS}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
