"""The ``gradfree`` command."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from typing import Any

from gradfree import __doc__ as description
from gradfree.entries import entries
from gradfree.extras import MissingExtra, needs_extra
from gradfree.registry import ENGINES, MODELS

COMMANDS = "gradfree.commands"


class UsageError(Exception):
    """What the user asked for cannot be done; the message is all that they are shown."""


def engines() -> None:
    """List the engines."""
    _list(ENGINES)


def models() -> None:
    """List the models."""
    _list(MODELS)


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line ``args``, by default the process's own.

    A command is a function, its options are the function's parameters, or, if it takes ``*arguments``, its own
    business; packages add commands, or nested dicts of them, by the entry-point group ``gradfree.commands``.
    """
    added = {name: entry.load() for name, entry in entries(COMMANDS).items()}
    commands = {"engines": engines, "models": models, **added}
    given = sys.argv[1:] if args is None else list(args)
    try:
        if given and _reads_itself(commands.get(given[0])):
            commands[given[0]](*given[1:])
        else:
            with needs_extra("bench"):
                from gradfree.command_parser import run_command
            run_command(commands, given, description)
    except (UsageError, MissingExtra) as error:
        print(f"gradfree: error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def _reads_itself(command: Any) -> bool:
    return callable(command) and any(p.kind is p.VAR_POSITIONAL for p in inspect.signature(command).parameters.values())


def _list(group: str) -> None:
    found = entries(group)
    width = max(map(len, found))
    for name, entry in found.items():
        print(f"{name:{width}}  {(inspect.getdoc(entry.load()) or '').partition(chr(10))[0]}")
