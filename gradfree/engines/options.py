"""Checks of engines' options."""

from __future__ import annotations

from gradfree.engines.engine import Engine


def check_count(engine: Engine, option: str, least: int) -> None:
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
