"""Entry points of gradfree and of other packages."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from typing import Any

from gradfree import checkout
from gradfree.extras import MissingExtra
from gradfree.wording import no_such, one

ENGINES = "gradfree.engines"
MODELS = "gradfree.models"


def entries(group: str) -> dict[str, metadata.EntryPoint]:
    """Return the entry points of ``group`` by name; those of other packages replace a checkout's of the same name."""
    return {entry.name: entry for entry in _found(group, tuple(sys.path))}


@cache
def _found(group: str, path: tuple[str, ...]) -> list[metadata.EntryPoint]:
    """Search; cached by ``sys.path``, since it takes milliseconds."""
    own = checkout.entry_points(group)
    # An installed gradfree may be another version with other modules, so its entry points are left out.
    others = [e for e in metadata.entry_points(group=group) if not (own and e.dist and e.dist.name == "gradfree")]
    return sorted([*own, *others], key=lambda entry: entry.name)


def load(entry: metadata.EntryPoint) -> Any:
    """Import the object that ``entry`` declares.

    Raises:
        ImportError: it cannot be imported; the message names the package.
    """
    try:
        return entry.load()
    except MissingExtra:
        raise
    except Exception as error:
        package = f" of the package {entry.dist.name}" if entry.dist else ""
        raise ImportError(
            f"{entry.name!r} in {entry.group}{package} cannot be loaded from {entry.value}: {type(error).__name__}: "
            f"{error}. Fix that package, or uninstall it."
        ) from error


def _imported(path: str) -> Any:
    try:
        return metadata.EntryPoint(path, path, "").load()
    except (ModuleNotFoundError, AttributeError) as error:
        raise ImportError(
            f"{path!r} cannot be imported: {type(error).__name__}: {error}. It must be module:Class, with a module "
            "in the folder that Python was started in, or on PYTHONPATH."
        ) from error
    except Exception as error:
        raise ImportError(f"{path!r} cannot be imported, its module raises {type(error).__name__}: {error}.") from error


def lookup(group: str, name: str, registered: Mapping[str, Any] | None = None) -> Any:
    """Load the object registered as ``name``, or that of an import path, ``"my_module:MyEngine"``.

    Args:
        group: of entry points.
        name: the name, or the import path.
        registered: objects that are registered in this process only, by name.

    Raises:
        ValueError: the name is unknown, or declared by two packages; the message lists the known names.
        TypeError: ``name`` is not a string.
        ImportError: the object cannot be loaded.
    """
    own = registered or {}
    known = {**entries(group), **own}
    what = group.removeprefix("gradfree.").removesuffix("s")
    if not isinstance(name, str):
        raise TypeError(f"the name of {one(what)} must be a str, one of {', '.join(known)}, not {name!r}.")
    if name in own:
        return own[name]
    if ":" in name:
        return _imported(name)
    if name not in known:
        raise ValueError(no_such(what, name, known))
    values = {entry.value for entry in _found(group, tuple(sys.path)) if entry.name == name}
    # gradfree itself may be there twice, installed and as a checkout, in two versions.
    if len({value.startswith("gradfree.") or value for value in values}) > 1:
        raise ValueError(
            f"{name!r} is the name of several {what}s: {', '.join(sorted(values))}. Uninstall or rename one."
        )
    return load(known[name])
