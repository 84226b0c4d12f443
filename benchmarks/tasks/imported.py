"""Functions of the user's own, named as ``module:function``, and what the sources are that they are made of."""

from __future__ import annotations

import ast
import hashlib
import importlib
import re
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce
from importlib.machinery import PathFinder
from importlib.util import find_spec, resolve_name
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from gradfree.cli import UsageError
from gradfree.wording import no_such, one

if TYPE_CHECKING:
    from typing_extensions import Self


_INSTALLED = {"site-packages", "dist-packages"}
_STANDARD = tuple(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib"))


def source_digest(module: str) -> str:
    """Return a digest of the sources of ``module`` and of all that it imports, directly or not, of the user's own.

    The user's own is what is neither installed, of the standard library nor gradfree. The import statements are read,
    also those in functions, and nothing is imported: the digest is the same whatever has run before, in any folder and
    on any machine. What is imported by a name that is put together at run time is not seen.
    """
    digest = hashlib.sha256()
    for name, source in sorted(_sources(module).items()):
        digest.update(f"{name} {len(source)}\n".encode() + source)
    return digest.hexdigest()[:8]


def _sources(module: str) -> dict[str, bytes]:
    sources: dict[str, bytes] = {}
    seen, waiting = set(), set(_with_packages(module))
    while waiting:
        seen.add(name := waiting.pop())
        file = _file(name)
        # A module that is named is the user's choice, wherever it lies.
        if file is None or not (name == module or _is_own(name, file)):
            continue
        sources[name] = file.read_bytes()
        package = name if file.stem == "__init__" else name.rpartition(".")[0]
        if file.suffix == ".py":
            waiting |= {n for i in _imported(sources[name], package) for n in _with_packages(i)} - seen
    return sources


def _with_packages(name: str) -> Iterator[str]:
    """Yield ``name`` and the packages that it is in, whose ``__init__`` runs with it."""
    return accumulate(name.split("."), "{}.{}".format)


def _imported(source: bytes, package: str) -> Iterator[str]:
    """Yield the full names in import statements; of ``from a import b`` both ``a`` and ``a.b``, if that is a module."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (package or not node.level):
            base = "." * node.level + (node.module or "")
            try:
                base = resolve_name(base, package)
            except ImportError:
                continue
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _file(name: str) -> Path | None:
    """Return the file of a module, none for what has none: a folder, or what is built into Python."""
    top, *rest = name.split(".")
    try:
        spec = find_spec(top)
        for part in rest:
            # By its last name in the package's folders: by the full one, packages would have to be imported.
            inside = list(spec.submodule_search_locations or ()) if spec else []
            spec = PathFinder.find_spec(part, inside)
    except (ImportError, ValueError):
        return None
    file = Path(spec.origin) if spec and spec.origin else None
    return file if file and file.is_file() else None


def _is_own(name: str, file: Path) -> bool:
    folders = file.resolve().parents
    installed = any(folder.name in _INSTALLED for folder in folders)
    return not (installed or name.partition(".")[0] == "gradfree" or any(folder in folders for folder in _STANDARD))


def names_a_function(name: str) -> bool:
    """Tell whether ``name`` is a ``module:function``, not a registered name or a folder."""
    return re.fullmatch(r"[\w.]+:[\w.]+", name) is not None and not Path(name).exists()


@dataclass(frozen=True)
class Imported:
    """A function by its name.

    Attributes:
        name: ``module:function``; the module may lie in the current folder.
        source: digest of the module and of what it imports, as :func:`source_digest` has it: records of another version
            are not this one's.
    """

    name: str
    source: str

    @classmethod
    def to(cls, name: str) -> Self:
        """Find the function.

        Raises:
            UsageError: there is none.
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
        """Return what the function makes of ``options``.

        Raises:
            UsageError: it raises.
        """
        try:
            return self.load()(**options)
        except Exception as error:
            raise UsageError(f"{self.name} fails: {type(error).__name__}: {error}") from error


def _module(name: str) -> Any:
    module, _, function = name.partition(":")
    if module.endswith(".py"):
        stem = Path(module).stem
        raise UsageError(f"{name} names a file, not a module: write {stem}:{function} in the folder of {stem}.py.")
    try:
        return importlib.import_module(module)
    except Exception as error:
        raise UsageError(f"{name}: the module {module} cannot be imported: {type(error).__name__}: {error}") from error


@dataclass(frozen=True)
class Builder(Imported):
    """A function that returns a new model when called with its options."""

    def build(self, **options: Any) -> nn.Module:
        """Return a new model.

        Raises:
            UsageError: the function returns none.
        """
        model = self.result(**options)
        if not isinstance(model, nn.Module):
            raise UsageError(f"{self.name} returns {one(type(model).__name__)}, not an nn.Module.")
        return model
