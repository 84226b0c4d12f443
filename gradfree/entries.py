"""Entry points: what is declared under names, by gradfree and by other packages alike."""

from __future__ import annotations

import sys
from functools import cache
from importlib import metadata
from typing import Any

from gradfree import checkout
from gradfree.wording import no_such, one

ENGINES = "gradfree.engines"
MODELS = "gradfree.models"


def entries(group: str) -> dict[str, metadata.EntryPoint]:
    """Return the entry points of ``group`` by name; an installed package's beat a checkout's."""
    return dict(_found(group, tuple(sys.path)))


@cache
def _found(group: str, path: tuple[str, ...]) -> dict[str, metadata.EntryPoint]:
    """Look once on each ``sys.path``: it takes milliseconds, and engines are made by name again and again."""
    found = [*checkout.entry_points(group), *metadata.entry_points(group=group)]
    return {entry.name: entry for entry in sorted(found, key=lambda entry: entry.name)}


def lookup(group: str, name: str) -> Any:
    """Load what is registered as ``name``.

    Raises:
        ValueError: nothing is; the message names what is.
        TypeError: it is no name.
    """
    known = entries(group)
    what = group.removeprefix("gradfree.").removesuffix("s")
    if not isinstance(name, str):
        raise TypeError(f"the name of {one(what)} must be a str, one of {', '.join(known)}, not {name!r}.")
    if name not in known:
        raise ValueError(no_such(what, name, known))
    return known[name].load()
