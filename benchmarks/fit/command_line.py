"""LightningCLI with the registered engines and models, the benchmarks' data and configurations of common pairs."""

from __future__ import annotations

import difflib
import re
import textwrap
import traceback
import warnings
from argparse import ArgumentError, RawDescriptionHelpFormatter
from collections.abc import Sequence
from contextlib import redirect_stdout
from io import StringIO
from pkgutil import resolve_name
from typing import Any

import lightning.pytorch as pl
import yaml  # type: ignore[import-untyped]
from jsonargparse import DefaultHelpFormatter
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CyclicLR, LRScheduler, OneCycleLR

from gradfree import ChainError, list_engines
from gradfree.benchmarks.fit.arguments import CONFIGS, expanded
from gradfree.benchmarks.fit.datamodules import Examples
from gradfree.cli import UsageError
from gradfree.entries import MODELS, entries
from gradfree.lightning import RandomStates

_HELP = """{what}

  gradfree {command} --config digits_highway_bp
  gradfree {command} --model Classifier --model.net preact_resnet --model.net.in_channels 1 --data Digits \\
      --engine highway_bp --engine.iterations 2 --optimizer AdamW --optimizer.lr 1e-2 --trainer.max_epochs 10

{terms}

Of several --config and options the last one counts. --print_config shows what comes of them all.
"""


class _Formatter(RawDescriptionHelpFormatter, DefaultHelpFormatter):
    """Keeps the lines of the description."""


class _SaveConfig(SaveConfigCallback):
    """Writes the configuration beside the logs; without logs, nowhere."""

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Write the configuration."""
        if trainer.logger is not None:
            super().setup(trainer, pl_module, stage)


class _CLI(LightningCLI):
    """Checkpoints that can be resumed to the last bit, and words for what cannot be done."""

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Return Lightning's, but for predict: what becomes of predictions is a callback's business."""
        return {name: skipped for name, skipped in LightningCLI.subcommands().items() if name != "predict"}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Let the checkpoints be configured; the last one is kept, so that ``--ckpt_path last`` finds it."""
        parser.add_lightning_class_args(ModelCheckpoint, "checkpoint")
        parser.set_defaults({"checkpoint.save_last": True})

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse ``args``; a configuration is not printed before it is known that there is such an engine.

        Raises:
            UsageError: the name of the engine is not registered.
            TypeError: it does not have such an option.
            ValueError: or not with such a value.
        """
        # Lightning's own warns of arguments that do not come from sys.argv by themselves.
        if not any(argument.startswith("--print_config") for argument in args):
            self.config = parser.parse_args(args)
            return
        printed = StringIO()
        try:
            with redirect_stdout(printed):
                parser.parse_args(args)
        except SystemExit as ended:
            # Whoever left by an error has said so.
            if not ended.code:
                _refuse_strategy(yaml.safe_load(printed.getvalue())["trainer"]["strategy"])
                print(printed.getvalue(), end="")
            raise

    def before_instantiate_classes(self) -> None:
        """Refuse the name of a strategy that does not exist: Lightning would name none of ours.

        Raises:
            UsageError: the name is not registered.
        """
        _refuse_name(self._get(self.config, "trainer").strategy)

    def before_fit(self) -> None:
        """Refuse to train without an optimizer.

        Raises:
            UsageError: neither the options nor the model have one.
        """
        if not is_overridden("configure_optimizers", self.model):
            raise UsageError("there is no optimizer; say which: --optimizer AdamW --optimizer.lr 1e-3")

    @staticmethod
    def configure_optimizers(
        lightning_module: pl.LightningModule, optimizer: Optimizer, lr_scheduler: LRScheduler | None = None
    ) -> Any:
        """Step the schedules that torch means to be stepped after each batch that way, all others after each epoch."""
        if isinstance(lr_scheduler, OneCycleLR | CyclicLR):
            return [optimizer], [{"scheduler": lr_scheduler, "interval": "step"}]
        return LightningCLI.configure_optimizers(lightning_module, optimizer, lr_scheduler)


