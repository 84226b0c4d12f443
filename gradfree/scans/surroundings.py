"""What a step function keeps outside of its carry: variables of closures, attributes of modules, lists in them."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import islice
from types import FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from gradfree.torchside.private import version

_PLAIN = (int, float, complex, str, bytes, bool, type(None))
_DEPTH, _ENTRIES, _ALL = 3, 256, 10_000
"""How many containers inside each other are looked into, with how many entries, and how many values in all."""


class Surroundings:
    """A snapshot of what a function can change outside of what it returns.

    Args:
        step: a function, method, ``functools.partial`` or module.
        buffers: whether attributes of modules count.
    """

    def __init__(self, step: Callable[..., Any], buffers: bool = True):
        self.found: dict[tuple[Any, ...], Any] = {}
        self._seen: set[int] = set()
        self._buffers = buffers
        self._visit("", step, _DEPTH)
        self._random = random.getstate()
        numpy = sys.modules.get("numpy.random")
        self._numpy = None if numpy is None else numpy.get_state()[2]

    def change(self, earlier: Surroundings) -> str | None:
        """Return what has changed since an earlier snapshot of the same function, in words; ``None`` if nothing has."""
        if self._random != earlier._random or self._numpy != earlier._numpy:
            return "draws random numbers"
        for name in self.found.keys() | earlier.found.keys():
            before, after = earlier.found.get(name, self), self.found.get(name, self)
            if after is not before and not (type(after) in _PLAIN and type(after) is type(before) and after == before):
                return f"changes {name[0]}, which it keeps from step to step"
        return None

    def _keep(self, name: str, *value: Any) -> None:
        for n, each in enumerate(value):
            self.found[name, n] = each

    def _visit(self, name: str, owner: Any, depth: int) -> None:
        """Note the contents of ``owner``."""
        if id(owner) in self._seen or isinstance(owner, (*_PLAIN, type, ModuleType)) or len(self.found) > _ALL:
            return
        self._seen.add(id(owner))
        if isinstance(owner, Tensor):
            self._keep(f"the tensor {name}", version(owner))
            return
        if isinstance(owner, partial):
            for inner in (owner.func, owner.args, owner.keywords):
                self._visit(name, inner, depth)
        elif isinstance(owner, MethodType):
            self._visit(name, owner.__func__, depth)
            self._visit("self", owner.__self__, depth)
        elif isinstance(owner, FunctionType):
            for variable, value in _variables(owner):
                self._keep(variable, value)
                self._visit(variable, value, depth)
        elif isinstance(owner, nn.Module):
            for path, module in owner.named_modules(prefix=name):
                self._visit_attributes(path, module, depth)
        elif depth:
            self._visit_container(name, owner, depth - 1)

    def _visit_attributes(self, path: str, owner: Any, depth: int) -> None:
        for attribute, value in vars(owner).items():
            where = f"{path}.{attribute}".removeprefix(".")
            if attribute == "_buffers" and not self._buffers:
                continue
            if attribute in ("_parameters", "_buffers"):
                for key, tensor in value.items():
                    own = f"{path}.{key}".removeprefix(".")
                    self._keep(own, tensor)
                    self._visit(own, tensor, depth)
            elif attribute != "_modules" and (self._buffers or not isinstance(value, Tensor)):
                self._keep(where, value)
                self._visit(where, value, depth)

    def _visit_container(self, name: str, owner: Any, depth: int) -> None:
        if isinstance(owner, dict):
            entries = list(islice(owner.items(), _ENTRIES))
            self._keep(name, len(owner), *(value for _, value in entries))
        elif isinstance(owner, (list, tuple, set, frozenset)) or type(owner).__name__ == "deque":
            entries = list(enumerate(islice(owner, _ENTRIES)))
            self._keep(name, len(owner), *(value for _, value in entries))
        elif hasattr(owner, "__dict__"):
            return self._visit_attributes(name, owner, depth)
        else:
            return None
        for key, value in entries:
            self._visit(f"{name}[{key!r}]", value, depth)
        return None


def _variables(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the variables outside of a function that it can read or change, by name."""
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # Not assigned yet.
            yield name, cell.cell_contents
    for name in code.co_names:
        if name in function.__globals__:
            yield name, function.__globals__[name]
