"""Write the lists of docs/develop/tour.md: the files that one training step enters, in the order of first entry.

python benchmarks/scripts/tour.py [--check]

Each list stands between markers, after the Python example that defines its `step`. `--check` changes nothing and fails
if a list is out of date.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "develop" / "tour.md"
_SOURCES = tuple(f"{ROOT / folder}{os.sep}" for folder in ("gradfree", "algorithms"))
_TRACED = re.compile(r"(```python\n(.*?)```\n\n<!-- tour: [\w ]+ -->\n).*?(<!-- end -->)", re.DOTALL)


def entered(step: Callable[[], None]) -> dict[Path, str]:
    """Return the files of gradfree that `step` enters, in this order, each with the first function called there."""
    found: dict[Path, str] = {}

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        # Comprehensions are frames before Python 3.12.
        if event == "call" and code.co_filename.startswith(_SOURCES) and code.co_name[0] != "<":
            found.setdefault(Path(code.co_filename), code.co_name)

    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
    return found


def files_of(example: str) -> dict[Path, str]:
    """Return what the second `step` of an example enters; the first one also prepares the later ones."""
    names: dict[str, Any] = {"__name__": "example"}
    torch.manual_seed(0)
    exec(compile(example, "example", "exec"), names)
    names["step"]()
    return entered(names["step"])


def listed(found: dict[Path, str]) -> str:
    """Return the table of files, each with the first line of its docstring."""
    rows = ["| | file | first call | what it is |", "|---:|---|---|---|"]
    for n, (path, function) in enumerate(found.items(), 1):
        said = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")[0]
        place = path.relative_to(ROOT).as_posix()
        rows.append(f"| {n} | [`{place.removeprefix('gradfree/')}`](../../{place}) | `{function}` | {said} |")
    return "\n".join(rows) + "\n"


def tables(page: str) -> list[str]:
    """Return the lists in the text of a page."""
    return [part[0][len(part[1]) : -len(part[3])] for part in _TRACED.finditer(page)]


def written(page: str) -> str:
    """Return the text of a page with all lists written again."""
    return _TRACED.sub(lambda part: f"{part[1]}{listed(files_of(part[2]))}{part[3]}", page)


def main() -> None:
    """Write, or check, the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing, and fail if something is out of date")
    check, old = parser.parse_args().check, PAGE.read_text(encoding="utf-8")
    new = written(old)
    if check and new != old:
        sys.exit("docs/develop/tour.md is out of date. Write it again: python benchmarks/scripts/tour.py")
    PAGE.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
