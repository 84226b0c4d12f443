"""A file of results that survives the end of its process: a line when something begins, and one with its result.

The first line identifies what is measured or tested; a process that is started again goes on behind the last one.
"""

from __future__ import annotations

import json
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

Line = dict[str, Any]


class Progress:
    """The file, open for more.

    Args:
        path: the file; results of anything but ``of`` are dropped.
        of: identifies what is measured or tested.

    Attributes:
        ended: the names of all that have a result.
        died_twice: the names of all without one in which the process has ended twice.
    """

    def __init__(self, path: Path, of: str):
        lines = _lines(path, of)
        self.ended = {line["name"] for line in lines if "name" in line}
        begun = Counter(line["begun"] for line in lines if "begun" in line)
        self.died_twice = {name for name, times in begun.items() if times > 1} - self.ended
        self._file = path.open("w", encoding="utf-8")
        for line in ({"of": of}, *lines):
            self._write(line)

    def begin(self, name: str) -> None:
        """Write that this one begins."""
        self._write({"begun": name})

    def end(self, name: str, **result: object) -> None:
        """Write the result of this one."""
        self.ended.add(name)
        self._write({"name": name, **result})

    def _write(self, line: Line) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


def results(path: Path, of: str) -> list[Line]:
    """Return the results in ``path`` if they are of ``of``; each has its ``name``."""
    return [line for line in _lines(path, of) if "name" in line]


def whole_lines(path: Path) -> list[Line]:
    """Return the lines of a file of JSON objects, without those that a lost process left incomplete."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        with suppress(ValueError):
            lines.append(json.loads(line))
    return lines


def _lines(path: Path, of: str) -> list[Line]:
    lines = whole_lines(path)
    return lines[1:] if lines[:1] == [{"of": of}] else []
