"""The parser of the ``gradfree`` command: functions are commands, their parameters are options."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, get_args, get_origin

from jsonargparse import ActionYesNo, ArgumentParser, Namespace, auto_cli, set_parsing_settings

from gradfree.wording import did_you_mean, no_such, plain

_KINDS = {"<class 'int'>": "a whole number", "<class 'float'>": "a number"}


def run_command(commands: Mapping[str, Any], given: Sequence[str], description: str | None) -> None:
    """Run the command and options in ``given``, or print an error and end the process."""
    set_parsing_settings(add_print_completion_argument=True)
    auto_cli(dict(commands), list(given), prog="gradfree", description=description, parser_class=_Parser)


class _Parser(ArgumentParser):
    """A parser with ``--dry-run`` for the parameter ``dry_run``, and ``--retry``/``--no-retry`` for a boolean.

    ``--dry_run`` and ``--retry=true``, as in a configuration file, work as well. Options may not be abbreviated:
    ``--seed`` is an error, not ``--seeds``. A positional parameter that is a list takes all remaining words.
    """

    def __init__(self, *args: Any, **settings: Any):
        super().__init__(*args, **{"allow_abbrev": False, **settings})

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print the error, with a suggestion for an unknown name, and end the process."""
        known = [name for name in self._option_string_actions if "_" not in name]
        super().error(_reworded(message, known), ex)

    def validate(self, namespace: Namespace, *args: Any, **settings: Any) -> None:
        """Refuse an unknown key of a configuration file.

        jsonargparse would raise a KeyError that says only "bench" for a key of ``gradfree bench run``.
        """
        known = list(self.strip_unknown(namespace).keys())
        unknown = min(set(namespace.keys()).difference(known), default=None)
        if unknown is not None:
            configs = [key.removesuffix("config") for key in known if key.rpartition(".")[2] == "config"]
            command = max((prefix for prefix in configs if unknown.startswith(prefix)), key=len, default="")
            files = " or ".join(str(file) for file in namespace.get(f"{command}config") or () if file is not None)
            name = unknown.removeprefix(command).partition(".")[0]
            options = [option.removeprefix(command) for option in known if option.startswith(command)]
            message = f"{files or '--config'}: no option is called {name!r}.{did_you_mean(name, options)}"
            self.exit(2, plain(f"gradfree: error: {message}\n"))
        super().validate(namespace, *args, **settings)

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


def _reworded(message: str, options: Sequence[str]) -> str:
    """Return an error of jsonargparse without its internal keys and types."""
    if unknown := re.match(r"unrecognized arguments: (--[\w-]+)", message):
        return f"{message}.{did_you_mean(unknown[1], options)}"
    if unknown := re.match(r"argument \S*subcommand: invalid choice: '(.*?)' \(choose from (.*)\)", message):
        return no_such("command", unknown[1], re.findall(r"[\w-]+", unknown[2]))
    if wrong := re.match(r'Parser key "(\S+)":\s+Expected a (.+)\. Got value: (.*)', message):
        choices = " or ".join(re.findall(r"'([^']+)'", wrong[2])) if "Literal" in wrong[2] else ""
        option = f"--{wrong[1].replace('_', '-')}"
        return f"{option} takes {choices or _KINDS.get(wrong[2], wrong[2])}, not {wrong[3]}."
    if wrong := re.match(r'Parser key "(\S+)":.*Subtypes: \[(<.*?>), .*Given value: (.*)', message, re.DOTALL):
        return f"--{wrong[1].replace('_', '-')} takes {_KINDS.get(wrong[2], wrong[2])}, not {wrong[3]}."
    return re.sub(r"(required: )(?:\w+\.)+", r"\1", message)
