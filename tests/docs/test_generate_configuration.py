"""The page of a toy config class, word for word, and the check that finds it out of date."""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from docs.generate_configuration import INTRODUCTION, main, render


@dataclass(frozen=True, kw_only=True)
class Base:
    """Shared keys."""

    lr: float = 0.5
    """Step size."""


@dataclass(frozen=True, kw_only=True)
class Adam(Base):
    """The first
    optimizer."""

    type: Literal["adam"] = "adam"
    betas: tuple[float, ...] = (0.9, 0.95)
    """Decay of the two
    moments."""


@dataclass(frozen=True, kw_only=True)
class Muon(Base):
    """The second optimizer."""

    type: Literal["muon"] = "muon"


@dataclass(frozen=True, kw_only=True)
class Env:
    """A source of tasks."""

    id: str
    """Name."""
    settings: dict[str, object] = field(default_factory=dict)
    """Keyword arguments."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """All of a run."""

    steps: int
    """Optimizer steps of <run>, P*G `a*b` each."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute: a|b."""
    seed: int | None = None
    """Of everything."""
    optim: Adam | Muon = field(default_factory=lambda: Muon(lr=0.25))
    """How to move."""
    envs: tuple[Env, ...] = (Env(id="reverse"),)
    """Mixed by weight."""
    fleet: dict[str, Env] = field(default_factory=dict)
    """By name."""
    made: int = field(default=3, init=False)


EXPECTED = r"""
## Top level

All of a run.

| key | type | default | meaning |
| --- | --- | --- | --- |
| `steps` | int | required | Optimizer steps of \<run>, P\*G `a*b` each. |
| `dtype` | `"float32"` or `"bfloat16"` | `"float32"` | Compute: a\|b. |
| `seed` | int | unset | Of everything. |
| `optim` | table | `{ type = "muon", lr = 0.25 }` | How to move. |
| `envs` | list of table | `[{ id = "reverse" }]` | Mixed by weight. |
| `fleet` | table of table | `{}` | By name. |

## `[optim]` with `type = "adam"`

The first optimizer.

| key | type | default | meaning |
| --- | --- | --- | --- |
| `lr` | float | `0.5` | Step size. |
| `betas` | list of float | `[0.9, 0.95]` | Decay of the two moments. |

## `[optim]` with `type = "muon"`

The second optimizer.

| key | type | default | meaning |
| --- | --- | --- | --- |
| `lr` | float | `0.5` | Step size. |

## `[[envs]]`

A source of tasks.

| key | type | default | meaning |
| --- | --- | --- | --- |
| `id` | str | required | Name. |
| `settings` | table of any | `{}` | Keyword arguments. |

## `[fleet.<name>]`

A source of tasks.

| key | type | default | meaning |
| --- | --- | --- | --- |
| `id` | str | required | Name. |
| `settings` | table of any | `{}` | Keyword arguments. |
"""


def test_page_of_a_toy_config():
    assert render(Run) == INTRODUCTION + EXPECTED


def test_field_without_a_string_is_named():
    @dataclass(frozen=True, kw_only=True)
    class Bare:
        """Says nothing of its keys."""

        steps: int
        name: str = "x"
        "A string."

    with pytest.raises(ValueError, match=r"without a string under them: .*Bare\.steps$"):
        render(Bare)


def test_check_fails_until_the_page_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    module = sys.modules[__name__].__name__
    arguments = ["--root", f"{module}:Run", "--page", str(tmp_path / "page.md")]
    assert main([*arguments, "--check"]) == 1
    assert "run `python -m docs.generate_configuration`" in capsys.readouterr().err
    assert main(arguments) == 0
    assert main([*arguments, "--check"]) == 0
    (tmp_path / "page.md").write_text(render(Run).replace("Step size", "Old text"))
    assert main([*arguments, "--check"]) == 1
    assert "-| `lr` | float | `0.5` | Old text. |" in capsys.readouterr().out
