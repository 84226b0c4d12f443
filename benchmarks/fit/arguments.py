"""What may be said shortly on the command line of ``gradfree fit``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from gradfree.cli import UsageError
from gradfree.entries import MODELS, entries

CONFIGS = {path.stem: path for path in sorted((Path(__file__).parent / "configs").glob("*.yaml"))}
"""The configurations that come with gradfree, by name."""


def expanded(arguments: Sequence[str]) -> list[str]:
    """Return ``arguments`` with what is short for something written out.

    ``--engine`` and its options become ``--trainer.strategy``, and come last; configurations and networks by name
    become paths.

    Raises:
        UsageError: no such file or configuration.
    """
    words = (word for argument in arguments for word in _words(argument))
    plain: list[str] = []
    options: list[str] = []
    engine = None
    for word in words:
        if word == "--engine":
            engine = next(words, "")
        elif word.startswith("--engine."):
            options.append(word.replace("--engine.", "--trainer.strategy.dict_kwargs.", 1))
            if "=" not in word:
                options.append(next(words, ""))
        elif word in ("-c", "--config"):
            plain += [word, _config(next(words, ""))]
        elif word in ("--model.net", "--model.net.help"):
            plain += [word, _network(next(words, ""))]
        else:
            plain.append(word)
    return [*plain, *([] if engine is None else _strategy(engine, bool(options))), *options]


def _words(argument: str) -> list[str]:
    return (
        argument.split("=", 1) if re.match(r"(-c|--config|--engine|--model\.net(\.help)?)=", argument) else [argument]
    )


def _strategy(engine: str, has_options: bool) -> list[str]:
    if not has_options:
        return ["--trainer.strategy", engine]
    kind = "EngineDDPStrategy" if engine.endswith("_ddp") else "EngineStrategy"
    return [
        # Forgets the options of a configuration's engine.
        *("--trainer.strategy", "auto"),
        *("--trainer.strategy.class_path", f"gradfree.lightning.{kind}"),
        *("--trainer.strategy.init_args.engine", engine.removesuffix("_ddp")),
    ]


def _config(name: str) -> str:
    if Path(name).is_file():
        return name
    found = CONFIGS.get(name.removesuffix(".yaml"))
    if found is None:
        raise UsageError(f"there is no file {name!r}, and the configurations by name are: {', '.join(CONFIGS)}.")
    return str(found)


def _network(name: str) -> str:
    paths = {name: entry.value.replace(":", ".") for name, entry in entries(MODELS).items()}
    classes = {path.rpartition(".")[2]: path for path in paths.values()}
    if name.isidentifier() and name not in paths | classes:
        raise UsageError(f"no model is called {name!r}; there are: {', '.join(paths)}.")
    return (paths | classes).get(name, name)
