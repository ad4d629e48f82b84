"""Sizes of files and functions: prints what is past the aim; test_architecture.py fails on what is past the limit.

python -m tests.size_report
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("rl_jax", "bridge", "kernels")


@dataclass(frozen=True)
class Measure:
    """One size: rises from `aim`, where a reader looks twice, to `limit`, where the test fails."""

    name: str
    aim: int
    limit: int


FILE_LINES = Measure("lines of file", 250, 500)
FUNCTION_LINES = Measure("lines", 40, 80)
NESTING = Measure("levels of nesting", 3, 4)
ARGUMENTS = Measure("arguments", 5, 8)

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
BLOCKS = (ast.For, ast.AsyncFor, ast.While, ast.If, ast.With, ast.AsyncWith, ast.Try, ast.Match)


@dataclass(frozen=True)
class Size:
    """One measured thing, for example Size("rl_jax/config.py:91 _build", NESTING, 4)."""

    where: str
    measure: Measure
    value: int

    def __str__(self) -> str:
        limits = f"aim {self.measure.aim}, limit {self.measure.limit}"
        return f"{self.where}: {self.value} {self.measure.name} ({limits})"


def source_files(root: Path = ROOT) -> list[Path]:
    """Return the Python files of all rooms."""
    return sorted(path for room in ROOMS for path in (root / room).rglob("*.py"))


def sizes(path: Path, root: Path = ROOT) -> Iterator[Size]:
    """Measure a file and each of its functions."""
    text = path.read_text()
    name = path.relative_to(root).as_posix()
    yield Size(name, FILE_LINES, len(text.splitlines()))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, FUNCTIONS):
            where = f"{name}:{node.lineno} {node.name}"
            arguments = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
            yield Size(where, NESTING, nesting(node))
            if is_kernel(node):  # it takes pointers, strides and constants one by one, and no record of them
                yield Size(where, FUNCTION_LINES, (node.end_lineno or node.lineno) - node.body[0].lineno + 1)
                continue
            yield Size(where, FUNCTION_LINES, (node.end_lineno or node.lineno) - node.lineno + 1)
            yield Size(where, ARGUMENTS, sum(argument.arg not in ("self", "cls") for argument in arguments))


def is_kernel(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether Triton compiles the function."""
    return any("triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list)


def nesting(node: ast.AST, depth: int = 0) -> int:
    """Return how deep blocks stand in each other below `node`; an elif is as deep as its if, inner functions count anew."""
    elifs = node.orelse if isinstance(node, ast.If) and len(node.orelse) == 1 else []
    children = [child for child in ast.iter_child_nodes(node) if not isinstance(child, (*FUNCTIONS, ast.ClassDef))]
    deeper = [nesting(child, depth + (isinstance(child, BLOCKS) and child not in elifs)) for child in children]
    return max(deeper, default=depth)


def main() -> None:
    """Print every size past its aim, largest excess first, and the totals."""
    files = source_files()
    found = [size for path in files for size in sizes(path)]
    large = [size for size in found if size.value > size.measure.aim]
    for size in sorted(large, key=lambda size: size.value / size.measure.limit, reverse=True):
        print(size)
    lines = sorted(size.value for size in found if size.measure is FILE_LINES)
    functions = sorted(size.value for size in found if size.measure is FUNCTION_LINES)
    for name, values in (("files", lines), ("functions", functions)):
        median, p90 = (values[int(len(values) * share)] for share in (0.5, 0.9))
        print(f"{len(values)} {name}, {sum(values)} lines: median {median}, p90 {p90}, longest {values[-1]}")


if __name__ == "__main__":
    main()
