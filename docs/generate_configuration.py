"""Write docs/configuration.md from the config dataclasses: their keys, types, defaults and the string under each field.

    python -m docs.generate_configuration            write the page
    python -m docs.generate_configuration --check    fail where the page on disk is out of date

Knows dataclasses and docstrings, no field of any room.
"""

import argparse
import ast
import dataclasses
import difflib
import importlib
import inspect
import itertools
import re
import sys
import textwrap
import types
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import tomli_w

ROOT_CLASS = "rl_jax.cli:RunConfig"
PAGE = Path(__file__).resolve().parent / "configuration.md"
COMMAND = "python -m docs.generate_configuration"
DIFF_LINES = 40

INTRODUCTION = f"""# Configuration

Every key that a config file may hold, made from the config classes by `{COMMAND}`.
Several `--config` files merge left to right, then each `--set a.b=value` applies. A key that is unknown, missing or of
another type, and a value that a room refuses, stop the run before anything starts.
"""


@dataclass(frozen=True)
class Section:
    """One dataclass at one place of the file, for example Section("envs[].reward", RewardConfig)."""

    path: str
    """Dotted keys, "" for the top level; `[]` marks a list of tables, `<name>` a key that the writer chooses."""
    cls: type

    @property
    def title(self) -> str:
        """The table's header as TOML writes it, and the `type` that chooses this class among several."""
        header = f"[[{self.path[:-2]}]]" if self.path.endswith("[]") else f"[{self.path.replace('[]', '')}]"
        kind = type_key(self.cls)
        choice = f" with `type = {toml(kind)}`" if kind else ""
        return (f"`{header}`" if self.path else "Top level") + choice


def sections(cls: type, path: str = "") -> Iterator[Section]:
    """Yield `cls` at `path`, then every dataclass in its fields, in order."""
    yield Section(path, cls)
    for field in config_fields(cls):
        for suffix, inner in dataclasses_in(get_type_hints(cls)[field.name]):
            yield from sections(inner, f"{path}.{field.name}{suffix}".lstrip("."))


def dataclasses_in(hint: object, suffix: str = "") -> Iterator[tuple[str, type]]:
    """Yield each dataclass in a type with what it adds to the path: tuple[Env, ...] gives ("[]", Env)."""
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        yield suffix, hint
    deeper = {tuple: "[]", dict: ".<name>"}.get(get_origin(hint), "")  # pyright: ignore[reportArgumentType]
    for argument in get_args(hint):
        yield from dataclasses_in(argument, suffix + deeper)


def config_fields(cls: type) -> list[dataclasses.Field[Any]]:
    """Return the fields that a file may set; `type` where it only chooses the class is in the section's title."""
    return [f for f in dataclasses.fields(cls) if f.init and not (f.name == "type" and type_key(cls))]


def type_key(cls: type) -> str | None:
    """Return the value of `type` that chooses this class, None where it has no such key."""
    choices = get_args(get_type_hints(cls).get("type"))
    return choices[0] if len(choices) == 1 else None


def field_docs(cls: type) -> dict[str, str]:
    """Return name -> the string under the field, in `cls` or in a class that it inherits from."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        tree = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        body = tree.body if isinstance(tree, ast.ClassDef) else []
        for statement, after in itertools.pairwise(body):
            match statement, after:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    docs[name] = " ".join(text.split())
    return docs


def describe(hint: object) -> str:
    """Return a type in words: tuple[int, ...] is "list of int"; Literal["a", "b"] | None is "`"a"` or `"b"`"."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(describe(choice) for choice in args if choice is not types.NoneType))
    if origin is Literal:
        return " or ".join(f"`{toml(choice)}`" for choice in args)
    if origin is tuple:
        return f"list of {describe(args[0])}"
    if origin is dict:
        return f"table of {describe(args[1])}"
    if hint is object:
        return "any"
    return "table" if dataclasses.is_dataclass(hint) else getattr(hint, "__name__", str(hint))


def toml(value: object) -> str:
    """Return a value as TOML writes it in one line; of a config, what differs from its class's own defaults."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        kind, fields = type_key(type(value)), config_fields(type(value))
        changed = {f.name: getattr(value, f.name) for f in fields if getattr(value, f.name) != default_of(f)}
        value = ({"type": kind} if kind else {}) | changed
    if isinstance(value, dict):
        pairs = ", ".join(f"{key} = {toml(item)}" for key, item in value.items() if item is not None)
        return f"{{ {pairs} }}" if pairs else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml, value))}]"
    return tomli_w.dumps({"x": value}).removeprefix("x = ").strip()


def default_of(field: dataclasses.Field[Any]) -> object:
    """Return the default of a field, MISSING where it has none."""
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def markdown(text: str) -> str:
    """Return plain text such that a Markdown page shows it as it is; what stands in backticks is code already."""
    plain_and_code = text.split("`")
    plain_and_code[::2] = [re.sub(r"([*<\\])", r"\\\1", plain) for plain in plain_and_code[::2]]
    return "`".join(plain_and_code)


def row(field: dataclasses.Field[Any], hint: object, doc: str) -> str:
    """Return a field's line of the table."""
    default = default_of(field)
    shown = "required" if default is dataclasses.MISSING else "unset" if default is None else f"`{toml(default)}`"
    cells = (f"`{field.name}`", describe(hint), shown, markdown(doc))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def render(root: type) -> str:
    """Return the page.

    Raises:
        ValueError: naming every field without a string under it.
    """
    parts, bare = [INTRODUCTION], []
    for section in sections(root):
        docs, hints, fields = field_docs(section.cls), get_type_hints(section.cls), config_fields(section.cls)
        bare += [f"{section.cls.__module__}.{section.cls.__qualname__}.{f.name}" for f in fields if f.name not in docs]
        about = markdown(" ".join((inspect.getdoc(section.cls) or "").split()))
        lines = [row(field, hints[field.name], docs.get(field.name, "")) for field in fields]
        table = ["| key | type | default | meaning |", "| --- | --- | --- | --- |", *lines]
        parts.append("\n".join([f"## {section.title}\n\n{about}\n", *(table if lines else []), ""]))
    if bare:
        raise ValueError("config fields without a string under them: " + ", ".join(dict.fromkeys(bare)))
    return "\n".join(parts)


def main(argv: Sequence[str] | None = None) -> int:
    """Write or check the page."""
    parser = argparse.ArgumentParser(prog=COMMAND, description="Write docs/configuration.md from the config classes.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the page is out of date")
    parser.add_argument("--root", default=ROOT_CLASS, help="module:class to start from (default %(default)s)")
    parser.add_argument("--page", type=Path, default=PAGE, help="file to write (default %(default)s)")
    args = parser.parse_args(argv)
    module, _, name = args.root.partition(":")
    page = render(getattr(importlib.import_module(module), name))
    if not args.check:
        args.page.write_text(page, encoding="utf-8")
        return 0
    old = args.page.read_text(encoding="utf-8") if args.page.exists() else ""
    diff = list(difflib.unified_diff(old.splitlines(), page.splitlines(), "on disk", "from the classes", lineterm=""))
    if diff:
        print("\n".join(diff[:DIFF_LINES]))
        print(f"{args.page} is out of date ({len(diff)} lines of difference): run `{COMMAND}`", file=sys.stderr)
    return 1 if diff else 0


if __name__ == "__main__":
    sys.exit(main())
