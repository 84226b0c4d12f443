"""Runs of ``gradfree fit`` and their losses."""

import csv
from pathlib import Path

from gradfree.cli import main

QUIET = ["--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"]


def logged(folder, *arguments):
    """The training's losses by step."""
    log = ["--trainer.logger=CSVLogger", f"--trainer.logger.save_dir={folder}", "--trainer.log_every_n_steps=1"]
    main(["fit", *arguments, *QUIET, *log])
    return losses(folder)


def losses(folder):
    (file,) = Path(folder).rglob("metrics.csv")
    with file.open(newline="") as rows:
        return {int(row["step"]): float(row["train_loss"]) for row in csv.DictReader(rows) if row["train_loss"]}
