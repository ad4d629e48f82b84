"""TOML files and dotted overrides -> typed frozen dataclasses; knows no field of any room.

Every fault of a config is reported in one ConfigError. A room refuses bad values in its `__post_init__` through
`refuse`, with messages that start with the field's name; the loader puts the dotted path in front.
"""

import dataclasses
import difflib
import math
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal, TypeVar, get_args, get_origin, get_type_hints

import tomli_w

C = TypeVar("C")


class ConfigError(ValueError):
    """A config that cannot run. `faults` holds one line for each fault, each with its dotted key."""

    def __init__(self, faults: Sequence[str]):
        self.faults = tuple(faults)
        super().__init__("\n".join(self.faults))


def refuse(faults: Iterable[str | None]) -> None:
    """Raise ConfigError if any fault is given. For use in `__post_init__`: a fault starts with the field's name."""
    found = [fault for fault in faults if fault]
    if found:
        raise ConfigError(found)


def load(
    cls: type[C], files: Sequence[str | Path], overrides: Sequence[str] = (), *, only: Sequence[str] | None = None
) -> C:
    """Merge `files` left to right (tables deep, lists whole), apply `a.b=value` overrides in order, build `cls`.

    Args:
        only: top-level keys that are read; others are for other commands. None = all, unknown ones are faults.

    Raises:
        ConfigError: with every fault found: unreadable file, unknown, missing or mistyped key, refused value.
    """
    raw: dict[str, object] = {}
    faults: list[str] = []
    for file in files:
        try:
            raw = merge(raw, tomllib.loads(Path(file).read_text(encoding="utf-8")))
        except OSError as error:
            faults.append(f"{file}: cannot read the config file ({error.strerror}); give an existing TOML file")
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            faults.append(f"{file}: not valid TOML ({error})")
    for override in overrides:
        faults.extend(_apply_override(raw, override))
    if faults:
        raise ConfigError(faults)
    mine = {key: value for key, value in raw.items() if only is None or key in only}
    built = _build(cls, mine, "", faults)
    if faults:
        raise ConfigError(faults)
    return typing.cast(C, built)


def merge(base: Mapping[str, object], top: Mapping[str, object]) -> dict[str, object]:
    """Return `base` overlaid with `top`: tables merge, everything else is replaced whole."""
    merged = dict(base)
    for key, value in top.items():
        old = merged.get(key)
        merged[key] = merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def to_toml(config: object) -> str:
    """Return the TOML text of a config dataclass; None fields are left out, so that loading it gives an equal config."""
    return tomli_w.dumps(_without_none(dataclasses.asdict(typing.cast(typing.Any, config))))


def _without_none(value: typing.Any) -> typing.Any:
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_without_none(item) for item in value]
    return value


def _apply_override(raw: dict[str, object], override: str) -> list[str]:
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        return [f"--set {override}: expected key=value, for example --set run.steps=10"]
    try:
        value = tomllib.loads(f"x = {text}")["x"]
    except tomllib.TOMLDecodeError:
        value = text  # a bare word is a string
    *parents, leaf = key.strip().split(".")
    node: typing.Any = raw
    for depth, part in enumerate(parents):
        if isinstance(node, list) and part.isdigit() and int(part) < len(node):
            node = node[int(part)]
        elif isinstance(node, dict):
            node = node.setdefault(part, {})
        elif isinstance(node, list) and part.isdigit():
            return [f"--set {override}: {'.'.join(parents[:depth])} has {len(node)} entries, counted from 0"]
        else:
            return [f"--set {override}: {'.'.join(parents[:depth])} is {node!r}, not a table"]
    if not isinstance(node, dict):
        return [f"--set {override}: {'.'.join(parents)} is {node!r}, not a table"]
    node[leaf] = value
    return []


