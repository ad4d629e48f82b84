"""The house as a test: who may import whom, where JAX may stand, hidden inputs, suppressed rules, sizes.

The tables come first. A room is a module or a package; the longest name in the table that fits a module is its room.
"""

import ast
import importlib.metadata
import io
import re
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from size_report import ROOT, sizes, source_files

LAYERS = (  # low to high: a room imports itself and rooms of lower layers, never a neighbour
    {"rl_jax.axes", "rl_jax.config", "rl_jax.types", "rl_jax.chat_template", "rl_jax.progress"}
    | {"rl_jax.loop_thread", "rl_jax.printable", "rl_jax.checksums", "bridge.wire", "kernels", "rl_jax.triton_launch"},
    {"rl_jax.mesh", "rl_jax.tokenizer", "rl_jax.sampler", "rl_jax.run_folder", "rl_jax.interrupt", "rl_jax.triton_ops"}
    | {"bridge.vllm_plugin"},
    {"rl_jax.models", "rl_jax.losses", "rl_jax.optim", "rl_jax.metrics", "rl_jax.hosts"}
    | {"rl_jax.advantages", "rl_jax.packing", "rl_jax.envs", "rl_jax.http"},
    {"rl_jax.checkpoint", "rl_jax.plot", "bridge"},
    {"rl_jax.trainer", "rl_jax.engine", "rl_jax.rollout"},
    {"rl_jax.orchestrator"},
    {"rl_jax.cli"},
    {"rl_jax.rooms", "rl_jax.plan"},
    {"rl_jax.half"},
    {"rl_jax.session"},
    {
        "rl_jax.train",
        "rl_jax.sft",
        "rl_jax.serve",
        "rl_jax.evaluate",
        "rl_jax.bench",
        "rl_jax.account",
        "bridge.convert",
    }
    | {"bridge.verify", "rl_jax.plan.__main__", "rl_jax.plan.sampler", "rl_jax.plan.worker"},
)
READ_THE_OUTSIDE = LAYERS[-1] | {"rl_jax.cli", "kernels.vllm_plugin.plugin"}  # environment variables, command line
READ_THE_OUTSIDE |= {"rl_jax.triton_launch"}  # puts back what the import of a package changes
WITHOUT_JAX = (
    {"rl_jax.config", "rl_jax.types", "rl_jax.chat_template", "rl_jax.progress", "rl_jax.tokenizer", "rl_jax.sampler"}
    | {"rl_jax.metrics", "rl_jax.advantages", "rl_jax.packing", "rl_jax.envs", "rl_jax.plot", "rl_jax.rollout"}
    | {"rl_jax.orchestrator", "rl_jax.http", "rl_jax.interrupt", "rl_jax.account", "bridge.wire"}
    | {"rl_jax.loop_thread", "rl_jax.printable", "rl_jax.checksums"}
)
IN_FLEET = {"bridge.vllm_plugin", "kernels"}  # run in the fleet environment: torch there, nothing of the trainer's
DOOR = "rl_jax.triton_ops"  # from JAX to kernels; needs an extra, so its importers ask for it where it is chosen
JAX = {"jax", "jaxlib", "flax", "optax", "orbax"}
FLEET = {"torch", "triton", "vllm"}  # packages of the other environment
UNIMPORTABLE = {"experiments", "tests", "docs"}
OPTIONAL = "# optional extra"  # on an import: the package is in an extra, and only who asks for it imports it
VAGUE = {"utils.py", "util.py", "helpers.py", "common.py", "misc.py"}

RANK = {room: rank for rank, rooms in enumerate(LAYERS) for room in rooms}
FILES = source_files()
Fault = tuple[int, str]


def module_of(path: Path) -> str:
    """Return the dotted name: rl_jax/envs/__init__.py is rl_jax.envs."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_of(path): path for path in FILES}
TREES = {path: ast.parse(path.read_text()) for path in FILES}


def room_of(module: str) -> str | None:
    """Return the longest name of the table that is `module` or holds it."""
    return max((room for room in RANK if f"{module}.".startswith(f"{room}.")), key=len, default=None)


def imports_of(tree: ast.AST) -> Iterator[tuple[ast.Import | ast.ImportFrom, str]]:
    """Yield every imported dotted name; `from a import b` gives a.b where that is a module of the project, else a."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            names = [f"{base}.{alias.name}" for alias in node.names]
            yield from ((node, name if name in MODULES else base) for name in names)


