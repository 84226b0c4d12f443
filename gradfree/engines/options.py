"""Checks of engines' options."""

from __future__ import annotations

from collections.abc import Iterable
from math import isfinite
from numbers import Integral, Real

from gradfree.engines.engine import Engine
from gradfree.wording import no_such


def check_count(engine: object, option: str, least: int, word: str | None = None) -> None:
    """Raise if an option is neither ``word`` nor a whole number of at least ``least``; convert numpy's to ``int``.

    Args:
        engine: has the option as an attribute.
        option: its name.
        least: the smallest number.
        word: what the option may be besides a number.
    """
    if word is None or getattr(engine, option) != word:
        object.__setattr__(engine, option, whole_number(engine, option, least, word))


def whole_number(engine: object, option: str, least: int, word: str | None = None) -> int:
    """Return an option as an ``int``.

    Raises:
        TypeError: not a whole number.
        ValueError: below ``least``.
    """
    value = getattr(engine, option)
    if isinstance(value, bool) or not isinstance(value, Integral):
        allowed = _or_word(word, f"an int of at least {least}")
        raise TypeError(f"{type(engine).__name__}: {option} must be {allowed}, not {value!r}.")
    if value < least:
        raise ValueError(f"{type(engine).__name__}: {option} must be at least {least}, not {value}.")
    return int(value)


def check_number(engine: object, option: str, allowed: str) -> None:
    """Raise if an option is not a number; convert numpy's numbers to ``float``.

    Args:
        engine: has the option as an attribute.
        option: its name.
        allowed: description of the allowed values, for the message.

    Raises:
        TypeError: not a number.
    """
    value = getattr(engine, option)
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{type(engine).__name__}: {option} must be {allowed}, not {value!r}.")
    if not isinstance(value, int | float):
        object.__setattr__(engine, option, float(value))


def check_positive(engine: Engine, option: str, most: float | None = None, word: str | None = None) -> None:
    """Raise if an option is neither ``word`` nor a positive, finite number of at most ``most``.

    Raises:
        TypeError: not a number.
        ValueError: zero, negative, infinite, NaN or above ``most``.
    """
    if word is not None and getattr(engine, option) == word:
        return
    check_number(engine, option, _or_word(word, "a positive number"))
    value = getattr(engine, option)
    if not (value > 0 and isfinite(value)):
        raise ValueError(f"{type(engine).__name__}: {option} must be positive and finite, not {value}.")
    if most is not None and value > most:
        raise ValueError(f"{type(engine).__name__}: {option} must be at most {most}, not {value}.")


def check_choice(engine: Engine, option: str, allowed: Iterable[str]) -> None:
    """Raise a ValueError if an option is not one of the ``allowed`` words."""
    value = getattr(engine, option)
    if value not in allowed:
        raise ValueError(f"{type(engine).__name__}: {no_such(option, str(value), allowed)}")


def _or_word(word: str | None, numbers: str) -> str:
    return numbers if word is None else f"{word!r} or {numbers}"
