"""Makes a plain checkout (``PYTHONPATH=.``) work like an installation.

An installation maps the top-level folders algorithms/, models/ and benchmarks/ to subpackages and keeps the
entry points in its metadata. A checkout has neither, but it has the pyproject.toml that both come from.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import EntryPoint
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
IS_CHECKOUT = (ROOT / "pyproject.toml").is_file() and (ROOT / "algorithms").is_dir()


class _Subpackages(MetaPathFinder):
    """Finds the top-level folders under the names that an installation gives them."""

    _folders = {f"gradfree.{name}": ROOT / name for name in ("algorithms", "models", "benchmarks")}  # noqa: RUF012

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the spec of ``name`` if it is one of the folders."""
        folder = self._folders.get(name)
        if folder is None:
            return None
        return spec_from_file_location(name, folder / "__init__.py", submodule_search_locations=[str(folder)])


def map_subpackages() -> None:
    """Import the subpackages from this checkout, even if another version is installed."""
    if IS_CHECKOUT:
        sys.meta_path.insert(0, _Subpackages())


def entry_points(group: str) -> list[EntryPoint]:
    """Return the checkout's entry points of ``group``; none for an installed gradfree."""
    if not IS_CHECKOUT:
        return []
    return [EntryPoint(name, value, group) for name, value in _declared().get(group, {}).items()]


@cache
def _declared() -> dict[str, dict[str, str]]:
    """Return the entry points in pyproject.toml by group."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found: dict[str, dict[str, str]] = project["entry-points"]
    return found
