"""Runs with one checkpoint, and a conversion, shared by the tests of bridge.convert and bridge.verify."""

import shutil
from pathlib import Path

import pytest
from exports import SQUARE, convert_to
from references import DENSE, MOE, draw_params, write_checkpoint

from rl_jax.models.architecture import Architecture


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[Architecture, Path]:
    """Run folders with the weights of draw_params."""
    folders = {arch: tmp_path_factory.mktemp(name) for arch, name in ((DENSE, "dense"), (MOE, "moe"))}
    for arch, folder in folders.items():
        write_checkpoint(folder, arch, draw_params(arch))
    return folders


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    write_checkpoint(folder, SQUARE, draw_params(SQUARE))
    return folder


@pytest.fixture(scope="session")
def converted(run_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert_to(tmp_path_factory.mktemp("made") / "model", run_folder)


@pytest.fixture
def copy(converted: Path, tmp_path: Path) -> Path:
    """A directory of its own, to be spoilt; nothing else lies beside it."""
    return Path(shutil.copytree(converted, tmp_path / "model"))
