"""Packages that gradfree does without, and the extras of its installation that bring them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


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
        message = (
            f"{error.name} is not installed; gradfree's extra {extra!r} brings it. "
            f"Do, in a checkout of it: pip install '.[{extra}]'"
        )
        raise MissingExtra(message) from error
