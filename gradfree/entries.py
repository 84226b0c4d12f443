"""Entry points: what is declared under names, by gradfree and by other packages alike."""

from __future__ import annotations

from importlib import metadata
from typing import Any

from gradfree import checkout
from gradfree.wording import no_such, one


def entries(group: str) -> dict[str, metadata.EntryPoint]:
    """Return the entry points of ``group`` by name; an installed package's beat a checkout's."""
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
