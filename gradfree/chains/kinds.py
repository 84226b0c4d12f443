"""The registry of kinds of chains that engines look for in a model."""

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
    """Return a class decorator that registers a new kind of chain in this process.

    An installed package declares its kinds as entry points of the group ``gradfree.chains`` instead. If several kinds
    accept the same module, the last one registered is used, then those of entry points, then gradfree's own.

    Args:
        name: of the kind; it replaces another kind of this name.

    Raises:
        TypeError: the class is not a subclass of :class:`~gradfree.chains.site.Site`.
    """

    def register(kind: _Kind) -> _Kind:
        _check(name, kind)
        _registered.pop(name, None)
        _registered[name] = kind
        return kind

    return register


def known_kinds() -> list[type[Site]]:
    """Return all kinds, in the order in which ``accepts`` is tried on a module."""
    return [*reversed(_registered.values()), *(kind for name, kind in _declared() if name not in _registered)]


@cache
def _declared() -> list[tuple[str, type[Site]]]:
    found = sorted(entries(CHAINS).values(), key=lambda entry: entry.module.startswith("gradfree."))
    loaded = [(entry.name, _loaded(entry)) for entry in found]
    return [(name, kind) for name, kind in loaded if kind is not None]


def _loaded(entry: EntryPoint) -> type[Site] | None:
    """Return the kind that an entry point declares; warn and return ``None`` if it cannot be used."""
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
