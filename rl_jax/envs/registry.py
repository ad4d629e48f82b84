"""From `[[envs]]` in a config to an Environment: built-in names, import paths, files, classes and functions.

Runs in the worker processes (rl_jax/envs/worker.py): what a user's module imports never touches the run. Knows no task.
"""

import difflib
import importlib
import importlib.util
import inspect
import math
import re
import reprlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import cast

from rl_jax.config import ConfigError, refuse
from rl_jax.envs.base import Environment, Task

BUILT_INS = {
    "arithmetic": "rl_jax.envs.arithmetic:Arithmetic",
    "guess_number": "rl_jax.envs.guess_number:GuessNumber",
    "reverse_text": "rl_jax.envs.reverse_text:ReverseText",
}
PROJECT = "rl-jax"
EXTRAS = {"reasoning_gym": "arithmetic"}
"""Packages that built-ins need beyond the core, and the extra of this project that brings each."""

Judge = Callable[[str], float | Mapping[str, float]]
Function = Callable[..., tuple[str | Sequence[Mapping[str, str]], Judge]]


@dataclass(frozen=True, kw_only=True)
class EnvConfig:
    """One environment of a run."""

    id: str
    """A built-in name (arithmetic, guess_number, reverse_text), "package.module:Name" or "path/to/file.py:Name"."""
    name: str = ""
    """Name in metrics and records; unique in a run. Empty = the built-in name, or the part of id after the colon."""
    weight: float = 1.0
    """Share of the prompts, relative to the other environments; > 0."""
    settings: dict[str, object] = field(default_factory=dict)
    """Keyword arguments of the class or function."""

    def __post_init__(self) -> None:
        near = difflib.get_close_matches(self.id, BUILT_INS, n=1)
        advice = f"did you mean {near[0]}? " if near else ""
        module, _, attribute = self.id.rpartition(":")
        refuse(
            [
                None
                if self.id in BUILT_INS or (module and attribute.isidentifier())
                else f"id={self.id!r}: unknown environment; {advice}built in: {', '.join(BUILT_INS)}; "
                'or give "package.module:Name" or "path/to/file.py:Name"',
                None
                if re.fullmatch(r"[\w.-]*", self.name)
                else f"name={self.name!r}: expected letters, digits, '_', '-' and '.' only (it names metrics)",
                None
                if self.weight > 0 and math.isfinite(self.weight)
                else f"weight={self.weight}: expected a finite number > 0; leave out an environment that gets no prompts",
            ]
        )

    @property
    def label(self) -> str:
        """The name that the run uses."""
        return self.name or self.id.rpartition(":")[2]


@dataclass(frozen=True, kw_only=True)
class FunctionEnvironment:
    """An environment made of a function `fn(index, **settings) -> (prompt, reward_fn(completion))`."""

    fn: Function
    settings: Mapping[str, object]

    def task(self, index: int) -> Task:
        """Return the prompt of `index`; `answer` is the function that judges it."""
        made = self.fn(index, **self.settings)
        if not (isinstance(made, tuple) and len(made) == 2 and callable(made[1])):
            raise TypeError(
                f"{self.fn.__name__}({index}) returned {reprlib.repr(made)}, expected (prompt, function that judges)"
            )
        prompt, judge = made
        return Task(prompt=prompt, answer=judge)

    def reward(self, task: Task, completions: Sequence[str]) -> float | Mapping[str, float]:
        """Judge the one completion."""
        return cast(Judge, task.answer)(completions[0])


def resolve(config: EnvConfig) -> Environment:
    """Import what `config.id` names and construct it with `config.settings`.

    Raises:
        ConfigError: no such module, file or attribute; a package is missing; settings that it does not take.
    """
    path, _, attribute = BUILT_INS.get(config.id, config.id).rpartition(":")
    try:
        return _make(config, path, attribute)
    except ModuleNotFoundError as error:
        raise ConfigError([_missing_module(config.id, path, error.name or str(error))]) from error


def _make(config: EnvConfig, path: str, attribute: str) -> Environment:
    module = _load_file(config.id, path) if path.endswith(".py") else importlib.import_module(path)
    if not hasattr(module, attribute):
        public = [name for name in vars(module) if not name.startswith("_")]
        near = difflib.get_close_matches(attribute, public, n=1)
        refuse([f"id={config.id!r}: {path} has no {attribute!r}" + (f"; did you mean {near[0]}?" if near else "")])
    factory = getattr(module, attribute)
    if not callable(factory):
        refuse([f"id={config.id!r}: expected a class or a function, got {factory!r}"])
    _check_settings(config, factory)
    if not isinstance(factory, type):
        return FunctionEnvironment(fn=cast(Function, factory), settings=config.settings)
    return _construct(config, factory)


def _construct(config: EnvConfig, cls: type) -> Environment:
    try:
        environment = cls(**config.settings)
    except ConfigError as error:
        raise ConfigError([f"settings.{fault}" for fault in error.faults]) from error
    if not isinstance(environment, Environment):
        missing = [name for name in ("task", "reward") if not hasattr(environment, name)]
        refuse([f"id={config.id!r}: {cls.__name__} lacks {' and '.join(missing)}; see rl_jax/envs/base.py"])
    return environment


def _check_settings(config: EnvConfig, factory: Callable[..., object]) -> None:
    """Refuse settings that the class or function does not take, and a missing one that it needs."""
    parameters = list(inspect.signature(factory).parameters.values())
    if not isinstance(factory, type):
        parameters = parameters[1:]  # the index of the task
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return
    named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    allowed = f"allowed: {', '.join(named) or 'none'}"
    unknown = [f"settings.{k}: unknown setting of {config.id}; {allowed}" for k in config.settings if k not in named]
    needed = [name for name, p in named.items() if p.default is p.empty and name not in config.settings]
    refuse([*unknown, *(f"settings.{name}: missing; {config.id} has no default for it" for name in needed)])


def _missing_module(env_id: str, path: str, missing: str) -> str:
    """Return the fault: the environment's own module is not there, or one that it imports."""
    if f"{path}.".startswith(f"{missing}."):
        return f"id={env_id!r}: no module {missing!r}; looked in {', '.join(sys.path)}"
    package = missing.partition(".")[0]
    if package in EXTRAS:
        command = f"pip install '{PROJECT}[{EXTRAS[package]}]', or in its folder pip install -e '.[{EXTRAS[package]}]'"
        return f"id={env_id!r}: needs the package {package}, which is not installed; run {command}"
    return f"id={env_id!r}: {path} imports {missing}, which is not installed; install it for {sys.executable}"


def _load_file(env_id: str, path: str) -> ModuleType:
    file = Path(path).resolve()
    if not file.is_file():
        refuse([f"id={env_id!r}: no file {file}; give the path of a Python file"])
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec and spec.loader, f"{file} is a file ending in .py, yet Python finds no loader for it"
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module  # dataclasses and pickle look their module up by name
    spec.loader.exec_module(module)
    return module
