"""Every operation's folder holds what a reader looks for, and its kernel.py needs Triton alone, so that JAX can call it."""

import ast
from pathlib import Path

import pytest

from kernels import aot

FOLDERS = [aot.ROOM / op for op in aot.operations()]
FILES = ("__init__.py", "op.py", "kernel.py", "ref.py", "cases.py", "bench.py", "RESULTS.md")


def imported(path: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(path.read_text())))
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return plain | {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_folder_is_complete(folder):
    assert [name for name in FILES if not (folder / name).exists()] == []
    assert (folder / "__init__.py").read_text() == ""


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_kernel_needs_triton_alone(folder):
    names = imported(folder / "kernel.py")
    assert {n for n in names if n.split(".")[0] != "triton" and not n.endswith(".kernel")} == set()


def test_kernels_know_nothing_of_the_trainer():
    for path in aot.ROOM.rglob("*.py"):
        assert not {n for n in imported(path) if n.split(".")[0] in ("rl_jax", "jax")}, path
