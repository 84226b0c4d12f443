"""Optional dependencies and the extras that install them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec


class MissingExtra(ImportError):
    """A package of an extra is not installed; the message says how to install it."""


@contextmanager
def needs_extra(extra: str) -> Iterator[None]:
    """Wrap imports of packages of ``extra``.

    Raises:
        MissingExtra: a package is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("gradfree."):
            raise
        raise _missing(error.name, extra) from error


def require(extra: str, *names: str) -> None:
    """Check that the packages ``names`` of ``extra`` are installed, before hours of work that need them at the end.

    Raises:
        MissingExtra: a package is not installed.
    """
    for name in names:
        if find_spec(name) is None:
            raise _missing(name, extra)


def _missing(name: str, extra: str) -> MissingExtra:
    return MissingExtra(
        f"{name} is not installed; gradfree's extra {extra!r} installs it. "
        f"In a checkout of gradfree: pip install '.[{extra}]'"
    )
