"""The ``gradfree`` command."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from jsonargparse import ActionYesNo, ArgumentParser, auto_cli

from gradfree import __doc__ as description
from gradfree.entries import entries
from gradfree.registry import ENGINES, MODELS
from gradfree.wording import did_you_mean

COMMANDS = "gradfree.commands"


class UsageError(Exception):
    """What the user asked for cannot be done; the message is all that they are shown."""


class _Parser(ArgumentParser):
    """A parser with ``--dry-run`` for ``dry_run``, and switches for what is true or false: ``--retry``, ``--no-retry``.

    ``--dry_run`` and ``--retry=true``, as in a configuration file, will do. An option is not taken for another that it
    begins like: with ``--seed`` for ``--seeds`` another thing may be meant.
    """

    def __init__(self, *args: Any, **settings: Any):
        super().__init__(*args, **{"allow_abbrev": False, **settings})

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Say what is wrong, of an unknown option also what it may have been meant to be, and end the process."""
        unknown = re.match(r"unrecognized arguments: (--[\w-]+)", message)
        known = [name for name in self._option_string_actions if "_" not in name]
        super().error(f"{message}.{did_you_mean(unknown[1], known)}" if unknown else message, ex)

    def add_argument(self, *names: str, **settings: Any) -> Any:
        if names[0].startswith("--"):
            names = tuple(dict.fromkeys([name.replace("_", "-") for name in names] + list(names)))
        if settings.get("type") is bool:
            del settings["type"]
            settings.update(action=ActionYesNo(no_prefix="no-"), nargs="?")
        return super().add_argument(*names, **settings)


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
            auto_cli(commands, given, prog="gradfree", description=description, parser_class=_Parser)
    except UsageError as error:
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


@contextmanager
def needs_extra(extra: str = "bench") -> Iterator[None]:
    """Import inside the block what ``extra`` brings.

    Raises:
        UsageError: it is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if str(error.name).startswith("gradfree."):
            raise
        raise UsageError(f"{error.name} is not installed. Do: pip install 'gradfree[{extra}]'") from error
