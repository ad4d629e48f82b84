"""Checks of plain numbers, which callers without torch need too. See checks.py for what the exceptions mean."""

import math


def check_range(name: str, value: int, low: int, high: int) -> None:
    """Raise ValueError unless low <= value <= high."""
    if not low <= value <= high:
        raise ValueError(f"{name}={value}: must be from {low} to {high}")


def check_multiple(name: str, value: int, factor: int) -> None:
    """Raise ValueError unless `factor` divides `value`."""
    if value % factor:
        raise ValueError(f"{name}={value}: must be a multiple of {factor}")


def check_finite(name: str, value: float) -> None:
    """Raise ValueError unless `value` is a finite number."""
    if not math.isfinite(value):
        raise ValueError(f"{name}={value}: must be finite")
