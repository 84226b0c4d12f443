"""What a module of the user's own is made of: its source and those of what it imports."""

from __future__ import annotations

import ast
import hashlib
import sysconfig
from collections.abc import Iterator
from importlib.machinery import PathFinder
from importlib.util import find_spec, resolve_name
from itertools import accumulate
from pathlib import Path

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