def _refuse_name(name: Any) -> None:
    known = ["auto", *StrategyRegistry.available_strategies()]
    if isinstance(name, str) and name.lower() not in known:
        near = difflib.get_close_matches(name.lower(), known, n=1)
        hint = f"did you mean {near[0]!r}? There" if near else "there"
        raise UsageError(f"no engine is called {name!r}; {hint} are: {', '.join(list_engines())}.")


def _refuse_strategy(strategy: Any) -> None:
    """Refuse what a run would refuse of a strategy in a configuration: its name, or the options of its engine."""
    _refuse_name(strategy)
    engine = strategy.get("init_args", {}).get("engine") if isinstance(strategy, dict) else None
    if isinstance(engine, str):
        resolve_name(strategy["class_path"])(engine, **strategy.get("dict_kwargs", {}))


def run(command: str, arguments: Sequence[str]) -> None:
    """Run ``command``, "fit", "validate" or "test".

    Raises:
        UsageError: what is asked for cannot be done.
    """
    # Classes that are loaded can be given by their names.
    for entry in entries(MODELS).values():
        entry.load()
    warnings.filterwarnings("ignore", message=".*does not have many workers")
    try:
        _CLI(
            args=[command, *expanded(arguments)],
            save_config_callback=_SaveConfig,
            trainer_defaults={"callbacks": [RandomStates()]},
            parser_kwargs={
                "prog": "gradfree",
                "exit_on_error": False,
                # The subcommands' parsers take it over.
                "formatter_class": _Formatter,
                **{name: _parser_options(name) for name in _CLI.subcommands()},
            },
        )
    except ArgumentError as error:
        text = _message(error).replace(f" {command}.", " --")
        raise UsageError(f"{text} (all options: gradfree {command} --help)") from error
    except (ChainError, TypeError, ValueError, FileNotFoundError, MisconfigurationException) as error:
        if not _is_refusal(error):
            raise
        raise UsageError(_message(error)) from error


def _parser_options(command: str) -> dict[str, Any]:
    data = ", ".join(kind.__name__ for kind in Examples.__subclasses__())
    terms = {
        "--config": f"a file, or one of: {', '.join(CONFIGS)}",
        "--engine": f"the same as --trainer.strategy; one of: {', '.join(list_engines())}",
        "--model": "a LightningModule: Classifier, LanguageModel, or the import path of any other",
        "--model.net": "what these two train: a name from `gradfree models`, or the import path of any module",
        "--data": f"a LightningDataModule: {data}, or the import path of any other",
    }
    text = _HELP.format(
        what=(getattr(pl.Trainer, command).__doc__ or "").strip().partition("\n")[0],
        command=command,
        terms="\n".join(
            textwrap.fill(f"  {name:14}{term}", 100, subsequent_indent=16 * " ") for name, term in terms.items()
        ),
    )
    return {"usage": f"gradfree {command} [options]", "description": text}


def _is_refusal(error: BaseException) -> bool:
    """Return whether gradfree or a library of the command line's says no; elsewhere, something is broken."""
    *_, (innermost, _) = traceback.walk_tb(error.__traceback__)
    ours = innermost.f_globals["__name__"].partition(".")[0] in ("gradfree", "jsonargparse", "lightning")
    return ours and (error.__cause__ is None or _is_refusal(error.__cause__))


def _message(error: BaseException) -> str:
    """Return what is wrong in a line; of a value of several types, with those that the value is of."""
    text = str(error)
    if listed := re.search(r"Errors:\n(.*?)\n\s*Given value type:", text, re.DOTALL):
        reasons = textwrap.dedent(listed[1]).removeprefix("- ").split("\n- ")
        text = "; ".join([reason for reason in reasons if not reason.startswith("Expected a <class")] or reasons)
    return " ".join(text.split())
