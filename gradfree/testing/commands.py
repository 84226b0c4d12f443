"""``gradfree features`` on the command line; light to import, as every ``gradfree`` command imports it."""

from __future__ import annotations

import sys
from pathlib import Path

from gradfree.cli import UsageError
from gradfree.registry import create_engine, list_engines


def features(out: Path | None = None) -> None:
    """Try every feature with every engine and write the table, in Markdown; takes two minutes.

    Fails, and writes nothing, if something neither works nor is refused by an error of the library's own.

    Args:
        out: file to write to; standard output if not given.
    """
    if out is not None and not out.parent.is_dir():
        raise UsageError(f"cannot write {out}: there is no folder {out.parent}.")
    from gradfree.testing.table import Unclear, make_tables, markdown

    try:
        text = markdown(make_tables({name: create_engine(name) for name in list_engines()}, tell=_tell))
    except Unclear as error:
        raise UsageError(str(error)) from error
    if out is None:
        print(text)
    else:
        out.write_text(text, encoding="utf-8")


def _tell(what: str) -> None:
    print(what, file=sys.stderr)
