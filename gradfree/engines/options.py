"""Checks of engines' options."""

from __future__ import annotations

from math import isfinite

import torch

from gradfree.engines.engine import Engine
from gradfree.errors import ChainError


def check_count(engine: object, option: str, least: int) -> None:
    """Refuse an option that is not a whole number of at least ``least``.

    Raises:
        TypeError: not an ``int``.
        ValueError: too small.
    """
    value = getattr(engine, option)
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{type(engine).__name__}: {option} must be an int of at least {least}, not {value!r}.")
    if value < least:
        raise ValueError(f"{type(engine).__name__}: {option} must be at least {least}, not {value}.")


def check_positive(engine: Engine, option: str) -> None:
    """Refuse an option that is not a positive number.

    Raises:
        TypeError: not a number.
        ValueError: zero, negative, infinite or NaN.
    """
    value = getattr(engine, option)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{type(engine).__name__}: {option} must be a positive number, not {value!r}.")
    if not (value > 0 and isfinite(value)):
        raise ValueError(f"{type(engine).__name__}: {option} must be positive and finite, not {value}.")


def refuse_unresolved(engine: Engine, tolerance: float | None, dtype: torch.dtype) -> None:
    """Refuse a relative tolerance that numbers of ``dtype`` do not resolve."""
    finest = torch.finfo(dtype).eps
    if tolerance is not None and tolerance < finest:
        raise ChainError(
            f"{type(engine).__name__}: tolerance={tolerance} is finer than states in {dtype} resolve, {finest:.1e}. "
            "Take a larger one, or states of higher precision."
        )
