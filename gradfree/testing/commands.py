"""``gradfree features`` on the command line; light to import, as every ``gradfree`` command imports it."""

from __future__ import annotations

import sys
from pathlib import Path

from gradfree.cli import UsageError
from gradfree.registry import create_engine, list_engines


def features(out: Path | None = None, models: bool = False) -> None:
    """Try every feature with every engine and write the table, in Markdown; takes two minutes.

    Fails, and writes nothing, if something neither works nor is refused by an error of the library's own.

    Args:
        out: file to write to; standard output if not given.
        models: try architectures of transformers, timm and torchvision instead, as far as these are installed; takes
            five minutes. The extra ``models`` brings the first two.
    """
    if out is not None and not out.parent.is_dir():
        raise UsageError(f"cannot write {out}: there is no folder {out.parent}.")
    text = _of_models() if models else _of_engines()
    if out is None:
        print(text)
    else:
        out.write_text(text, encoding="utf-8")


def _tell(what: str) -> None:
    print(what, file=sys.stderr)


def _of_engines() -> str:
    from gradfree.testing.table import Unclear, make_tables, markdown

    try:
        return markdown(make_tables({name: create_engine(name) for name in list_engines()}, tell=_tell))
    except Unclear as error:
        raise UsageError(str(error)) from error


def _of_models() -> str:
    from gradfree.testing.architectures.page import page

    try:
        return page(tell=_tell)
    except AssertionError as error:
        raise UsageError(str(error)) from error
