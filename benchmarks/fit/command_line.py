"""LightningCLI with our strategies, checkpoints that resume, and one-line error messages."""

from __future__ import annotations

import re
import traceback
import warnings
from argparse import ArgumentError
from collections.abc import Sequence
from importlib import import_module

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.strategies import StrategyRegistry

from gradfree import ChainError, list_engines
from gradfree.cli import UsageError
from gradfree.wording import did_you_mean

_HELP = """Train a LightningModule of yours, with any engine as its strategy; docs/guides/fit.md has a whole example.

gradfree fit --model my_module.Net --data my_module.Data --optimizer AdamW --trainer.strategy highway_bp"""


class _CLI(LightningCLI):
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add options for checkpoints; by default the last one is saved, so that ``--ckpt_path last`` works."""
        parser.add_lightning_class_args(ModelCheckpoint, "checkpoint")
        parser.set_defaults({"checkpoint.save_last": True})


def run(command: str, arguments: Sequence[str]) -> None:
    """Run ``command``, "fit", "validate" or "test".

    Raises:
        UsageError: the arguments are invalid, or gradfree or Lightning refuses the model.
    """
    import_module("gradfree.lightning")  # It makes the engines known to Lightning.
    warnings.filterwarnings("ignore", message=".*does not have many workers")
    # Lightning warns if arguments are passed explicitly, not by sys.argv.
    warnings.filterwarnings("ignore", message="LightningCLI's args parameter is intended")
    try:
        _CLI(
            args=[command, *arguments],
            save_config_kwargs={"overwrite": True},
            parser_kwargs={"prog": "gradfree", "exit_on_error": False, command: {"description": _HELP}},
        )
    except ArgumentError as error:
        raise UsageError(f"{' '.join(str(error).split())} (all options: gradfree {command} --help)") from error
    except (ChainError, TypeError, ValueError, FileNotFoundError, MisconfigurationException) as error:
        if not _is_refusal(error):
            raise
        raise UsageError(_with_engines(" ".join(str(error).split()))) from error


def _with_engines(message: str) -> str:
    """Return an error; Lightning's on an unknown strategy with the engines, and the most similar strategy."""
    unknown = re.match(r"You selected an invalid strategy name: `strategy='(.*?)'`\.", message)
    if not unknown:
        return message
    near = did_you_mean(unknown[1], StrategyRegistry.available_strategies())
    engines = ", ".join("auto_engine" if name == "auto" else name for name in list_engines())
    return f"{unknown[0]} Engines are: {engines}; each also with _ddp, for several devices.{near}"


def _is_refusal(error: BaseException) -> bool:
    """Return whether the error is a refusal by gradfree, jsonargparse or Lightning, and not a bug elsewhere."""
    *_, (innermost, _) = traceback.walk_tb(error.__traceback__)
    ours = innermost.f_globals["__name__"].partition(".")[0] in ("gradfree", "jsonargparse", "lightning")
    return ours and (error.__cause__ is None or _is_refusal(error.__cause__))
