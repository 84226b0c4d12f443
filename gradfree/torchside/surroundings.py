"""What functions keep outside of what they return: variables, defaults, attributes of modules and classes, lists."""

from __future__ import annotations

import random
import sys
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dis import get_instructions
from functools import lru_cache, partial
from itertools import islice, zip_longest
from types import BuiltinMethodType, CodeType, FunctionType, MethodType, MethodWrapperType, ModuleType
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from gradfree.torchside.private import global_hooks, version

_PLAIN = (int, float, complex, str, bytes, bool, type(None))
_WITHOUT_PARTS = (*_PLAIN, ModuleType)
CONTAINERS = (dict, list, tuple, set, frozenset, deque)
_EMPTY = {dict, list, set, OrderedDict}
_DEPTH, _ENTRIES, _ALL = 3, 256, 10_000
"""How many containers inside each other are looked into, with how many entries, and how many values in all."""
_BYTES = 1 << 16
"""Arrays up to this size are compared by their contents."""
_numpy_state: Callable[[], Any] = numpy.random.get_state
_LIBRARIES = {*sys.stdlib_module_names, "torch", "numpy"}
"""Packages in whose classes, modules and global variables no step keeps anything."""


class Surroundings:
    """A snapshot of what a function can change outside of what it returns.

    Args:
        step: a function, method, ``functools.partial`` or module, or a tuple of functions and classes.
        buffers: whether attributes of modules count.
        draws: whether random numbers of Python and NumPy count.

    Attributes:
        scripted: the name of a function or module of TorchScript that it may call; ``None``: none was found.
    """

    def __init__(self, step: Any, buffers: bool = True, draws: bool = True):
        self.found: list[tuple[str, Any]] = []
        self.scripted: str | None = None
        self._seen: set[int] = set()
        self._buffers = buffers
        self._visit("", step, _DEPTH)
        self._visit("a hook for all modules", global_hooks(), _DEPTH)
        self._random = (random.getstate(), _numpy_state()[2:]) if draws else None

    def change(self, earlier: Surroundings) -> str | None:
        """Return what has changed since an earlier snapshot of the same function, in words; ``None`` if nothing has."""
        if self._random != earlier._random:
            return "draws random numbers"
        for (name, after), (earlier_name, before) in zip_longest(self.found, earlier.found, fillvalue=("", self)):
            same = after is before or (type(after) in _PLAIN and type(after) is type(before) and after == before)
            if not same or name != earlier_name:
                return f"changes {name or earlier_name}, which it keeps from step to step"
        return None

    def _keep(self, name: str, *values: Any) -> None:
        self.found += [(name, value) for value in values]

    def _visit(self, name: str, owner: Any, depth: int) -> None:
        """Note the contents of ``owner``."""
        if id(owner) in self._seen or isinstance(owner, _WITHOUT_PARTS) or len(self.found) > _ALL:
            return
        self._seen.add(id(owner))
        if isinstance(owner, CONTAINERS):
            if depth:
                self._visit_container(name, owner, depth - 1)
        elif isinstance(owner, Tensor):
            self._keep(f"the tensor {name}", version(owner), _place(owner))
            for attribute, value in vars(owner).items() if depth else ():
                if not attribute.startswith("_"):  # As those by which torch marks what it has compiled for.
                    self._keep(f"{name}.{attribute}", value)
                    self._visit(f"{name}.{attribute}", value, depth - 1)
        elif isinstance(owner, (torch.jit.ScriptFunction, torch.ScriptMethod)):
            self.scripted = name
        elif isinstance(owner, partial):
            for inner in (owner.func, owner.args, owner.keywords):
                self._visit(name, inner, depth)
        elif isinstance(owner, MethodType):
            self._visit(name, owner.__func__, depth)
            self._visit("self", owner.__self__, depth)
        elif isinstance(owner, (BuiltinMethodType, MethodWrapperType)):  # Such as a list's append.
            self._visit(name, owner.__self__, depth)
        elif isinstance(owner, ContextVar):
            self._keep(name, value := owner.get(None))
            self._visit(name, value, depth)
        elif isinstance(owner, FunctionType):
            for variable, value in _variables(owner):
                self._keep(variable, value)
                self._visit(variable, value, depth)
        elif isinstance(owner, type):
            self._visit_class(owner, depth)
        elif isinstance(owner, nn.Module):
            for path, module in owner.named_modules(prefix=name):
                if isinstance(module, torch.jit.ScriptModule):
                    self.scripted = path
                    continue
                self._visit_attributes(path, module, depth)
                self._visit(path, type(module).forward, depth)
        elif isinstance(owner, weakref.ref):
            self._visit(name, owner(), depth)
        elif isinstance(owner, Iterator) and not hasattr(owner, "__dict__"):
            self._keep(name, object())  # Where it stands is not visible: taken for changed.
        elif depth:
            self._visit_object(name, owner, depth - 1)

    def _visit_class(self, kind: type, depth: int) -> None:
        for base in kind.__mro__:
            if _is_of_library(base):
                continue
            for attribute, value in vars(base).items():
                # No functions, properties and slots.
                if not (attribute.startswith("__") or hasattr(value, "__get__")):
                    where = f"{base.__name__}.{attribute}"
                    self._keep(where, value)
                    self._visit(where, value, depth)

    def _visit_attributes(self, path: str, owner: Any, depth: int) -> None:
        self._visit(path, type(owner), depth)
        for attribute, value in vars(owner).items():
            if type(value) in _EMPTY and not value:
                continue  # Most are a module's hooks; what is put in later is found.
            if attribute in ("_parameters", "_buffers", "_modules") and isinstance(owner, nn.Module):
                counts = attribute == "_parameters" or (attribute == "_buffers" and self._buffers)
                own = value.items() if counts else ()
            else:
                counts = self._buffers or not (value is None or isinstance(value, Tensor))
                own = [(attribute, value)] if counts else ()
            for key, each in own:
                where = f"{path}.{key}".removeprefix(".")
                self._keep(where, each)
                self._visit(where, each, depth)

    def _visit_container(self, name: str, owner: Any, depth: int) -> None:
        entries = list(islice(owner.items() if isinstance(owner, dict) else enumerate(owner), _ENTRIES))
        self._keep(name, len(owner), *(value for _, value in entries))
        for key, value in entries:
            self._visit(f"{name}[{key!r}]", value, depth)

    def _visit_object(self, name: str, owner: Any, depth: int) -> None:
        if hasattr(owner, "__dict__"):
            if callable(owner):
                self._visit(name, type(owner).__call__, depth)
            self._visit_attributes(name, owner, depth)
        else:
            with suppress(TypeError, ValueError, BufferError):
                array = memoryview(owner)
                self._keep(name, array.tobytes() if array.nbytes <= _BYTES else None)


