"""From an id in a config to an environment: every kind of id, and what a wrong one is told."""

import sys
from pathlib import Path

import pytest

from rl_jax.config import ConfigError, load, to_toml
from rl_jax.envs.base import Environment, MultiTurn, Solved
from rl_jax.envs.guess_number import GuessNumber
from rl_jax.envs.registry import EnvConfig, resolve
from rl_jax.envs.reverse_text import ReverseText

USER = """
from dataclasses import dataclass
from rl_jax.envs.base import Task

@dataclass
class Double:
    digits: int = 1
    def task(self, index): return Task(prompt=f"Double {index}", answer=2 * index)
    def reward(self, task, completions): return float(completions[0] == str(task.answer))

def triple(index, plus, times=3):
    return f"{times} * {index} + {plus}", lambda completion: {"reward": float(completion == str(times * index + plus))}

def anything(index, **settings):
    return str(sorted(settings)), float

class Half:
    def __init__(self): self.task = None

class Needs:
    def __init__(self): import reasoning_gym_of_tomorrow

number = 3
"""


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "user_envs.py").write_text(USER)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path / "user_envs.py"


@pytest.mark.parametrize(("id", "cls"), [("reverse_text", ReverseText), ("guess_number", GuessNumber)])
def test_built_in(id: str, cls: type):
    environment = resolve(EnvConfig(id=id))
    assert isinstance(environment, cls)
    assert isinstance(environment, Environment)
    assert isinstance(environment, MultiTurn) == (id == "guess_number")
    assert isinstance(environment, Solved) == (id == "reverse_text")


@pytest.mark.parametrize("by_file", [True, False])
def test_class_of_a_user(user: Path, by_file: bool):
    config = EnvConfig(id=f"{user if by_file else 'user_envs'}:Double", settings={"digits": 3})
    environment = resolve(config)
    task = environment.task(21)
    assert (task.prompt, config.label, vars(environment)) == ("Double 21", "Double", {"digits": 3})
    assert [environment.reward(task, [text]) for text in ("42", "41")] == [1.0, 0.0]


@pytest.mark.parametrize("by_file", [True, False])
def test_function_of_a_user(user: Path, by_file: bool):
    environment = resolve(EnvConfig(id=f"{user if by_file else 'user_envs'}:triple", settings={"plus": 5}))
    task = environment.task(7)
    assert task.prompt == "3 * 7 + 5"
    assert [environment.reward(task, [text]) for text in ("26", "21")] == [{"reward": 1.0}, {"reward": 0.0}]


def test_function_that_takes_any_setting(user: Path):
    assert resolve(EnvConfig(id="user_envs:anything", settings={"b": 1, "a": 2})).task(0).prompt == "['a', 'b']"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"id": "no_such_module.x:Y"}, "id='no_such_module.x:Y': no module 'no_such_module'; looked in"),
        ({"id": "rl_jax.no_such:Y"}, "no module 'rl_jax.no_such'"),
        ({"id": "no/such/file.py:Y"}, "no file .*no/such/file.py"),
        ({"id": "user_envs:Doubel"}, "user_envs has no 'Doubel'; did you mean Double?"),
        ({"id": "user_envs:number"}, "expected a class or a function, got 3"),
        ({"id": "user_envs:Half"}, "Half lacks reward; see"),
        ({"id": "user_envs:Needs"}, "imports reasoning_gym_of_tomorrow, which is not installed"),
        ({"id": "user_envs:Double", "settings": {"digit": 3}}, "settings.digit: unknown setting .*; allowed: digits$"),
        ({"id": "user_envs:triple"}, "settings.plus: missing"),
        (
            {"id": "user_envs:triple", "settings": {"index": 1, "plus": 2}},
            "settings.index: unknown .*allowed: plus, times",
        ),
        ({"id": "reverse_text", "settings": {"split": "test"}}, "settings.split='test': expected one of warmup, train"),
    ],
)
def test_what_cannot_be_resolved_is_told(user: Path, config: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        resolve(EnvConfig(**config))


def test_missing_extra_names_the_command(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)  # Python then says that there is none
    monkeypatch.delitem(sys.modules, "reasoning_gym.factory", raising=False)
    with pytest.raises(ConfigError, match=r"needs the package reasoning_gym, .*pip install -e '\.\[arithmetic\]'"):
        resolve(EnvConfig(id="arithmetic"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"id": "revers_text"},
            "^id='revers_text': unknown environment; did you mean reverse_text?.*built in: arithmetic,",
        ),
        ({"id": "a.b:"}, "^id='a.b:'"),
        ({"id": ":Name"}, "^id=':Name'"),
        ({"id": "reverse_text", "name": "a/b"}, "^name='a/b'"),
        ({"id": "reverse_text", "weight": 0.0}, r"^weight=0\.0"),
        ({"id": "reverse_text", "weight": float("nan")}, "^weight=nan"),
    ],
)
def test_config_refuses(fields: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        EnvConfig(**fields)


def test_config_round_trip(tmp_path: Path):
    config = EnvConfig(id="reverse_text", name="short", weight=2.5, settings={"max_chars": 5, "kinds": ["words"]})
    (tmp_path / "env.toml").write_text(to_toml(config))
    assert load(EnvConfig, [tmp_path / "env.toml"]) == config
    assert (config.label, EnvConfig(id="reverse_text").label) == ("short", "reverse_text")


def lone_prompt(index: int) -> str:
    """An environment as a user may write it: the judge is missing."""
    return f"task {index}"


def test_a_function_without_a_judge_is_told_what_it_must_return():
    environment = resolve(EnvConfig(id=f"{__file__}:lone_prompt"))
    with pytest.raises(
        TypeError, match=r"lone_prompt\(3\) returned 'task 3', expected \(prompt, function that judges\)"
    ):
        environment.task(3)
