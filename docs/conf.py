"""The documentation site: ``make docs``."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
project = "gradfree"
release = metadata.version("gradfree")
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "sphinx_copybutton"]
html_theme = "furo"
html_title = f"gradfree {release}"
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
autodoc_typehints = "description"
autodoc_inherit_docstrings = False


def _within(app: Any, name: str, source: list[str]) -> None:
    """Lead links to pages of the repository to where they are in the site."""
    up = "../" * name.count("/")
    text = re.sub(r"\((?:\.\./)+benchmarks/results/([\w-]+)/report\.md\)", rf"({up}results/\1.md)", source[0])
    source[0] = re.sub(r"\((?:\.\./)+README\.md(#[\w-]+)?\)", f"({up}index.md)", text)


def _copy_reports(app: Any) -> None:
    """Make a page of every committed report."""
    pages = ROOT / "docs" / "results"
    pages.mkdir(exist_ok=True)
    for report in (ROOT / "benchmarks" / "results").glob("*/report.md"):
        include = f"```{{include}} ../../benchmarks/results/{report.parent.name}/report.md\n```\n"
        (pages / f"{report.parent.name}.md").write_text(
            f"# {report.parent.name}\n\n## Tables\n\n{include}", encoding="utf-8"
        )


def setup(app: Any) -> None:
    """Register both with Sphinx."""
    app.connect("builder-inited", _copy_reports)
    app.connect("source-read", _within)
