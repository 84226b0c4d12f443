"""What the forward of a module reads besides tensors: its attributes, what they hold, and variables outside of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from operator import is_
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any
from weakref import ref

from torch import Tensor, nn

from gradfree.torchside.sharding import is_torchs_own
from gradfree.torchside.structure import MODULE_ATTRIBUTES, held_by
from gradfree.torchside.surroundings import CONTAINERS, Surroundings

_MOST = 10_000
"""How many values are watched in the objects that modules hold."""

_OPAQUE = (str, bytes, int, float, type(None), type, Tensor, nn.Module, ModuleType, FunctionType, BuiltinFunctionType)


class Settings:
    """Watches the settings of modules for changes, by identity.

    These are classes and attributes of modules without their modes, their submodules, and all that is in lists,
    dictionaries and other objects that attributes hold; attributes of classes that are not torch's own, and variables
    outside that their ``forward`` and functions in attributes name.

    Args:
        modules: the modules.

    Attributes:
        watched: whether all settings can be watched: not if objects hold thousands of values.
    """

    def __init__(self, modules: Iterable[nn.Module]):
        modules = list(modules)
        users = [m for m in modules if not is_torchs_own(m)]
        kinds = dict.fromkeys(type(m) for m in users)
        functions = dict.fromkeys(f for m in users for f in vars(m).values() if isinstance(f, FunctionType | partial))
        self._functions = (*kinds, *(kind.forward for kind in kinds), *functions)
        self._outside = self._now_outside()
        self._own = [_own_values(m) for m in modules]
        self._own += [m._modules.values for m in modules if m._modules]
        self._own.append(partial(_classes, [ref(m) for m in modules]))
        held = _inside(value for m in users for value in held_by(vars(m)))
        self.watched = held is not None
        self._held = held or []
        self._known, self._known_inside = self._now_own(), _values(self._held)

    def changed(self) -> bool:
        """Return whether a setting is another object than when this was made."""
        return self.changed_elsewhere() or not _same(self._now_own(), self._known)

    def changed_elsewhere(self) -> bool:
        """The same without the attributes of the modules themselves."""
        if self._now_outside().change(self._outside) is not None:
            return True
        return bool(self._held) and not _same(_values(self._held), self._known_inside)

    def _now_own(self) -> list[Any]:
        return _values(values() for values in self._own)

    def _now_outside(self) -> Surroundings:
        # Other code may draw random numbers between two passes.
        return Surroundings(self._functions, draws=False)


def _own_values(module: nn.Module) -> Callable[[], Iterable[Any]]:
    """Return what returns the values of a module's attributes; of torch's layers those that may be settings."""
    own = vars(module)
    if not is_torchs_own(module):
        return lambda: [value for name, value in own.items() if name != "training"]
    names = [name for name, value in own.items() if name not in MODULE_ATTRIBUTES and not isinstance(value, Tensor)]
    return partial(map, own.get, names) if names else tuple


def _classes(modules: Iterable[ref[nn.Module]]) -> list[type]:
    # Weak references: what autograd keeps leads here, and a module may keep its output.
    return [type(module()) for module in modules]


def _inside(values: Iterable[Any]) -> list[Iterable[Any]] | None:
    """Return the contents of each list, dictionary and other object among ``values`` and inside of them, once.

    ``None`` if these are too many.
    """
    places, found, waiting = list[Iterable[Any]](), set[int](), list(values)
    for value in waiting:  # It grows meanwhile.
        if isinstance(value, _OPAQUE) or id(value) in found:
            continue
        found.add(id(value))
        contents = value if isinstance(value, CONTAINERS) else getattr(value, "__dict__", None)
        if contents is None:
            continue
        places.append(contents.values() if isinstance(contents, dict) else contents)
        waiting += places[-1]
        if len(waiting) > _MOST:
            return None
    return places


def _values(places: Iterable[Iterable[Any]]) -> list[Any]:
    return [value for place in places for value in place]


def _same(values: list[Any], known: list[Any]) -> bool:
    return len(values) == len(known) and all(map(is_, values, known))
