"""TOML and overrides become a frozen dataclass, and every fault of a config comes in one message."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_jax.config import ConfigError, load, merge, refuse, to_toml


@dataclass(frozen=True, kw_only=True)
class Adam:
    type: Literal["adam"] = "adam"
    lr: float = 1e-3

    def __post_init__(self):
        refuse(["lr=0 trains nothing; expected lr > 0" if self.lr <= 0 else None])


@dataclass(frozen=True, kw_only=True)
class Muon:
    type: Literal["muon"] = "muon"
    momentum: float = 0.95


@dataclass(frozen=True, kw_only=True)
class Env:
    id: str
    weight: float = 1.0
    settings: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Run:
    steps: int
    dtype: Literal["float32", "bfloat16"] = "float32"
    resume: bool = False
    seed: int | None = None
    path: str | None = None
    buckets: tuple[int, ...] = (128,)
    sizes: tuple[int, ...] | None = None
    envs: tuple[Env, ...] = ()
    limits: dict[str, int] = field(default_factory=dict)
    adam: Adam = field(default_factory=Adam)
    optim: Adam | Muon = field(default_factory=Adam)
    eval: Env | None = None


def load_text(tmp_path: Path, text: str, *overrides: str) -> Run:
    file = tmp_path / "run.toml"
    file.write_text(text)
    return load(Run, [file], overrides)


def faults_of(tmp_path: Path, text: str, *overrides: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        load_text(tmp_path, text, *overrides)
    return caught.value.faults


FULL = """
steps = 7
dtype = "bfloat16"
resume = true
seed = 3
path = "weights"
buckets = [64, 256, 1024]
limits = { short = 5, long = 11 }
[adam]
lr = 1
[optim]
type = "muon"
momentum = 0.5
[[envs]]
id = "reverse_text"
[[envs]]
id = "arithmetic"
weight = 2.5
settings = { digits = 2, ops = ["+", "-"] }
[eval]
id = "reverse_text"
"""

BUILT = Run(
    steps=7,
    dtype="bfloat16",
    resume=True,
    seed=3,
    path="weights",
    buckets=(64, 256, 1024),
    limits={"short": 5, "long": 11},
    adam=Adam(lr=1.0),
    optim=Muon(momentum=0.5),
    envs=(Env(id="reverse_text"), Env(id="arithmetic", weight=2.5, settings={"digits": 2, "ops": ["+", "-"]})),
    eval=Env(id="reverse_text"),
)


def test_file_builds_every_kind_of_field(tmp_path: Path):
    config = load_text(tmp_path, FULL)
    assert config == BUILT
    assert type(config.adam.lr) is float


def test_defaults_fill_what_the_file_leaves_out(tmp_path: Path):
    assert load_text(tmp_path, "steps = 2") == Run(steps=2)


def test_toml_of_a_config_loads_as_the_same_config(tmp_path: Path):
    assert load_text(tmp_path, to_toml(BUILT)) == BUILT


@given(
    steps=st.integers(-(2**63), 2**63 - 1),
    lr=st.floats(min_value=1e-300, allow_infinity=False),
    path=st.none() | st.text(st.characters(codec="utf-8")),
    buckets=st.lists(st.integers(1, 9), max_size=3).map(tuple),
    limits=st.dictionaries(st.text(st.characters(codec="utf-8")), st.integers(0, 9), max_size=3),
)
def test_any_config_survives_its_toml(
    tmp_path_factory: pytest.TempPathFactory,
    steps: int,
    lr: float,
    path: str | None,
    buckets: tuple[int, ...],
    limits: dict[str, int],
):
    config = Run(steps=steps, adam=Adam(lr=lr), path=path, buckets=buckets, limits=limits)
    file = tmp_path_factory.mktemp("config") / "run.toml"
    file.write_text(to_toml(config), encoding="utf-8")
    assert load(Run, [file]) == config


def test_later_file_wins_key_by_key(tmp_path: Path):
    first, second = tmp_path / "a.toml", tmp_path / "b.toml"
    first.write_text('steps = 1\nbuckets = [1, 2]\n[optim]\ntype = "muon"\nmomentum = 0.1\n[limits]\na = 1\nb = 2')
    second.write_text("steps = 5\nbuckets = [9]\n[limits]\nb = 3")
    config = load(Run, [first, second])
    assert config == Run(steps=5, buckets=(9,), optim=Muon(momentum=0.1), limits={"a": 1, "b": 3})


def test_merge_leaves_its_arguments_alone():
    base, top = {"a": {"x": 1}, "b": 2}, {"a": {"y": 3}, "b": {"z": 4}}
    assert merge(base, top) == {"a": {"x": 1, "y": 3}, "b": {"z": 4}}
    assert base == {"a": {"x": 1}, "b": 2}
    assert top == {"a": {"y": 3}, "b": {"z": 4}}


@pytest.mark.parametrize(
    ("override", "field_name", "expected"),
    [
        ("steps=9", "steps", 9),
        ("steps = 9", "steps", 9),
        ("dtype=bfloat16", "dtype", "bfloat16"),
        ('dtype="bfloat16"', "dtype", "bfloat16"),
        ("path=a=b", "path", "a=b"),
        ("path=", "path", ""),
        ("path=dir/with space", "path", "dir/with space"),
        ("buckets=[3, 5]", "buckets", (3, 5)),
        ("adam.lr=2e-3", "adam", Adam(lr=2e-3)),
        ("optim.type=muon", "optim", Muon()),
        ("eval.id=x", "eval", Env(id="x")),
        ("limits.tokens=4", "limits", {"tokens": 4}),
    ],
)
def test_override_sets_one_value(tmp_path: Path, override: str, field_name: str, expected: object):
    assert getattr(load_text(tmp_path, "steps = 2", override), field_name) == expected


def test_override_reaches_into_a_list_of_tables(tmp_path: Path):
    config = load_text(tmp_path, FULL, "envs.1.weight=0.5", "envs.0.settings.k=1")
    assert [env.weight for env in config.envs] == [1.0, 0.5]
    assert config.envs[0].settings == {"k": 1}


def test_last_override_wins(tmp_path: Path):
    assert load_text(tmp_path, "steps = 2", "steps=3", "steps=4").steps == 4


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("stesp = 2\nsteps = 1", "stesp: unknown key; did you mean steps? allowed: adam, buckets,"),
        ("", "steps: missing; it has no default"),
        ("steps = 1.0", "steps=1.0: expected int"),
        ("steps = true", "steps=True: expected int"),
        ('steps = "1"', "steps='1': expected int"),
        ("steps = 1\nresume = 1", "resume=1: expected bool"),
        ("steps = 1\npath = 1", "path=1: expected str"),
        ("steps = 1\ndtype = 'int8'", "dtype='int8': expected one of 'float32', 'bfloat16'"),
        ("steps = 1\nbuckets = 4", "buckets=4: expected a list"),
        ("steps = 1\nbuckets = [4, 'x']", "buckets.1='x': expected int"),
        ("steps = 1\nsizes = [4, 'x']", "sizes.1='x': expected int"),
        ("steps = 1\nlimits = 4", "limits=4: expected a table"),
        ("steps = 1\nlimits = { a = 'x' }", "limits.a='x': expected int"),
        ("steps = 1\nadam = 4", "adam=4: expected a table with keys type, lr"),
        ("steps = 1\n[adam]\nlr = true", "adam.lr=True: expected float"),
        ("steps = 1\n[adam]\nlr = nan", "adam.lr=nan: expected a finite number"),
        ("steps = 1\n[adam]\nlr = -inf", "adam.lr=-inf: expected a finite number"),
        (f"steps = {2**63}", f"steps={2**63}: expected an integer of 64 bits"),
        ('steps = 1\n[[envs]]\nid = "a\\u0000b"', r"envs.0.id='a\x00b': expected text without NUL"),
        (f"steps = 1\n[adam]\nlr = 1{'0' * 400}", "adam.lr=1000"),
        ("steps = 1\n[adam]\nlr = 0", "adam.lr=0 trains nothing; expected lr > 0"),
        ("steps = 1\n[optim]\ntype = 'sgd'", "optim.type='sgd': expected one of 'adam', 'muon'"),
        ("steps = 1\n[optim]\nmomentum = 0.5", "optim.momentum: unknown key; allowed: lr, type"),
        ("steps = 1\n[optim]\ntype = 'muon'\nlr = 0.5", "optim.lr: unknown key; allowed: momentum, type"),
        ("steps = 1\n[[envs]]\nweight = 2", "envs.0.id: missing; it has no default"),
        ("steps = 1\n[eval]\nweight = 'x'\nid = 'y'", "eval.weight='x': expected float"),
    ],
)
def test_fault_says_where_what_and_what_is_allowed(tmp_path: Path, text: str, expected: str):
    faults = faults_of(tmp_path, text)
    assert len(faults) == 1
    assert faults[0].startswith(expected)


def test_every_fault_is_in_one_message(tmp_path: Path):
    text = "stesp = 1\nresume = 3\n[adam]\nlr = -1\n[[envs]]\nid = 5"
    keys = [fault.partition(":")[0].partition("=")[0] for fault in faults_of(tmp_path, text)]
    assert sorted(keys) == ["adam.lr", "envs.0.id", "resume", "steps", "stesp"]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("steps", "--set steps: expected key=value"),
        ("=3", "--set =3: expected key=value"),
        ("steps.x=3", "--set steps.x=3: steps is 2, not a table"),
        ("envs.0.id=x", "--set envs.0.id=x: envs"),
    ],
)
def test_bad_override_is_a_fault(tmp_path: Path, override: str, expected: str):
    faults = faults_of(tmp_path, "steps = 2\nenvs = []", override)
    assert faults[0].startswith(expected)


def test_unreadable_files_are_faults_together(tmp_path: Path):
    broken, missing = tmp_path / "broken.toml", tmp_path / "missing.toml"
    broken.write_text("steps = ")
    with pytest.raises(ConfigError) as caught:
        load(Run, [missing, broken, tmp_path])
    assert [fault.partition(": ")[0] for fault in caught.value.faults] == [str(missing), str(broken), str(tmp_path)]
    assert "cannot read" in caught.value.faults[0]
    assert "not valid TOML" in caught.value.faults[1]


def test_file_that_is_not_utf8_is_a_fault(tmp_path: Path):
    file = tmp_path / "run.toml"
    file.write_bytes(b'path = "\xff"')
    with pytest.raises(ConfigError, match="not valid TOML"):
        load(Run, [file])


def test_refuse_passes_when_nothing_is_wrong():
    refuse([None, "", None])


def test_refuse_keeps_every_fault():
    with pytest.raises(ConfigError) as caught:
        refuse(["a=1 is bad", None, "b=2 is bad"])
    assert caught.value.faults == ("a=1 is bad", "b=2 is bad")
    assert str(caught.value) == "a=1 is bad\nb=2 is bad"


def test_an_override_beyond_a_list_says_how_long_it_is(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"--set envs\.2\.id=x: envs has 1 entries, counted from 0"):
        load_text(tmp_path, 'steps = 1\n[[envs]]\nid = "a"', "envs.2.id=x")
