"""What is raised where an engine cannot be right."""

from __future__ import annotations

from collections.abc import Iterable


class ChainError(RuntimeError):
    """A model, or a forward or backward pass of it, that an engine cannot carry out correctly."""


def refuse(problems: Iterable[str]) -> None:
    """Raise for the first of ``problems``, if there is one.

    Raises:
        ChainError: it says what the problem is.
    """
    for problem in problems:
        raise ChainError(problem)
