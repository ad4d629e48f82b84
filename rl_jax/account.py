"""The account of a run: python -m rl_jax.account RUN_DIR. Prints where every rollout is; exit code 1 if it does not balance."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from rl_jax.orchestrator.ledger import FILE, Account, Ledger, LedgerError


def main(argv: Sequence[str]) -> int:
    """Print the account of a run folder; return 0 if it balances, else 1."""
    parser = argparse.ArgumentParser(prog="python -m rl_jax.account", description=__doc__)
    parser.add_argument("run_dir", type=Path, help=f"run folder, holds {FILE}")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(argv)
    path = options.run_dir / FILE
    if not path.is_file():
        print(f"{path}: no such file; expected the folder of a run", file=sys.stderr)
        return 1
    try:
        account, faults = _read(path)
    except LedgerError as error:
        print(error, file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps({**dataclasses.asdict(account), "balances": not faults, "faults": faults}))
    else:
        _print(account, faults)
    return 1 if faults else 0


def _read(path: Path) -> tuple[Account, list[str]]:
    """Return the account and what is wrong with it."""
    ledger = Ledger(path)
    try:
        return ledger.account(), ledger.faults()
    finally:
        ledger.close()


def _print(account: Account, faults: Sequence[str]) -> None:
    steps = f"steps {account.steps[0]} to {account.steps[1]}" if account.steps else ""
    table = Table("rollouts", "number", "", title="account of the run")
    table.columns[1].justify = "right"
    table.add_row("dispatched", str(account.dispatched), "", end_section=True)
    table.add_row("in flight", str(account.in_flight), "")
    table.add_row("ready", str(account.ready), "")
    table.add_row("trained", str(account.trained), steps)
    for reason, number in account.dropped.items():
        table.add_row(f"dropped: {reason}", str(number), account.by_reason.get(reason, ""))
    by_env = Table("environment", "in flight", "ready", "trained", "dropped")
    for env, statuses in account.by_env.items():
        numbers = [str(statuses.get(status, 0)) for status in ("in_flight", "ready", "trained", "dropped")]
        by_env.add_row(env, *numbers)
    console = Console(highlight=False)
    console.print(table, by_env)
    for fault in faults:
        console.print(f"DOES NOT BALANCE: {fault}", markup=False)
    if not faults:
        console.print(f"balances: every one of {account.dispatched} rollouts is counted once")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
