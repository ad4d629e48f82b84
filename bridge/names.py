"""Which Hugging Face tensors make up a parameter, and how one becomes the other; knows no file format."""

import dataclasses
from collections.abc import Iterator
from itertools import product
from typing import TypeVar

import jax
import numpy as np

from rl_jax.models.architecture import Architecture
from rl_jax.models.schema import Param, flat_table

Array = TypeVar("Array", np.ndarray, jax.Array)


def hf_slices(param: Param) -> Iterator[tuple[tuple[int, ...], str]]:
    """Yield (index over the stacked dimensions, Hugging Face name) of every tensor that a parameter is made of."""
    for index in product(*(range(param.dims[letter]) for letter in param.stacked)):
        yield index, param.hf.format(**dict(zip(param.stacked, index, strict=True)))


def hf_shapes(arch: Architecture) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of every tensor of a Hugging Face checkpoint.

    Raises:
        AssertionError: if two parameters claim one name: the table must be one-to-one.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for key, param in flat_table(arch).items():
        for _, name in hf_slices(param):
            assert name not in shapes, f"{key} claims {name}, which another parameter has"
            shapes[name] = param.hf_shape
    return shapes


def from_hf(param: Param, tensor: Array) -> Array:
    """Turn one Hugging Face tensor into the slice of the parameter that it is."""
    letters = param.hf_axes.replace(" ", "")
    return tensor.reshape([param.dims[letter] for letter in letters]).transpose(_order(letters, _inner(param)))


def to_hf(param: Param, piece: Array) -> Array:
    """Turn one slice of a parameter into its Hugging Face tensor; the inverse of from_hf."""
    return piece.transpose(_order(_inner(param), param.hf_axes.replace(" ", ""))).reshape(param.hf_shape)


def can_be_cut(param: Param) -> bool:
    """Return whether a parameter is one matrix that Hugging Face stores as it is: rows of the one are rows of the other."""
    return not param.stacked and len(param.sizes) == 2 and param.axes == param.hf_axes


def cut(param: Param, num_rows: int) -> Param:
    """Return what some rows of a parameter are; can_be_cut must be true."""
    return dataclasses.replace(param, sizes=(num_rows, param.sizes[1]))


def _inner(param: Param) -> str:
    return "".join(letter for letter in param.axes.split() if letter not in param.stacked)


def _order(source: str, target: str) -> list[int]:
    return [source.index(letter) for letter in target]
