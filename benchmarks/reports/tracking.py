"""Training runs in TensorBoard, Weights & Biases, or whatever else Lightning has a logger for."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger

from gradfree.benchmarks.records.records import Record
from gradfree.benchmarks.tasks.imported import Imported, names_a_function
from gradfree.cli import UsageError
from gradfree.wording import no_such

_LOGGERS: Mapping[str, Callable[[Path, str], Logger]] = {
    "csv": lambda folder, run: CSVLogger(folder, run, version=""),
    "tensorboard": lambda folder, run: TensorBoardLogger(folder, run, version=""),
    "wandb": lambda folder, run: WandbLogger(run, folder, project=folder.parent.name, reinit="create_new"),
}


def track(records: Iterable[Record], tracker: str, folder: Path) -> Path:
    """Hand every training run to a logger of its own: settings, losses, scores, how close its gradients were.

    Args:
        records: those without losses are passed over.
        tracker: "csv", "tensorboard", "wandb", or ``module:function``, called with a folder and the run's name.
        folder: of the report; loggers write into one inside, which is returned.

    Raises:
        UsageError: there is no such logger, or its package is not installed.
    """
    if tracker in _LOGGERS:
        make: Callable[[Path, str], Any] = _LOGGERS[tracker]
    elif names_a_function(tracker):
        make = Imported.to(tracker)
    else:
        raise UsageError(f"{no_such('tracker', tracker, _LOGGERS)} Or name a function of yours, module:function.")
    inside = folder / tracker.replace(":", "-")
    for record in records:
        if "losses" in record["results"]:
            try:
                logger = make(inside, _name(record))
            except ModuleNotFoundError as error:
                raise UsageError(f"{tracker} is not installed: {error}") from error
            _log(record, logger)
    return inside


def _log(record: Record, logger: Logger) -> None:
    results = record["results"]
    logger.log_hyperparams({**record["config"], "seed": record["seeds"][0], **record["environment"]})
    for told in results["losses"]:
        logger.log_metrics({"training loss": told["loss"]}, told["step"])
    for told in results.get("fidelity", ()):
        logger.log_metrics({"cosine": told["cosine"]}, told["step"])
    for told in results.get("curve", ()):
        logger.log_metrics({"validation score": told["validation"]}, told["step"])
    last = results["losses"][-1]["step"] if results["losses"] else 0
    logger.log_metrics(
        {f"final {split} score": results[split] for split in ("validation", "test") if split in results}, last
    )
    logger.save()
    logger.finalize("success")


def _name(record: Record) -> str:
    """Return a run's name, task, row and seed, as folders can be called."""
    _, *who, _digest = record["case"].split("/")
    return "/".join(re.sub(r"[^\w.=+-]+", "-", part) for part in who)
