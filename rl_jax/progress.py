"""What a person sees while a run works: a live table on a terminal, one line a report elsewhere. Knows no room."""

import time
from collections.abc import Mapping, Sequence
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

Column = tuple[str, str, str]
"""(heading, metric name, format), for example ("reward", "train/agg/all/reward/mean", ".3f")."""

LINES_PER_PHASE = 40


class Dashboard:
    """Shows one phase at a time: a bar with the time left, and the last values of some metrics."""

    def __init__(self, console: Console | None = None):
        self.console = console or Console()
        self._rows: list[tuple[int, Mapping[str, float]]] = []
        self._last: dict[str, float] = {}
        self._columns: Sequence[Column] = ()
        self._total = 0
        self._started_s = 0.0
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.console,
        )
        self._live = Live(console=self.console, refresh_per_second=4, transient=True)

    def __enter__(self) -> "Dashboard":
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.console.is_terminal:
            self._live.stop()

    def phase(self, name: str, total: int, done: int, columns: Sequence[Column]) -> None:
        """Begin a phase of `total` steps of which `done` are behind."""
        for task in self._bar.task_ids:
            self._bar.remove_task(task)
        self._task = self._bar.add_task(name, total=total, completed=done)
        self._columns, self._total, self._rows, self._started_s = columns, total, [], time.monotonic()
        self._first, self._last = done, {}
        if not self.console.is_terminal:
            self.say(f"{name}: " + " ".join(f"{heading}" for heading, _, _ in columns))

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the metrics after `step` steps; of one that this step has not, the last value."""
        self._bar.update(self._task, completed=step)
        # Between two batches that were cut from the queue nothing may have arrived: then there is no news of rewards.
        metrics = self._last = {**self._last, **metrics}
        self._rows = [*self._rows[-11:], (step, metrics)]
        if self.console.is_terminal:
            self._live.update(Group(self._table(), self._bar))
        elif step % max(1, self._total // LINES_PER_PHASE) == 0 or step == self._total:
            passed_s = time.monotonic() - self._started_s
            left_s = passed_s / max(1, step - self._first) * (self._total - step)
            values = " ".join(f"{heading} {_shown(metrics, key, form)}" for heading, key, form in self._columns)
            self.say(f"step {step}/{self._total} {values} left {left_s:.0f}s")

    def say(self, text: str) -> None:
        """Print a line that stays."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _table(self) -> Table:
        table = Table(expand=False)
        table.add_column("step", justify="right")
        for heading, _, _ in self._columns:
            table.add_column(heading, justify="right")
        for step, metrics in self._rows:
            table.add_row(str(step), *(_shown(metrics, key, form) for _, key, form in self._columns))
        return table


def _shown(metrics: Mapping[str, float], key: str, form: str) -> str:
    return format(metrics[key], form) if key in metrics else "-"
