"""The kinds of chains that engines look for in a model, ours and other people's alike."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from importlib.metadata import EntryPoint
from typing import TypeVar

from gradfree.chains.site import Site
from gradfree.entries import entries, load

CHAINS = "gradfree.chains"

_Kind = TypeVar("_Kind", bound=type[Site])
_registered: dict[str, type[Site]] = {}


def register_chain(name: str) -> Callable[[_Kind], _Kind]:
    """Return a decorator that lets engines find chains of a new kind, from now on in this process.

    A package that is installed declares its kinds as entry points of the group ``gradfree.chains`` instead, and
    registers nothing. Of several kinds that take the same module the last one registered counts; before those of entry
    points, of which gradfree's own come last.

    Args:
        name: of the kind; another one of this name is replaced.

    Raises:
        TypeError: what is decorated is no subclass of :class:`~gradfree.chains.site.Site`.
    """

    def register(kind: _Kind) -> _Kind:
        _check(name, kind)
        _registered.pop(name, None)
        _registered[name] = kind
        return kind

    return register


def known_kinds() -> list[type[Site]]:
    """Return all kinds, in the order in which they are asked whether they take a module."""
    return [*reversed(_registered.values()), *(kind for name, kind in _declared() if name not in _registered)]


@cache
def _declared() -> list[tuple[str, type[Site]]]:
    found = sorted(entries(CHAINS).values(), key=lambda entry: entry.module.startswith("gradfree."))
    loaded = [(entry.name, _loaded(entry)) for entry in found]
    return [(name, kind) for name, kind in loaded if kind is not None]


def _loaded(entry: EntryPoint) -> type[Site] | None:
    """Return the kind that an entry declares; ``None``, and a warning, if there is none: others work all the same."""
    try:
        kind: type[Site] = load(entry)
        _check(entry.name, kind)
    except (ImportError, TypeError) as error:
        warnings.warn(f"{error} Its chains are not found.", stacklevel=2)
        return None
    return kind


def _check(name: str, kind: object) -> None:
    if not (isinstance(kind, type) and issubclass(kind, Site)):
        raise TypeError(f"the kind of chains {name!r} must be a subclass of gradfree.chains.site.Site, not {kind!r}.")
