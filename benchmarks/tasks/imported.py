"""The user's functions, named as ``module:function``."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

from torch import nn

from gradfree.benchmarks.records.names import source_digest
from gradfree.cli import UsageError
from gradfree.wording import no_such, one


def names_a_function(name: str) -> bool:
    """Return whether ``name`` is a ``module:function``, not a registered name or a folder."""
    return re.fullmatch(r"[\w.]+:[\w.]+", name) is not None and not Path(name).exists()


@dataclass(frozen=True)
class Imported:
    """A function referred to by its name.

    Attributes:
        name: ``module:function``; the module may be in the current folder.
        source: :func:`source_digest` of the module: cases of another version have other records.
    """

    name: str
    source: str

    @classmethod
    def find(cls, name: str) -> Imported:
        """Find the function.

        Raises:
            UsageError: it does not exist.
        """
        if not name.partition(":")[2]:
            raise UsageError(f"{name} names no function; write {name.rstrip(':')}:build.")
        module = _module(name)
        reference = cls(name, source_digest(module.__name__))
        try:
            reference.load()
        except AttributeError:
            known = [n for n, value in vars(module).items() if callable(value) and value.__module__ == module.__name__]
            raise UsageError(no_such(f"function of {module.__name__}", name.partition(":")[2], known)) from None
        return reference

    def load(self) -> Callable[..., Any]:
        """Return the function."""
        function: Callable[..., Any] = reduce(getattr, self.name.partition(":")[2].split("."), _module(self.name))
        return function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return self.load()(*args, **kwargs)

    def result(self, **options: Any) -> Any:
        """Call the function with ``options``.

        Raises:
            UsageError: the function raises.
        """
        try:
            return self.load()(**options)
        except (Exception, SystemExit) as error:  # A script's sys.exit would end the command without a word.
            raise UsageError(f"{self.name} fails: {type(error).__name__}: {error}") from error

    def build(self, **options: Any) -> nn.Module:
        """Return the model that the function returns.

        Raises:
            UsageError: it returns something else, or raises.
        """
        model = self.result(**options)
        if not isinstance(model, nn.Module):
            raise UsageError(f"{self.name} returns {one(type(model).__name__)}, not an nn.Module.")
        return model


def _module(name: str) -> Any:
    module, _, function = name.partition(":")
    if module.endswith(".py"):
        stem = Path(module).stem
        raise UsageError(f"{name} names a file, not a module: write {stem}:{function} in the folder of {stem}.py.")
    try:
        return importlib.import_module(module)
    except (Exception, SystemExit) as error:
        raise UsageError(f"{name}: the module {module} cannot be imported: {type(error).__name__}: {error}") from error
