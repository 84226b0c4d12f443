"""Engines and models by name, from the entry points of gradfree and other packages."""

from __future__ import annotations

from typing import Any

from torch import nn

from gradfree.engines.engine import Engine
from gradfree.entries import ENGINES, MODELS, entries, lookup


def list_engines() -> list[str]:
    """Return the names of all engines, sorted."""
    return list(entries(ENGINES))


def list_models() -> list[str]:
    """Return the names of all models, sorted."""
    return list(entries(MODELS))


def engine_class(name: str) -> type[Engine]:
    """Return the engine class registered as ``name``, or that of an import path, ``"my_module:MyEngine"``.

    Raises:
        ValueError: unknown name.
        TypeError: the object of this name is not an engine class.
        ImportError: the module of an import path cannot be imported, or has no such class.
    """
    found: type[Engine] = lookup(ENGINES, name)
    if not (isinstance(found, type) and issubclass(found, Engine)):
        raise TypeError(f"the engine {name!r} must be a subclass of gradfree.Engine, not {found!r}.")
    return found


def create_engine(name: str, **options: Any) -> Engine:
    """Return the engine registered as ``name`` with these options.

    Args:
        name: ``"auto"``, ``"backprop"``, ``"deeppcr"``, ``"dfa"``, ``"dsf"``, ``"fa"``, ``"fixed_point"``,
            ``"forward_gradient"``, ``"foton"``, ``"highway_bp"``, ``"newton"``, ``"orthogonal_backprop"``,
            ``"pepita"``, ``"predictive_coding"``, ``"shooting"``, ``"truncated"``, or one that other packages have
            registered: :func:`list_engines`. Or the import path of an engine class, ``"my_module:MyEngine"``.
            ``gradfree engines NAME`` describes an engine.
        **options: of the engine class.

    Raises:
        ValueError: unknown name, or an option out of range.
        TypeError: unknown option, or an option or name of the wrong type.
    """
    return engine_class(name)(**options)


def create_model(name: str, **options: Any) -> nn.Module:
    """Return a new model of the kind registered as ``name``.

    Raises:
        ValueError: unknown name.
        TypeError: an unknown or a missing option.
    """
    model: nn.Module = lookup(MODELS, name)(**options)
    return model


def resolve_engine(engine: str | Engine, options: dict[str, Any]) -> Engine:
    """Return ``engine``, created with ``options`` if given by name.

    Raises:
        TypeError: ``options`` together with an engine object, or ``engine`` is neither a name nor an engine.
    """
    if isinstance(engine, str):
        return create_engine(engine, **options)
    if not isinstance(engine, Engine):
        raise TypeError(f"engine must be a name or an Engine, not {engine!r}.")
    if options:
        raise TypeError(f"{engine!r} has its options already; {', '.join(options)} would be ignored.")
    return engine
