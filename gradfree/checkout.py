"""Makes a plain checkout (``PYTHONPATH=.``) work like an installation.

An installation maps the top-level folders algorithms/, models/ and benchmarks/ to subpackages and keeps the
entry points in its metadata. A checkout has neither, but it has the pyproject.toml that both come from.
"""

from __future__ import annotations

import sys
from functools import cache
from importlib.metadata import EntryPoint
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
IS_CHECKOUT = (ROOT / "pyproject.toml").is_file() and (ROOT / "algorithms").is_dir()


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
