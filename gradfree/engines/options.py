"""Checks of engines' options."""

from __future__ import annotations

from math import isfinite
from numbers import Integral, Real

import torch

from gradfree.engines.engine import Engine
from gradfree.errors import ChainError


def check_count(engine: object, option: str, least: int) -> None:
    """Refuse an option that is not a whole number of at least ``least``; make one of numpy's an ``int``."""
    object.__setattr__(engine, option, whole_number(engine, option, least))


def whole_number(engine: object, option: str, least: int) -> int:
    """Return an attribute that is a whole number.

    Raises:
        TypeError: no whole number.
        ValueError: below ``least``.
    """
    value = getattr(engine, option)
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{type(engine).__name__}: {option} must be an int of at least {least}, not {value!r}.")
    if value < least:
        raise ValueError(f"{type(engine).__name__}: {option} must be at least {least}, not {value}.")
    return int(value)


def check_number(engine: object, option: str, allowed: str) -> None:
    """Refuse an option that is no number; make one of numpy's a ``float``.

    Args:
        engine: has it.
        option: its name.
        allowed: what it must be, for the message.

    Raises:
        TypeError: no number.
    """
    value = getattr(engine, option)
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{type(engine).__name__}: {option} must be {allowed}, not {value!r}.")
    if not isinstance(value, int | float):
        object.__setattr__(engine, option, float(value))


def check_positive(engine: Engine, option: str) -> None:
    """Refuse an option that is not a positive number.

    Raises:
        TypeError: not a number.
        ValueError: zero, negative, infinite or NaN.
    """
    check_number(engine, option, "a positive number")
    value = getattr(engine, option)
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
