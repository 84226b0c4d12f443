"""Engines and models by name, ours and other people's alike: whatever the entry points declare."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from gradfree.engines.engine import Engine
from gradfree.entries import ENGINES, MODELS, entries, lookup

_registered: dict[str, type[Engine]] = {}


def register_engine(name: str, engine: type[Engine]) -> None:
    """Give an engine of yours a name in this process, as for one that is written in a notebook.

    Engines in a file need none: their import path is one, ``"my_module:MyEngine"``. In Lightning it is
    ``strategy=EngineStrategy(name)``.

    Args:
        name: letters, digits and underscores; one that no other engine has.
        engine: the class. That of the same name and module, as when a cell runs again, takes the place of the old one.

    Raises:
        TypeError: no class of engines.
        ValueError: the name is taken, or is none.
    """
    if not (isinstance(name, str) and name.isidentifier()):
        raise ValueError(f"the name of an engine must be of letters, digits and underscores, not {name!r}.")
    _check(name, engine)
    old = _registered.get(name, engine)
    if name in entries(ENGINES) or (old.__module__, old.__qualname__) != (engine.__module__, engine.__qualname__):
        raise ValueError(f"there is an engine {name!r} already, {engine_class(name)!r}: take another name.")
    _registered[name] = engine


def list_engines() -> list[str]:
    """Return the names of all engines, sorted."""
    return sorted({*entries(ENGINES), *_registered})


def list_models() -> list[str]:
    """Return the names of all models, sorted."""
    return list(entries(MODELS))


def engine_class(name: str) -> type[Engine]:
    """Return the class registered as ``name``, or anybody's by import path, ``"my_module:MyEngine"``.

    Raises:
        ValueError: unknown name.
        TypeError: what has this name is no engine.
        ImportError: the module of an import path cannot be imported, or has no such class.
    """
    found: type[Engine] = lookup(ENGINES, name, _registered)
    _check(name, found)
    return found


def _check(name: str, engine: object) -> None:
    if not (isinstance(engine, type) and issubclass(engine, Engine)):
        raise TypeError(f"the engine {name!r} must be a subclass of gradfree.Engine, not {engine!r}.")


def create_engine(name: str, **options: Any) -> Engine:
    """Return the engine registered as ``name`` with these options.

    Args:
        name: ``"auto"``, ``"backprop"``, ``"deeppcr"``, ``"dfa"``, ``"dsf"``, ``"fa"``, ``"fixed_point"``,
            ``"forward_gradient"``, ``"foton"``, ``"highway_bp"``, ``"newton"``, ``"orthogonal_backprop"``,
            ``"pepita"``, ``"predictive_coding"``, ``"shooting"``, ``"truncated"``, or what others have registered:
            :func:`list_engines`. ``gradfree engines NAME`` describes one.
            Anybody's engine by import path, too: ``"my_module:MyEngine"``.
        **options: as its class has them.

    Raises:
        ValueError: unknown name, or an option out of range.
        TypeError: unknown option, or one of the wrong type, or a name that is none.
    """
    return engine_class(name)(**options)


def create_model(name: str, **options: Any) -> nn.Module:
    """Return a new model of the kind registered as ``name``.

    Raises:
        ValueError: unknown name.
        TypeError: an option that the model does not have, or one that it needs is missing; the message names all.
    """
    model = lookup(MODELS, name)
    known = inspect.signature(model).parameters
    if unknown := options.keys() - known.keys():
        raise TypeError(f"{name} has no option {', '.join(map(repr, unknown))}; its options are: {', '.join(known)}.")
    try:
        inspect.signature(model).bind(**options)
    except TypeError as error:
        raise TypeError(f"{name}: {error}; its options are: {', '.join(known)}.") from None
    return model(**options)


def resolve_engine(engine: str | Engine, options: dict[str, Any]) -> Engine:
    """Return ``engine``, created with ``options`` if given by name.

    Raises:
        TypeError: options beside an engine that has its own, or neither a name nor an engine.
    """
    if isinstance(engine, str):
        return create_engine(engine, **options)
    if not isinstance(engine, Engine):
        raise TypeError(f"engine must be a name or an Engine, not {engine!r}.")
    if options:
        raise TypeError(f"{engine!r} has its options already; {', '.join(options)} would be ignored.")
    return engine
