"""Runs an entry on every process of a run: process 0 leads, the others follow it (docs/hosts.md)."""

import logging
from collections.abc import Callable
from typing import Literal

from rl_jax import cli, rooms
from rl_jax.config import ConfigError
from rl_jax.half.follow import follow
from rl_jax.half.half import TrainerHalf
from rl_jax.hosts.group import Ending, Hosts
from rl_jax.interrupt import Interrupt
from rl_jax.progress import Dashboard

logger = logging.getLogger(__name__)

Does = Literal["rl", "sft"]


def on_hosts(
    config: cli.RunConfig, does: Does, lead: Callable[[cli.RunConfig, Hosts], int], dashboard: Dashboard
) -> int:
    """Meet the other processes, then lead them or follow; returns the exit code.

    Raises:
        ConfigError: a fault of the config, or of the processes among each other; the others are told.
    """
    cli.check(config, config.model.resolve(), does)
    config, hosts = cli.join(config)
    if not hosts.is_first:
        lead = _followed(does, dashboard)
    try:
        code = lead(config, hosts)
    except BaseException as error:
        code = cli.EXIT_BAD_INPUT if isinstance(error, ConfigError) else cli.EXIT_FAILED
        code = cli.EXIT_INTERRUPTED if isinstance(error, KeyboardInterrupt) else code
        hosts.leave(Ending(code=code, text=str(error) or "it was stopped at once", kind=type(error).__name__))
        raise
    if not code:
        hosts.leave(Ending(code=0, text=""))
    return code


def _followed(does: Does, dashboard: Dashboard) -> Callable[[cli.RunConfig, Hosts], int]:
    def run(config: cli.RunConfig, hosts: Hosts) -> int:
        with dashboard, Interrupt(dashboard) as interrupt:
            interrupt.promise = "process 0 is asked to finish the step and to write a checkpoint"
            hosts.wants_stop = lambda: interrupt.is_requested
            dashboard.say(f"process {hosts.process_id} of {hosts.num_processes} follows {hosts.names[0]}")
            half = TrainerHalf(config, config.model.resolve(), rooms.start_mesh(config), does)
            try:
                follow(half, hosts)
                half.close()
            except (KeyboardInterrupt, *cli.RUN_FAILURES) as error:
                if isinstance(error, ConfigError):
                    raise
                ending = cli.ending_of(error, interrupt, hosts)
                logger.debug("process %d ended", hosts.process_id, exc_info=error)
                hosts.leave(ending)
                dashboard.say(f"process {hosts.process_id} ends: {ending.text}; {hosts.resume}")
                return ending.code
            dashboard.say(f"process {hosts.process_id} has ended with the run")
            return 0

    return run