def _variables(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield what a function can read or change outside of it, by name."""
    code = function.__code__
    yield from _without_modules(_free_variables(function), _names(code)[1], set())
    if not _is_of_library(function):
        defaults = function.__defaults__ or ()
        yield from zip(code.co_varnames[code.co_argcount - len(defaults) :], defaults, strict=False)
        yield from (function.__kwdefaults__ or {}).items()
        yield from ((f"{function.__name__}.{name}", value) for name, value in vars(function).items())


def _without_modules(
    variables: Iterable[tuple[str, Any]], attributes: Sequence[str], seen: set[str]
) -> Iterator[tuple[str, Any]]:
    """Yield the variables, and in place of modules those of these attributes that they, and modules in them, have."""
    for name, value in variables:
        if not isinstance(value, ModuleType):
            yield name, value
        elif not (_is_of_library(value) or value.__name__ in seen):
            seen.add(value.__name__)
            own = ((f"{name}.{each}", vars(value)[each]) for each in attributes if each in vars(value))
            yield from _without_modules(own, attributes, seen)


def _free_variables(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the variables of a closure and the global variables that a function can read or change, by name."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # Not assigned yet.
            yield name, cell.cell_contents
    for name in () if _is_of_library(function) else _names(function.__code__)[0]:
        if name in function.__globals__:
            yield name, function.__globals__[name]


@lru_cache(1024)
def _names(code: CodeType) -> tuple[Sequence[str], Sequence[str]]:
    """Return the names of global variables, and of attributes, in a function's code and that of its inner functions."""
    of_globals, of_attributes = [], []
    for instruction in get_instructions(code):
        if instruction.opname.endswith("_GLOBAL"):
            of_globals.append(instruction.argval)
        elif instruction.opname.endswith(("_ATTR", "_METHOD")):
            of_attributes.append(instruction.argval)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            for names, own in zip((of_globals, of_attributes), _names(inner), strict=True):
                names += own
    return tuple(dict.fromkeys(of_globals)), tuple(dict.fromkeys(of_attributes))


def _place(tensor: Tensor) -> int | None:
    """Return where the numbers of a tensor are: new ``data`` have no other version."""
    try:
        return tensor.data_ptr()
    except RuntimeError:  # Of a transform, or without values.
        return None


def _is_of_library(owner: Any) -> bool:
    module = owner.__name__ if isinstance(owner, ModuleType) else owner.__module__
    return str(module).partition(".")[0] in _LIBRARIES