def import_faults(me: str, tree: ast.AST) -> Iterator[Fault]:
    """Find imports that go up or sideways, bring JAX where it may not be, or reach what nothing may reach."""
    mine = room_of(me)
    for node, name in imports_of(tree):
        top, target = name.split(".")[0], room_of(name)
        if mine and target and target != mine and RANK[target] >= RANK[mine]:
            yield node.lineno, f"{mine} (layer {RANK[mine] + 1}) may not import {target} (layer {RANK[target] + 1})"
        elif mine in WITHOUT_JAX and (top in JAX or (target and target not in WITHOUT_JAX)):
            yield node.lineno, f"{mine} is without JAX and may not import {name}"
        if top in FLEET and mine not in IN_FLEET:
            yield node.lineno, f"{top} belongs to the fleet environment"
        if top == "kernels" and mine not in {"kernels", DOOR}:
            yield node.lineno, f"kernels are reached through {DOOR} only"
        if mine in IN_FLEET and (top in JAX or top == "rl_jax"):
            yield node.lineno, f"{mine} runs in the fleet environment, which has no {top}"
        if top in UNIMPORTABLE:
            yield node.lineno, f"nothing imports {top}"


def hidden_import_faults(tree: ast.AST, lines: list[str]) -> Iterator[Fault]:
    """Find imports that hide: inside functions without saying why, under TYPE_CHECKING, relative, or a star."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    inside = {node for function in functions for node in ast.walk(function)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        names = [alias.name for alias in node.names]
        if node in inside and OPTIONAL not in lines[node.lineno - 1]:
            yield node.lineno, f"import inside a function; move it up, or end the line with `{OPTIONAL}`"
        if isinstance(node, ast.ImportFrom) and (node.level or "*" in names):
            yield node.lineno, "relative or star import; name the module and what you take"
        if "TYPE_CHECKING" in names:
            yield node.lineno, "TYPE_CHECKING hides a cycle; move the shared noun down a layer"


def hidden_input_faults(me: str, tree: ast.AST) -> Iterator[Fault]:
    """Find state and input that no signature shows. A child process may inherit the environment: {**os.environ}."""
    dicts = [node for node in ast.walk(tree) if isinstance(node, ast.Dict)]
    handed_on = {value for node in dicts for key, value in zip(node.keys, node.values, strict=True) if key is None}
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield node.lineno, f"`global {', '.join(node.names)}`; pass the value"
        outside = {"os.environ", "os.getenv", "os.putenv", "sys.argv"} & _names(node)
        if outside and node not in handed_on and me not in READ_THE_OUTSIDE:
            yield node.lineno, f"{outside.pop()} is for entry modules and rl_jax.cli; take the value as an argument"


def _names(node: ast.AST) -> set[str]:
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return {f"{node.value.id}.{node.attr}"}
    if isinstance(node, ast.ImportFrom):
        return {f"{node.module}.{alias.name}" for alias in node.names}
    return set()


def text_faults(source: str) -> Iterator[Fault]:
    """Find comments that are not ASCII, and broad excepts that give no reason."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not token.string.isascii():
            yield token.start[0], f"comment is not ASCII: {token.string}"
        if token.type == tokenize.COMMENT and re.search(r"noqa: *BLE001 *$", token.string):
            yield token.start[0], "broad except; say what may be raised there: `# noqa: BLE001 - a reward is user code`"


def init_faults(path: Path, tree: ast.Module) -> Iterator[Fault]:
    """Find logic in a package's __init__.py: it holds a docstring, imports and constants."""
    if path.name == "__init__.py":
        for node in tree.body:
            if not isinstance(node, ast.Expr | ast.Import | ast.ImportFrom | ast.Assign):
                yield node.lineno, "logic in __init__.py; move it into a module named after what it is"


def faults(path: Path) -> Iterator[Fault]:
    """Find everything wrong in one file."""
    source, tree, me = path.read_text(), TREES[path], module_of(path)
    if room_of(me) is None and me != "rl_jax":
        yield 1, f"{me} is in no layer; add it to LAYERS in tests/test_architecture.py"
    if path.name in VAGUE:
        yield 1, f"{path.name} says nothing; name the file after its concept"
    if not ast.get_docstring(tree) and (path.name != "__init__.py" or tree.body):
        yield 1, "no module docstring; say what it is and where it stands in the walk"
    yield from import_faults(me, tree)
    yield from hidden_import_faults(tree, source.splitlines())
    yield from hidden_input_faults(me, tree)
    yield from text_faults(source)
    yield from init_faults(path, tree)


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_file_keeps_the_house_rules(path: Path):
    found = [f"{path.relative_to(ROOT)}:{line}: {fault}" for line, fault in faults(path)]
    found += [str(size) for size in sizes(path) if size.value > size.measure.limit]
    assert not found, "\n" + "\n".join(found)


