"""Folders of a checkout."""

from pathlib import Path

SUPPORT = Path(__file__).parent
ROOT = SUPPORT.parents[1]
DOCS = ROOT / "docs"
# The folders that are packages, and the packages' installed names.
PACKAGES = {"gradfree": "gradfree"} | {name: f"gradfree.{name}" for name in ("algorithms", "models", "benchmarks")}
RESULTS = ROOT / "benchmarks" / "results"
