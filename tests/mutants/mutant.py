"""What a mutant is: a small change of what the code means, as a replacement of text, and the tests that notice it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Change:
    """One replacement of text.

    Attributes:
        where: a pattern of paths; one of them has the text, once.
        find: what is replaced.
        put: what takes its place.
    """

    where: str
    find: str
    put: str

    def applied(self, tree: Path) -> tuple[Path, str] | None:
        """Return the file that has the text, and what it says with the change; ``None`` if not one file has it."""
        found = [path for path in sorted(tree.glob(self.where)) if path.read_text(encoding="utf-8").count(self.find)]
        if len(found) != 1 or found[0].read_text(encoding="utf-8").count(self.find) != 1:
            return None
        return found[0], found[0].read_text(encoding="utf-8").replace(self.find, self.put)


@dataclass(frozen=True)
class Mutant:
    """One change, in as many words as versions of the code need.

    Attributes:
        name: what the changed code does.
        changes: the same for different versions of the code; the first that fits counts.
        tests: files of tests that notice it, the quickest first.
    """

    name: str
    changes: tuple[Change, ...]
    tests: tuple[str, ...]

    def applied(self, tree: Path) -> tuple[Path, str] | None:
        """Return the file to change, and what it says then; ``None`` where no change fits."""
        return next(self._fitting(tree), None)

    def _fitting(self, tree: Path) -> Iterator[tuple[Path, str]]:
        for change in self.changes:
            if (found := change.applied(tree)) is not None:
                yield found


def mutant(name: str, tests: str, *changes: tuple[str, str, str]) -> Mutant:
    """Return a mutant; ``tests`` with blanks between, each change as a pattern of paths, the old and the new text."""
    return Mutant(name, tuple(Change(*change) for change in changes), tuple(f"tests/{test}" for test in tests.split()))