def _build(hint: object, raw: object, path: str, faults: list[str]) -> object:
    """Build a value of type `hint` from parsed TOML; append to `faults` instead of raising."""
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return _build_dataclass(hint, raw, path, faults)
    origin, args = get_origin(hint), get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _build_union(args, raw, path, faults)
    if origin is Literal:
        return raw if raw in args else _mistyped(faults, path, raw, "one of " + ", ".join(map(repr, args)))
    if origin is tuple:
        if isinstance(raw, list | tuple):
            return tuple(_build(args[0], item, f"{path}.{i}", faults) for i, item in enumerate(raw))
        return _mistyped(faults, path, raw, "a list")
    if origin is dict:
        if isinstance(raw, dict):
            return {key: _build(args[1], value, f"{path}.{key}", faults) for key, value in raw.items()}
        return _mistyped(faults, path, raw, "a table")
    if hint is object:
        return raw
    if hint is float and type(raw) is int and abs(raw) < 2**63:
        return float(raw)
    if isinstance(hint, type) and type(raw) is hint:
        return raw if (unfit := _unfit(raw)) is None else _mistyped(faults, path, raw, unfit)
    return _mistyped(faults, path, raw, getattr(hint, "__name__", str(hint)))


def _unfit(raw: object) -> str | None:
    """Return what is expected instead of a value that no field of its type takes: nan would pass every check of a room."""
    if isinstance(raw, float) and not math.isfinite(raw):
        return "a finite number"
    if isinstance(raw, int) and not -(2**63) <= raw < 2**63:
        return "an integer of 64 bits"
    if isinstance(raw, str) and "\0" in raw:
        return "text without NUL"
    return None


def _build_dataclass(cls: type, raw: object, path: str, faults: list[str]) -> object:
    if not isinstance(raw, dict):
        return _mistyped(faults, path, raw, f"a table with keys {', '.join(get_type_hints(cls))}")
    hints = get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}
    num_faults = len(faults)
    for key in raw:
        if key not in fields:
            near = difflib.get_close_matches(str(key), fields, n=1)
            advice = f"did you mean {near[0]}? " if near else ""
            faults.append(f"{_join(path, key)}: unknown key; {advice}allowed: {', '.join(sorted(fields))}")
    for name, f in fields.items():
        if name not in raw and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            faults.append(f"{_join(path, name)}: missing; it has no default")
    values = {
        k: _build(hints[k], _with_type(hints[k], fields[k], v), _join(path, k), faults)
        for k, v in raw.items()
        if k in fields
    }
    if len(faults) > num_faults:
        return None
    try:
        return cls(**values)
    except ConfigError as error:
        faults.extend(_join(path, fault) for fault in error.faults)
        return None


def _with_type(hint: object, field: dataclasses.Field[typing.Any], raw: object) -> object:
    """Return a table that names no `type` with that of the field's default, if the field has a choice of tables."""
    default = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
    has_choice = sum(dataclasses.is_dataclass(choice) for choice in get_args(hint)) > 1
    if has_choice and isinstance(raw, dict) and "type" not in raw and dataclasses.is_dataclass(default):
        return {"type": vars(default).get("type"), **raw}
    return raw


def _build_union(args: tuple[object, ...], raw: object, path: str, faults: list[str]) -> object:
    """Pick the member that fits; tables pick by their `type` key, so that faults name one choice, not all."""
    if raw is None and type(None) in args:
        return None
    choices = [a for a in args if a is not type(None)]
    if len(choices) == 1:
        return _build(choices[0], raw, path, faults)
    if isinstance(raw, dict):
        tables = [a for a in choices if dataclasses.is_dataclass(a)]
        tagged = {get_args(get_type_hints(a)["type"])[0]: a for a in tables if "type" in get_type_hints(a)}
        if len(tables) == 1:
            return _build(tables[0], raw, path, faults)
        if tagged:
            kind = raw.get("type")
            if kind in tagged:
                return _build(tagged[typing.cast(str, kind)], raw, path, faults)
            return _mistyped(faults, _join(path, "type"), kind, "one of " + ", ".join(map(repr, tagged)))
    for choice in choices:
        attempt: list[str] = []
        value = _build(choice, raw, path, attempt)
        if not attempt:
            return value
    names = " or ".join(getattr(a, "__name__", str(a)) for a in choices)
    return _mistyped(faults, path, raw, names)


def _mistyped(faults: list[str], path: str, raw: object, expected: str) -> None:
    faults.append(f"{path or 'config'}={raw!r}: expected {expected}")


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)
