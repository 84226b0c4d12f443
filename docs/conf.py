"""The documentation site: ``make docs``.

Pages are plain Markdown that reads well on a code host. This file adds what only a site can have: the table of
contents, from the links of ``index.md``; a page for each committed report; the signatures of everything that the API
page and the pages of engines name.
"""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from pathlib import Path
from shutil import rmtree
from typing import Any

import gradfree
from gradfree import errors
from gradfree.registry import engine_class

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
project = "gradfree"
html_show_copyright = False
release = gradfree.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "sphinx_copybutton"]
html_theme = "furo"
html_title = f"gradfree {release}"
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
autodoc_typehints = "description"
autodoc_inherit_docstrings = False


def _contents(index: str) -> str:
    """Return a hidden table of contents for each heading below "All pages": the linked pages, then their folders'."""
    tables = []
    for section in index.partition("\n## All pages\n")[2].split("\n### ")[1:]:
        pages = re.findall(r"\]\(([\w/-]+)\.md\)", section)
        folders = dict.fromkeys(page.rpartition("/")[0] for page in pages)
        found = (path.relative_to(DOCS) for folder in folders for path in sorted((DOCS / folder).glob("*.md")))
        pages += [str(path.with_suffix("")) for path in found]
        caption = section.partition("\n")[0]
        tables.append("\n".join(["```{toctree}", f":caption: {caption}", ":hidden:", *dict.fromkeys(pages), "```"]))
    return "\n\n".join(tables)


def _signature(path: str) -> list[str]:
    """Return the directive that documents what lies at ``path``, such as ``gradfree.lightning.EngineStrategy``."""
    module, _, name = path.rpartition(".")
    found = getattr(import_module(module), name)
    if not inspect.isclass(found) and not inspect.isfunction(found):
        return []  # A type, which the table explains.
    if not inspect.isclass(found):
        return [f".. autofunction:: {path}"]
    kind = "autoexception" if issubclass(found, Exception) else "autoclass"
    return [f".. {kind}:: {path}", *(["   :members:"] if kind == "autoclass" and not issubclass(found, tuple) else [])]


def _evaluated(lines: list[str]) -> str:
    return "\n".join(["", "```{eval-rst}", *lines, "```", ""])


def _complete(app: Any, name: str, source: list[str]) -> None:
    """Add to the page ``name`` what Markdown alone cannot have."""
    up = "../" * name.count("/")
    text = re.sub(r"\((?:\.\./)+benchmarks/results/([\w-]+)/report\.md", rf"({up}results/reports/\1.md", source[0])
    text = re.sub(r"\((?:\.\./)+README\.md(#[\w-]+)?\)", f"({up}index.md)", text)
    folder, _, stem = name.rpartition("/")
    if name == "index":
        text += "\n" + _contents(source[0])
    elif name == "results/index":
        text += "\n```{toctree}\n:hidden:\n:glob:\nreports/*\n```\n"
    elif name == "reference/api":
        paths = re.findall(r"^\| `([\w.]+)` \|", text, re.MULTILINE)
        paths = [path for path in paths if path.replace(".extending", "") not in paths or ".extending" not in path]
        text += "\n## Signatures\n" + _evaluated([line for path in paths for line in _signature(path)])
    elif name == "reference/refusals":
        text += "\n" + _refusals()
    elif name == "reference/changelog":
        changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").partition("\n## ")[2]
        text = "# Changelog\n\n## " + changes.replace("](docs/", "](../")
    elif folder == "engines" and stem != "index":
        text += "\n## Signature\n" + _evaluated([f".. autoclass:: gradfree.algorithms.{engine_class(stem).__name__}"])
    source[0] = text


def _refusals() -> str:
    """Return all tables of refusals."""
    lines = []
    for family, rows in errors.REFUSALS.items():
        lines += [f"## {family}", "", "| what | the message, and what to do |", "|---|---|"]
        lines += [f"| {row.case} | {row.why} {row.remedy} |".replace("{", "*").replace("}", "*") for row in rows]
        lines.append("")
    return "\n".join(lines)


def _copy_reports(app: Any) -> None:
    """Make a page of every committed report."""
    pages = DOCS / "results" / "reports"
    rmtree(pages, ignore_errors=True)
    pages.mkdir(parents=True)
    for report in (ROOT / "benchmarks" / "results").glob("*/report.md"):
        include = f"```{{include}} ../../../benchmarks/results/{report.parent.name}/report.md\n```\n"
        (pages / f"{report.parent.name}.md").write_text(
            f"# {report.parent.name}\n\n## Tables\n\n{include}", encoding="utf-8"
        )


def setup(app: Any) -> None:
    """Register both with Sphinx."""
    app.connect("builder-inited", _copy_reports)
    app.connect("source-read", _complete)
