"""LightningCLI with our strategies, checkpoints that can be resumed to the last bit, and refusals in a line."""

from __future__ import annotations

import traceback
import warnings
from argparse import ArgumentError
from collections.abc import Sequence

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.strategies import StrategyRegistry

from gradfree import ChainError
from gradfree.cli import UsageError
from gradfree.lightning import RandomStates
from gradfree.wording import no_such

_HELP = """Train a LightningModule of yours, with any engine as its strategy; docs/guides/fit.md has a whole example.

gradfree fit --model my_module.Net --data my_module.Data --optimizer AdamW --trainer.strategy highway_bp"""


class _CLI(LightningCLI):
    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Return Lightning's, but for predict: what becomes of predictions is a callback's business."""
        return {name: skipped for name, skipped in LightningCLI.subcommands().items() if name != "predict"}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Let the checkpoints be configured; the last one is kept, so that ``--ckpt_path last`` finds it."""
        parser.add_lightning_class_args(ModelCheckpoint, "checkpoint")
        parser.set_defaults({"checkpoint.save_last": True})

    def before_instantiate_classes(self) -> None:
        """Refuse the name of a strategy that does not exist: Lightning would name none of ours.

        Raises:
            UsageError: the name is not registered.
        """
        name = self._get(self.config, "trainer").strategy
        known = ["auto", *StrategyRegistry.available_strategies()]
        if isinstance(name, str) and name.lower() not in known:
            raise UsageError(no_such("strategy", name, known))


def run(command: str, arguments: Sequence[str]) -> None:
    """Run ``command``, "fit", "validate" or "test".

    Raises:
        UsageError: what is asked for cannot be done.
    """
    warnings.filterwarnings("ignore", message=".*does not have many workers")
    # Lightning's own warns of arguments that do not come from sys.argv by themselves.
    warnings.filterwarnings("ignore", message="LightningCLI's args parameter is intended")
    try:
        _CLI(
            args=[command, *arguments],
            trainer_defaults={"callbacks": [RandomStates()]},
            save_config_kwargs={"overwrite": True},
            parser_kwargs={"prog": "gradfree", "exit_on_error": False, command: {"description": _HELP}},
        )
    except ArgumentError as error:
        raise UsageError(f"{' '.join(str(error).split())} (all options: gradfree {command} --help)") from error
    except (ChainError, TypeError, ValueError, FileNotFoundError, MisconfigurationException) as error:
        if not _is_refusal(error):
            raise
        raise UsageError(" ".join(str(error).split())) from error


def _is_refusal(error: BaseException) -> bool:
    """Return whether gradfree or a library of the command line's says no; elsewhere, something is broken."""
    *_, (innermost, _) = traceback.walk_tb(error.__traceback__)
    ours = innermost.f_globals["__name__"].partition(".")[0] in ("gradfree", "jsonargparse", "lightning")
    return ours and (error.__cause__ is None or _is_refusal(error.__cause__))
