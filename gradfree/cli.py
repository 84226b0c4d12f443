"""The ``gradfree`` command."""

from __future__ import annotations

import inspect
import os
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

from gradfree import __doc__ as description
from gradfree import __version__
from gradfree.entries import ENGINES, MODELS, entries, load, lookup
from gradfree.extras import MissingExtra, needs_extra
from gradfree.wording import of_docstring, plain, spelled

COMMANDS = "gradfree.commands"


class UsageError(Exception):
    """A command cannot run; users see the message without a traceback."""


def engines(*arguments: str) -> None:
    """List the engines, or describe the named ones."""
    _describe(ENGINES, arguments)


def models(*arguments: str) -> None:
    """List the models, or describe the named ones."""
    _describe(MODELS, arguments)


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line ``args``, by default the process's own.

    A command is a function, and its options are the function's parameters. A function with ``*arguments`` parses its
    options itself. Packages add commands, or nested dicts of them, by the entry-point group ``gradfree.commands``.
    Import paths may name modules of the current folder, as with ``python -m``.
    """
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    added = {name: found for name, entry in entries(COMMANDS).items() if (found := _loaded(entry)) is not None}
    commands = {"engines": engines, "models": models, **added}
    given = sys.argv[1:] if args is None else list(args)
    if given == ["--version"]:
        print(f"gradfree {__version__}")
        return
    try:
        if given and _parses_itself(commands.get(given[0])):
            commands[given[0]](*given[1:])
        else:
            with needs_extra("bench"):
                from gradfree.command_parser import run_command
            run_command(commands, given, description)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of a pipe, such as head, has closed it. Otherwise Python would fail to flush stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (UsageError, MissingExtra) as error:
        print(f"gradfree: error: {plain(str(error))}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def _loaded(entry: EntryPoint) -> Any:
    """Return the command of a package; ``None``, with a warning, if it cannot be loaded."""
    try:
        return load(entry)
    except ImportError as error:
        print(f"gradfree: warning: {plain(str(error))}", file=sys.stderr)
        return None


def _parses_itself(command: Any) -> bool:
    return callable(command) and any(p.kind is p.VAR_POSITIONAL for p in inspect.signature(command).parameters.values())


def _describe(group: str, arguments: Sequence[str]) -> None:
    """Print a line for each entry of ``group``, or the descriptions and options of the named ones."""
    what = group.removeprefix("gradfree.")
    parser = ArgumentParser(f"gradfree {what}", description=f"List the {what}, or describe the named ones.")
    parser.add_argument("names", nargs="*", help="names from the list")
    names = [spelled(name, entries(group)) for name in parser.parse_args(arguments).names]
    try:
        chosen = [(name, lookup(group, name)) for name in names]
    except (ValueError, ImportError) as error:
        raise UsageError(error) from None
    for name, entry in chosen:
        print(f"{name}: {of_docstring(inspect.getdoc(entry) or '')}\n\nOptions and defaults:")
        options = inspect.signature(entry).parameters.values()
        lines = (f"    {o.name} {'(required)' if o.default is o.empty else f'= {o.default!r}'}" for o in options)
        print("\n".join(lines) or "    none", end="\n\n")
    if not names:
        _list(group)


def _list(group: str) -> None:
    found = entries(group)
    width = max(map(len, found))
    for name, entry in found.items():
        try:
            summary = of_docstring(inspect.getdoc(load(entry)) or "")
        except ImportError as error:
            summary = str(error)
        print(f"{name:{width}}  {summary.partition(chr(10))[0]}")
