"""What to say of a name that is not known."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def no_such(kind: str, name: str, known: Iterable[str]) -> str:
    """Return that no ``kind`` is called ``name``, with what is nearest to it, and all there are."""
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"no {kind} is called {name!r}; there are: {', '.join(known)}.{hint}"
