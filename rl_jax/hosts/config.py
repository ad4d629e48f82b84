"""Which processes train together, and what launchers say about that in the environment of each. No JAX."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from rl_jax.config import ConfigError, refuse

Environment = Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class HostsConfig:
    """The processes of a run, one or more on each host: the same table and the same command for all of them."""

    num_processes: int = 1
    """Processes that train together; 1 = this one alone."""
    process_id: int | None = None
    """Number of this process, 0 ..; process 0 holds the run. Not recorded with the run: the launcher says it, or --set
    hosts.process_id=1."""
    coordinator: str = ""
    """host:port at which process 0 waits for the others; any free port of it. Keep it inside a trusted network."""
    launcher: Literal["none", "jax", "slurm", "kubernetes"] = "none"
    """Whose environment variables say what this table leaves out: JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and
    JAX_PROCESS_ID; SLURM_STEP_NODELIST (its first host, with `port`), SLURM_NTASKS and SLURM_PROCID;
    JOB_COMPLETION_INDEX of an indexed Job."""
    port: int = 7700
    """slurm: port of process 0."""
    start_timeout_s: float = 300.0
    """How long the processes wait for each other at the start; > 0."""
    timeout_s: float = 20.0
    """A process that is silent for so long, stopped or cut off, is lost: all others end within 2 s after that. One that
    ends is noticed at once. At least 1."""
    order_timeout_s: float = 3600.0
    """What all processes do together, a step or a checkpoint, may take so long, compiling included; then the run ends;
    > 0."""

    def __post_init__(self) -> None:
        has_id = self.process_id is not None
        least = {"start_timeout_s": 0.0, "order_timeout_s": 0.0}
        refuse(
            [
                None if self.num_processes >= 1 else f"num_processes={self.num_processes}: must be at least 1",
                None
                if not has_id or 0 <= (self.process_id or 0) < max(1, self.num_processes)
                else f"process_id={self.process_id}: must be 0 to {self.num_processes - 1}, one for each of "
                f"num_processes={self.num_processes}",
                None
                if not self.coordinator or _address(self.coordinator)
                else f"coordinator={self.coordinator!r}: expected host:port, for example 10.0.0.7:7700",
                None if 0 < self.port < 2**16 else f"port={self.port}: must be 1 to 65535",
                None if 1 <= self.timeout_s < math.inf else f"timeout_s={self.timeout_s}: must be at least 1",
                *(
                    None if low < getattr(self, name) < math.inf else f"{name}={getattr(self, name)}: must be > {low:g}"
                    for name, low in least.items()
                ),
            ]
        )

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the coordinator."""
        found = _address(self.coordinator)
        assert found, f"hosts.coordinator={self.coordinator!r}: resolve() checks it"
        return found


def resolve(config: HostsConfig, environment: Environment) -> HostsConfig:
    """Return the table with what the launcher said filled in; what the table gives itself is kept.

    Raises:
        ConfigError: several processes, and not known where process 0 waits or which one this is.
    """
    told = _LAUNCHERS[config.launcher](environment, config)
    try:
        filled = replace(
            config,
            num_processes=told.num_processes if config.num_processes == 1 else config.num_processes,
            process_id=told.process_id if config.process_id is None else config.process_id,
            coordinator=config.coordinator or told.coordinator,
        )
    except ConfigError as error:
        raise ConfigError([f"hosts.{fault}" for fault in error.faults]) from error
    if filled.num_processes == 1:
        return replace(filled, process_id=0)
    refuse(_missing(filled))
    return filled


def _missing(config: HostsConfig) -> list[str | None]:
    reads = {
        "none": "set it, or name a launcher in hosts.launcher",
        "jax": "set it, or JAX_COORDINATOR_ADDRESS and JAX_PROCESS_ID of each process",
        "slurm": "set it, or start the processes with srun",
        "kubernetes": "set it; JOB_COMPLETION_INDEX of an indexed Job is the process_id only",
    }[config.launcher]
    return [
        None if config.process_id is not None else f"hosts.process_id: not known which process this is; {reads}",
        None if config.coordinator else f"hosts.coordinator: not known where process 0 waits for the others; {reads}",
    ]


def _none(environment: Environment, config: HostsConfig) -> HostsConfig:
    return HostsConfig()


def _jax(environment: Environment, config: HostsConfig) -> HostsConfig:
    count = max(1, _number(environment, "JAX_NUM_PROCESSES") or config.num_processes)
    address = environment.get("JAX_COORDINATOR_ADDRESS", "")
    return _told(count, _number(environment, "JAX_PROCESS_ID"), address)


def _slurm(environment: Environment, config: HostsConfig) -> HostsConfig:
    first = first_host(environment.get("SLURM_STEP_NODELIST", ""))
    count = max(1, _number(environment, "SLURM_NTASKS") or config.num_processes)
    return _told(count, _number(environment, "SLURM_PROCID"), f"{first}:{config.port}" if first else "")


def _kubernetes(environment: Environment, config: HostsConfig) -> HostsConfig:
    return _told(config.num_processes, _number(environment, "JOB_COMPLETION_INDEX"), "")


_LAUNCHERS: dict[str, Callable[[Environment, HostsConfig], HostsConfig]] = {
    "none": _none,
    "jax": _jax,
    "slurm": _slurm,
    "kubernetes": _kubernetes,
}


def _told(count: int, process_id: int | None, coordinator: str) -> HostsConfig:
    try:
        return HostsConfig(num_processes=count, process_id=process_id, coordinator=coordinator)
    except ConfigError as error:
        raise ConfigError([f"hosts.{fault} (as the launcher says)" for fault in error.faults]) from error


def first_host(nodes: str) -> str:
    """Return the first host of a Slurm list: "tpu[03-07,9],x" is tpu03."""
    match = re.match(r"([^,\[]*)(?:\[([^,\-\]]+))?", nodes)
    return "" if match is None else match[1] + (match[2] or "")


def _number(environment: Environment, name: str) -> int | None:
    text = environment.get(name)
    if text is None:
        return None
    if not text.isdecimal():
        raise ConfigError([f"{name}={text!r} in the environment: expected a number, hosts.launcher reads it"])
    return int(text)


def _address(text: str) -> tuple[str, int] | None:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        return None
    return host.strip("[]"), int(port)
