"""Mutants: small changes of the code's behaviour, as text replacements, with the tests that must fail."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Change:
    """One replacement of text.

    Attributes:
        where: glob pattern of paths; exactly one file must contain the text, once.
        find: the old text.
        put: the new text.
    """

    where: str
    find: str
    put: str

    def applied(self, tree: Path) -> tuple[Path, str] | None:
        """Return the changed file's path and new contents; ``None`` unless exactly one file contains the text."""
        found = [path for path in sorted(tree.glob(self.where)) if path.read_text(encoding="utf-8").count(self.find)]
        if len(found) != 1 or found[0].read_text(encoding="utf-8").count(self.find) != 1:
            return None
        return found[0], found[0].read_text(encoding="utf-8").replace(self.find, self.put)


@dataclass(frozen=True)
class Mutant:
    """One change of behaviour.

    Attributes:
        name: describes the changed behaviour.
        changes: alternatives for different versions of the code; the first one that fits is used.
        tests: test files that must fail, the quickest first.
    """

    name: str
    changes: tuple[Change, ...]
    tests: tuple[str, ...]

    def applied(self, tree: Path) -> tuple[Path, str] | None:
        """Return the path and new contents of the file to change; ``None`` if no change fits."""
        return next(self._fitting(tree), None)

    def _fitting(self, tree: Path) -> Iterator[tuple[Path, str]]:
        for change in self.changes:
            if (found := change.applied(tree)) is not None:
                yield found


def mutant(name: str, tests: str, *changes: tuple[str, str, str]) -> Mutant:
    """Return a mutant; ``tests`` are separated by blanks, each change is (pattern of paths, old text, new text)."""
    return Mutant(name, tuple(Change(*change) for change in changes), tuple(f"tests/{test}" for test in tests.split()))
