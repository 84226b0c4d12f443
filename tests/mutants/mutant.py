"""Mutants: small changes of the code's behaviour, as text replacements, with the tests that must fail."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Mutant:
    """One change of behaviour.

    Attributes:
        name: describes the changed behaviour.
        tests: test files that must fail, the quickest first.
        where: glob pattern of paths; exactly one file must contain the text, once.
        find: the old text.
        put: the new text.
    """

    name: str
    tests: tuple[str, ...]
    where: str
    find: str
    put: str

    def applied(self, tree: Path) -> tuple[Path, str] | None:
        """Return the changed file's path and new contents; ``None`` unless exactly one file contains the text."""
        found = [path for path in sorted(tree.glob(self.where)) if self.find in path.read_text(encoding="utf-8")]
        if len(found) != 1 or found[0].read_text(encoding="utf-8").count(self.find) != 1:
            return None
        return found[0], found[0].read_text(encoding="utf-8").replace(self.find, self.put)


def read(file: Path) -> list[Mutant]:
    """Return the mutants of a text file.

    A title and the mutants are separated by empty lines. A mutant is its name, a line "in WHERE, caught by TESTS", the
    lines of the old text, each after "- ", and those of the new text, each after "+ ".
    """
    return [_parsed(*part.splitlines()) for part in file.read_text(encoding="utf-8").split("\n\n")[1:]]


def _parsed(name: str, where: str, *lines: str) -> Mutant:
    files, tests = where.removeprefix("  in ").split(", caught by ")
    find, put = ("\n".join(line[2:] for line in lines if line[0] == sign) for sign in "-+")
    return Mutant(name, tuple(f"tests/{test}" for test in tests.split()), files, find, put)
