"""The parser of the ``gradfree`` command: functions are commands, their parameters are options."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, get_args, get_origin

from jsonargparse import ActionYesNo, ArgumentParser, auto_cli, set_parsing_settings

from gradfree.wording import did_you_mean


def run_command(commands: Mapping[str, Any], given: Sequence[str], description: str | None) -> None:
    """Run what the words ``given`` ask for, or say what is wrong with them and end the process."""
    set_parsing_settings(add_print_completion_argument=True)
    auto_cli(dict(commands), list(given), prog="gradfree", description=description, parser_class=_Parser)


class _Parser(ArgumentParser):
    """A parser with ``--dry-run`` for ``dry_run``, and switches for what is true or false: ``--retry``, ``--no-retry``.

    ``--dry_run`` and ``--retry=true``, as in a configuration file, will do. An option is not taken for another that it
    begins like: with ``--seed`` for ``--seeds`` another thing may be meant. What is no option and has a list takes all
    words that are left.
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
        kind = getattr(settings.get("action"), "_typehint", None)
        if not names[0].startswith("-") and get_origin(kind) is list:
            del settings["action"]
            settings.update(type=get_args(kind)[0], nargs="+")
        return super().add_argument(*names, **settings)
