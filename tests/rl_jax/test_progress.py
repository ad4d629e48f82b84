"""Progress without a terminal is a bounded number of lines; on a terminal it is a table with the last steps."""

import io

from rich.console import Console

from rl_jax.progress import LINES_PER_PHASE, Dashboard

COLUMNS = [("reward", "train/reward", ".2f"), ("exact", "train/exact", ".1f")]


def shown(total: int, done: int = 0, *, is_terminal: bool = False) -> str:
    """Return the text of a phase whose reward after step s is s / 100, and whose exactness is never known."""
    console = Console(file=io.StringIO(), force_terminal=is_terminal, width=100, height=30, color_system=None)
    with Dashboard(console) as dashboard:
        dashboard.phase("training", total, done, COLUMNS)
        for step in range(done + 1, total + 1):
            dashboard.step(step, {"train/reward": step / 100})
            if is_terminal:
                dashboard._live.refresh()
        dashboard.say("the [end] of it")
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_every_step_of_a_short_phase_is_a_line() -> None:
    lines = shown(3).splitlines()
    assert lines[0] == "training: reward exact"
    assert [line.rpartition(" left")[0] for line in lines[1:4]] == [
        f"step {step}/3 reward 0.0{step} exact -" for step in (1, 2, 3)
    ]
    assert lines[4:] == ["the [end] of it"]


def test_a_step_without_news_of_a_metric_shows_its_last_value() -> None:
    console = Console(file=io.StringIO(), force_terminal=False, width=100)
    with Dashboard(console) as dashboard:
        dashboard.phase("training", 3, 0, COLUMNS)
        for step, metrics in enumerate(({"train/reward": 0.25}, {"train/exact": 1.0}, {"train/reward": 0.5}), start=1):
            dashboard.step(step, metrics)
    assert isinstance(console.file, io.StringIO)
    lines = [line.rpartition(" left")[0].partition(" ")[2] for line in console.file.getvalue().splitlines()[1:]]
    assert lines == ["1/3 reward 0.25 exact -", "2/3 reward 0.25 exact 1.0", "3/3 reward 0.50 exact 1.0"]


def test_a_long_phase_is_some_lines_and_ends_with_its_last_step() -> None:
    steps = [line.split()[1] for line in shown(1003).splitlines() if line.startswith("step ")]
    assert LINES_PER_PHASE <= len(steps) <= LINES_PER_PHASE + 2
    assert steps[-1] == "1003/1003"


def test_a_resumed_phase_goes_on_from_where_it_was() -> None:
    steps = [line.split()[1] for line in shown(5, done=3).splitlines() if line.startswith("step ")]
    assert steps == ["4/5", "5/5"]


def test_terminal_shows_a_table_of_the_last_steps() -> None:
    text = shown(20, is_terminal=True)
    last = text[text.rindex("reward") :]
    assert "0.20" in last and "0.09" in last and "0.08" not in last
    assert "20/20" in last
    assert "the [end] of it" in text
