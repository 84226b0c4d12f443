"""Helpers for messages: suggestions for unknown names, plurals, articles."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|.)")


def plain(text: str) -> str:
    """Return ``text`` without terminal escape sequences and control characters."""
    return "".join(c for c in _ESCAPE.sub("", text) if c.isprintable() or c in "\n\t")


def of_docstring(text: str) -> str:
    """Return a docstring without its markup for Sphinx: ``:class:`~gradfree.Engine``` is Engine."""
    return re.sub(r":\w+:`~?(?:[\w.]+\.)?(\w+)`", r"\1", text)


def no_such(kind: str, name: str, known: Iterable[str]) -> str:
    """Return the message that no ``kind`` is called ``name``, with all known names and the most similar one."""
    known = list(known)
    return f"no {kind} is called {name!r}; there are: {', '.join(known)}.{did_you_mean(name, known)}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return " Did you mean ...?" with the known name most similar to ``name``; "" if none is similar."""
    known, alike = list(known), name.lower().replace("-", "_")
    near = [k for word in (name, alike) for k in difflib.get_close_matches(word, known, n=1)] or [
        k for k in known if name and k.startswith(name)
    ]
    return f" Did you mean {near[0]!r}?" if near else ""


def spelled(name: str, known: Iterable[str]) -> str:
    """Return the known name that differs from ``name`` only by ``-`` for ``_``; ``name`` itself if there is none."""
    return next((k for k in known if k.replace("-", "_") == name.replace("-", "_")), name)


def count(number: int, noun: str) -> str:
    """Return ``number`` with ``noun``, in the plural unless ``number`` is 1."""
    return f"{number} {noun}{'s' if number != 1 else ''}"


def one(noun: str) -> str:
    """Return ``noun`` with its indefinite article."""
    return f"{'an' if noun[:1].lower() in 'aeiou' else 'a'} {noun}"
