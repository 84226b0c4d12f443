"""What to say when the packages of an extra are missing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from gradfree.cli import UsageError


@contextmanager
def needs_extra(extra: str = "bench") -> Iterator[None]:
    """Import inside the block what ``extra`` brings.

    Raises:
        UsageError: it is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise UsageError(f"{error.name} is not installed. Do: pip install 'gradfree[{extra}]'") from error