def test_modules_import_each_other_in_no_cycle():
    graph = {
        module: {name for _, name in imports_of(TREES[path]) if name in MODULES and name != module}
        for module, path in MODULES.items()
    }
    TopologicalSorter(graph).prepare()  # CycleError names the modules of a cycle


def test_rooms_without_jax_load_without_jax():
    rooms = {module: path for module, path in MODULES.items() if room_of(module) in WITHOUT_JAX}
    modules = [module for module, path in rooms.items() if OPTIONAL not in path.read_text()]
    code = f"import sys, {', '.join(modules)}; print(*sorted({{'jax', 'torch'}} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (run.returncode, run.stdout.strip()) == (0, ""), run.stderr


def test_imported_packages_are_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {_normal(Requirement(line).name) for line in project["dependencies"]}
    optional = {
        _normal(Requirement(line).name) for extra in project["optional-dependencies"].values() for line in extra
    }
    packages_of = importlib.metadata.packages_distributions()
    ours = {"rl_jax", "bridge", "kernels", *sys.stdlib_module_names}
    undeclared = set()
    for path in [path for path in FILES if room_of(module_of(path)) not in IN_FLEET]:
        lines = path.read_text().splitlines()
        for node, name in imports_of(TREES[path]):
            top = name.split(".")[0]
            packages = {_normal(package) for package in packages_of.get(top, [top])}
            allowed = declared | optional if OPTIONAL in lines[node.lineno - 1] else declared
            if top not in ours and not packages & allowed:
                undeclared.add(f"{path.relative_to(ROOT)}:{node.lineno}: {top}")
    assert not undeclared, f"declare in pyproject.toml, or mark the line `{OPTIONAL}`:\n" + "\n".join(
        sorted(undeclared)
    )


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


SAMPLES = (  # module, source, part of the fault that it must give
    ("rl_jax.types", "from rl_jax.packing import pack", "may not import rl_jax.packing"),
    ("rl_jax.losses", "import rl_jax.optim", "may not import rl_jax.optim"),
    ("rl_jax.rollout.client", "from rl_jax.mesh import make_mesh", "without JAX"),
    ("rl_jax.envs.pool", "import jax.numpy as jnp", "without JAX"),
    ("rl_jax.train", "import torch", "fleet"),
    ("bridge.vllm_plugin.transfer", "import ml_dtypes, jax", "has no jax"),
    ("kernels.gate.op", "import rl_jax", "has no rl_jax"),
    ("rl_jax.models.moe", "from kernels.router import Router", "through rl_jax.triton_ops only"),
    ("rl_jax.trainer.loop", "from experiments.x import y", "nothing imports experiments"),
    ("rl_jax.mesh", "def f():\n    import os", "inside a function"),
    ("rl_jax.mesh", "from . import axes", "relative"),
    ("rl_jax.mesh", "from math import *", "star"),
    ("rl_jax.mesh", "from typing import TYPE_CHECKING", "TYPE_CHECKING"),
    ("rl_jax.mesh", "def f():\n    global x\n    x = 1", "global x"),
    ("rl_jax.mesh", "import os\nos.environ['A']", "environ"),
    ("rl_jax.mesh", "from sys import argv", "argv"),
    ("rl_jax.mesh", "try:\n    f()\nexcept Exception:  # noqa: BLE001\n    pass", "broad except"),
    ("rl_jax.mesh", "x = 1  # \N{RIGHTWARDS ARROW} 2", "not ASCII"),
)


@pytest.mark.parametrize(("module", "source", "expected"), SAMPLES, ids=[sample[2] for sample in SAMPLES])
def test_each_rule_finds_its_fault(module: str, source: str, expected: str):
    tree = ast.parse(source)
    found = [
        *import_faults(module, tree),
        *hidden_import_faults(tree, source.splitlines()),
        *hidden_input_faults(module, tree),
        *text_faults(source),
    ]
    assert len(found) == 1
    assert expected in found[0][1]


def test_rules_let_good_code_pass():
    source = "import jax\nfrom rl_jax.models.schema import Leaf\ndef f():\n    import wandb  # optional extra\n"
    tree = ast.parse(source)
    assert not [*import_faults("rl_jax.trainer.loop", tree), *hidden_import_faults(tree, source.splitlines())]
