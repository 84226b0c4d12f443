"""Engines and models by name, from the entry points of gradfree and other packages."""

from __future__ import annotations

import inspect
import sys
from functools import cache
from typing import Any

from torch import nn

from gradfree.engines.engine import Engine
from gradfree.entries import ENGINES, MODELS, entries, lookup

_registered: dict[str, type[Engine]] = {}


def register_engine(name: str, engine: type[Engine]) -> None:
    """Register your engine under a name in this process, for example in a notebook.

    An engine in a file need not be registered: use its import path, ``"my_module:MyEngine"``. In Lightning, use a
    registered name as ``strategy=EngineStrategy(name)``.

    Args:
        name: letters, digits and underscores; it must not be the name of another engine.
        engine: the class. A class of the same module and name, from a notebook cell that runs again, replaces it.

    Raises:
        TypeError: ``engine`` is not an engine class.
        ValueError: the name is taken or invalid.
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
    """Return the engine class registered as ``name``, or that of an import path, ``"my_module:MyEngine"``.

    Raises:
        ValueError: unknown name.
        TypeError: the object of this name is not an engine class.
        ImportError: the module of an import path cannot be imported, or has no such class.
    """
    if name == "autograd":
        raise ValueError("'autograd' is a model without an engine: attach none, or 'backprop', which has its gradient.")
    found: type[Engine] = lookup(ENGINES, name, _registered)
    _check(name, found)
    return found


def _check(name: str, engine: object) -> None:
    if not (isinstance(engine, type) and issubclass(engine, Engine)):
        raise TypeError(f"the engine {name!r} must be a subclass of gradfree.Engine, not {engine!r}.")


def create_engine(name: str, **options: Any) -> Engine:
    """Return the engine registered as ``name`` with these options.

    Args:
        name: ``"auto"``, ``"backprop"``, ``"deeppcr"``, ``"dfa"``, ``"drtp"``, ``"dsf"``, ``"eprop"``, ``"fa"``,
            ``"fixed_point"``, ``"forward_gradient"``, ``"foton"``, ``"highway_bp"``, ``"mezo"``, ``"newton"``,
            ``"orthogonal_backprop"``, ``"pepita"``, ``"predictive_coding"``, ``"rtrl"``, ``"shooting"``, ``"snap"``,
            ``"target_propagation"``, ``"truncated"``, ``"uoro"``, or one that other packages have registered:
            :func:`list_engines`. Or the import path of an engine class, ``"my_module:MyEngine"``.
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
        TypeError: an unknown or a missing option; the message lists all options.
    """
    model = lookup(MODELS, name)
    known = inspect.signature(model).parameters
    try:
        inspect.signature(model).bind(**options)
    except TypeError as error:
        raise TypeError(f"{name}: {error}; its options are: {', '.join(known)}.") from None
    return model(**options)


@cache
def _without_options(name: str, registered: type[Engine] | None, path: tuple[str, ...]) -> Engine:
    """Return a named engine; cached by what decides which one that is, since ``scan`` asks in every call."""
    return create_engine(name)


def resolve_engine(engine: str | Engine, options: dict[str, Any]) -> Engine:
    """Return ``engine``, created with ``options`` if given by name.

    Raises:
        TypeError: ``options`` together with an engine object, or ``engine`` is neither a name nor an engine.
    """
    if isinstance(engine, str):
        if options or ":" in engine:
            return create_engine(engine, **options)
        return _without_options(engine, _registered.get(engine), tuple(sys.path))
    if not isinstance(engine, Engine):
        raise TypeError(f"engine must be a name or an Engine, not {engine!r}.")
    if options:
        raise TypeError(f"{engine!r} has its options already; {', '.join(options)} would be ignored.")
    return engine
