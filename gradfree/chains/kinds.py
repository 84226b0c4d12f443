"""The registry of kinds of chains that engines look for in a model."""

from __future__ import annotations

from collections.abc import Callable
from pkgutil import resolve_name
from typing import TypeVar

from gradfree.chains.site import Site

_Kind = TypeVar("_Kind", bound=type[Site])

# By name: these modules import this package.
_OWN = (
    "gradfree.rows.row_site:RowContainer",
    "gradfree.time.cell_site:CellLayerSite",
    "gradfree.layers.layer_site:Layered",
    "gradfree.time.torch_layer_site:TorchLayerSite",
)
_registered: dict[str, type[Site]] = {}


def register_chain(name: str) -> Callable[[_Kind], _Kind]:
    """Return a class decorator that registers a new kind of chain in this process.

    If several kinds accept the same module, the last one registered is used, then gradfree's own.

    Args:
        name: of the kind; it replaces another registered kind of this name.

    Raises:
        TypeError: the class is not a subclass of :class:`~gradfree.chains.site.Site`.
    """

    def register(kind: _Kind) -> _Kind:
        if not (isinstance(kind, type) and issubclass(kind, Site)):
            raise TypeError(
                f"the kind of chains {name!r} must be a subclass of gradfree.chains.site.Site, not {kind!r}."
            )
        _registered.pop(name, None)
        _registered[name] = kind
        return kind

    return register


def known_kinds() -> list[type[Site]]:
    """Return all kinds, in the order in which ``accepts`` is tried on a module."""
    return [*reversed(_registered.values()), *map(resolve_name, _OWN)]
