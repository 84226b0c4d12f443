"""Packages that gradfree does without, and the extras of its installation that bring them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec


class MissingExtra(ImportError):
    """A package of an extra is not installed; the message says how to install it."""


@contextmanager
def needs_extra(extra: str) -> Iterator[None]:
    """Import inside the block what ``extra`` brings.

    Raises:
        MissingExtra: it is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("gradfree."):
            raise
        raise _missing(error.name, extra) from error


def require(extra: str, *names: str) -> None:
    """Look for the packages ``names`` of ``extra`` before work of hours begins that needs one of them at its end.

    Raises:
        MissingExtra: one is not installed.
    """
    for name in names:
        if find_spec(name) is None:
            raise _missing(name, extra)


def _missing(name: str, extra: str) -> MissingExtra:
    return MissingExtra(
        f"{name} is not installed; gradfree's extra {extra!r} brings it. "
        f"Do, in a checkout of it: pip install '.[{extra}]'"
    )
