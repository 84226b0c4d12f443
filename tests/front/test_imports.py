"""Imports run one way: the core knows no engine, no model and no benchmark but by its registered name."""

import ast

import pytest
from places import ROOT

FORBIDDEN = {
    "gradfree": ("algorithms", "models", "benchmarks"),
    "algorithms": ("models", "benchmarks"),
    "models": ("algorithms", "benchmarks"),
}


def imports(path):
    """Yield the full names of what the module at ``path`` imports, at its head or in a function."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            yield from (f"{module}{alias.name}." for alias in node.names)


@pytest.mark.parametrize("package", FORBIDDEN)
def test_imports_run_one_way(package):
    above = tuple(f"gradfree.{name}." for name in FORBIDDEN[package])
    found = {(str(path.relative_to(ROOT)), name) for path in (ROOT / package).rglob("*.py") for name in imports(path)}
    assert len(found) > 10
    assert not {(path, name) for path, name in found if name.startswith(above)}
