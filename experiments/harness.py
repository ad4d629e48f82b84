"""What the experiments share: the conditions of a measurement, and its table, plot and README."""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import psutil
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

EXPERIMENTS = Path(__file__).parent
ROOT = EXPERIMENTS.parent
TRAINER_PYTHON = Path(sys.executable)
BUSY_PERCENT = 20.0
"""Use of all cores by others from which on a measurement is marked."""
FLEET_PYTHON = ROOT / ".venv-fleet/bin/python"
RESULT = re.compile(r"(?<=<!-- result -->\n).*(?=<!-- end of result -->)", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Report:
    """What an experiment found, all of it as text for people but `raw`."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str]
    """Facts beside the table, one line each."""
    raw: dict[str, object]
    """Every measured number, for results.json."""
    figure: Figure


def is_quick(description: str | None) -> bool:
    """Parse the command line of an experiment."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="smallest sizes, to see that it works; writes no result")
    return parser.parse_args().quick


def conditions() -> dict[str, str]:
    """Return what a number depends on. Call it before measuring; it watches the machine for a second."""
    models = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    memory = re.search(r"MemTotal:\s*(\d+)", Path("/proc/meminfo").read_text())
    return {
        "hardware": f"{models[0] if models else platform.processor()}, {os.cpu_count()} cores, "
        f"{int(memory.group(1)) / 2**20 if memory else 0:.0f} GiB",
        "commit": _commit(),
        "versions": f"Python {platform.python_version()}, jax {jax.__version__}",
        "machine before": _use(),
        "date": time.strftime("%Y-%m-%d"),
    }


def publish(folder: Path, report: Report, where: dict[str, str], quick: bool) -> None:
    """Print the report; unless quick, write results.json and plot.png and put the table into README.md."""
    where = {**where, "machine after": _use()}
    console = Console(soft_wrap=True)
    table = Table(*report.columns, title=report.title)
    for row in report.rows:
        table.add_row(*row)
    console.print(table)
    facts = [*report.notes, *(f"{name}: {value}" for name, value in where.items())]
    for fact in facts:
        console.print(f"- {fact}", markup=False, highlight=False)
    if quick:
        return
    (folder / "results.json").write_text(json.dumps({"conditions": where, **report.raw}, indent=1) + "\n")
    report.figure.savefig(folder / "plot.png", dpi=110)
    lines = [report.columns, ["---"] * len(report.columns), *report.rows]
    markdown = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    bullets = "\n".join(f"- {fact}" for fact in facts)
    readme = folder / "README.md"
    text, found = RESULT.subn(lambda _: f"{markdown}\n\n{bullets}\n\n![plot](plot.png)\n", readme.read_text())
    assert found == 1, f"{readme}: expected one pair of result marks, found {found}"
    readme.write_text(text)
    console.print(f"written to {folder}")


def _use() -> str:
    percent = psutil.cpu_percent(interval=1.0)
    return f"{percent:.0f} % in use" + (": BUSY, trust no speed of this run" if percent > BUSY_PERCENT else "")


def _commit() -> str:
    ask = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    found = subprocess.run(ask, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"
