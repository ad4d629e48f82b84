"""The pins: exact, complete, inside the ranges of pyproject.toml, without torch and without addresses."""

import importlib.metadata
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = ("dev", "arithmetic", "triton")  # of pyproject.toml that have a layer of the same name
LAYERS = {"trainer": [], **{extra: [extra] for extra in EXTRAS}}  # -> extras that it covers
FLEET = {"torch", "triton", "vllm", "nvidia-cublas", "tensorflow"}


def pins(layer: str) -> dict[str, Requirement]:
    """Return name -> pin of a layer, and of the layer that it includes."""
    found: dict[str, Requirement] = {}
    for line in (ROOT / f"requirements/{layer}.txt").read_text().splitlines():
        if line.startswith("-r "):
            found |= pins(line.removeprefix("-r ").removesuffix(".txt"))
        elif line and not line.startswith("#"):
            requirement = Requirement(line)
            found[canonicalize_name(requirement.name)] = requirement
    return found


def asked_for(layer: str) -> list[Requirement]:
    """Return what pyproject.toml asks for in this layer."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [line for extra in LAYERS[layer] for line in project["optional-dependencies"][extra]]
    return [Requirement(line) for line in project["dependencies"] + extras]


@pytest.mark.parametrize("layer", LAYERS)
def test_every_line_is_an_exact_pin(layer: str):
    lines = (ROOT / f"requirements/{layer}.txt").read_text().splitlines()
    odd = [
        line
        for line in lines
        if line and not re.fullmatch(r"#.*|-r (trainer|compilers)\.txt|[a-z0-9-]+(\[\w+\])?==[0-9][\w.]*", line)
    ]
    assert not odd, f"want name==version in lower case, no address, no hash: {odd}"


@pytest.mark.parametrize("layer", LAYERS)
def test_pins_lie_in_the_ranges_of_the_project(layer: str):
    found = pins(layer)
    for requirement in asked_for(layer):
        pin = found[canonicalize_name(requirement.name)]
        version = next(iter(pin.specifier)).version
        assert requirement.specifier.contains(version), f"{pin} is outside {requirement} of pyproject.toml"


@pytest.mark.parametrize("layer", LAYERS)
def test_everything_that_a_pin_pulls_is_pinned(layer: str):
    found = pins(layer)
    missing = []
    for name, pin in found.items():
        try:
            lines = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # a layer that may be left out
        for requirement in map(Requirement, lines):
            extras = ("", *pin.extras)
            applies = requirement.marker is None or any(requirement.marker.evaluate({"extra": e}) for e in extras)
            if applies and canonicalize_name(requirement.name) not in found:
                missing.append(f"{pin} needs {requirement}")
    assert not missing, "\n".join(missing)


def test_trainer_has_nothing_of_the_fleet():
    assert not FLEET & pins("trainer").keys()
    assert not FLEET & pins("dev").keys()
