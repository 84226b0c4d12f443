"""Training runs reach Lightning's loggers: CSV as it comes, a double, TensorBoard where it is installed."""

import csv

import pytest
from lightning.pytorch.loggers import Logger
from report_records import ENVIRONMENT, RECORDS
from tiny_suite import PLAIN, fake, training

from gradfree.benchmarks.reports import tracking
from gradfree.benchmarks.reports.tracking import track
from gradfree.cli import UsageError

RESULTS = {
    "losses": [{"step": 0, "loss": 2.0}, {"step": 6, "loss": 1.0}],
    "fidelity": [{"step": 0, "cosine": 0.5}],
    "curve": [{"step": 6, "validation": 90.0}],
    "validation": 91.0,
    "test": 92.0,
}
RUN = {**fake(training(PLAIN, seed=3), RESULTS)[1], "environment": ENVIRONMENT}


class Double(Logger):
    """Keeps what it is told, as W&B would send it."""

    def __init__(self, folder, run):
        self.folder, self.run, self.told, self.settings, self.ended = folder, run, [], {}, ""

    name = version = None

    def log_hyperparams(self, params):
        self.settings = params

    def log_metrics(self, metrics, step=None):
        self.told += [(step, *pair) for pair in metrics.items()]

    def finalize(self, status):
        self.ended = status


@pytest.fixture
def doubles(monkeypatch):
    made = []
    monkeypatch.setattr(tracking, "_LOGGERS", {"wandb": lambda *where: made.append(Double(*where)) or made[-1]})
    return made


def test_a_logger_is_told_everything_of_a_run(tmp_path, doubles):
    """Settings, losses, cosines, scores at their steps; timings are no runs."""
    speed = next(record for record in RECORDS.values() if record["kind"] == "speed")
    assert track([RUN, speed], "wandb", tmp_path) == tmp_path / "wandb"
    (double,) = doubles
    assert (double.run, double.ended) == ("points/backprop/cpu/seed-3", "success")
    assert double.settings["task"]["batch_size"] == 8
    assert double.settings["seed"] == 3
    assert double.settings["commit"] == ENVIRONMENT["commit"]
    assert double.told == [
        (0, "training loss", 2.0),
        (6, "training loss", 1.0),
        (0, "cosine", 0.5),
        (6, "validation score", 90.0),
        (6, "final validation score", 91.0),
        (6, "final test score", 92.0),
    ]


def test_csv_needs_no_package(tmp_path):
    folder = track([RUN], "csv", tmp_path)
    with (folder / "points" / "backprop" / "cpu" / "seed-3" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["training loss"]) for row in rows if row["training loss"]] == [2.0, 1.0]


def test_tensorboard_where_it_is_installed(tmp_path):
    pytest.importorskip("tensorboard")
    assert list(track([RUN], "tensorboard", tmp_path).rglob("events*"))


def test_what_is_no_logger_or_not_installed_is_refused(tmp_path, monkeypatch):
    with pytest.raises(UsageError, match=r"no tracker is called 'tensorbord'.*Did you mean 'tensorboard'"):
        track([RUN], "tensorbord", tmp_path)

    def missing(*_):
        raise ModuleNotFoundError("no wandb here")

    monkeypatch.setattr(tracking, "_LOGGERS", {"wandb": missing})
    with pytest.raises(UsageError, match="wandb is not installed: no wandb here"):
        track([RUN], "wandb", tmp_path)
