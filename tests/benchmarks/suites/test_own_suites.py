"""Errors in the user's suite are one-line messages, before anything runs or a folder is created."""

import sys

import pytest

from gradfree.cli import main

SUITES = """
from dataclasses import replace

from tiny_suite import PLAIN, TASK

from gradfree.benchmarks.records.case import Row
from gradfree.benchmarks.training.comparison import Comparison


def of(*rows, **changes):
    return (Comparison(replace(TASK, name="mine", **changes), (PLAIN, *rows)),)


def engine():
    return of(Row("mine", "higway_bp", {}))


def width():
    return of(options={"in_features": 5, "num_classes": 1})


def local():
    return of(data=lambda: TASK.data())
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Return a function that runs one of the suites above."""
    (tmp_path / "wrong_suites.py").write_text(SUITES, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield lambda name, *options: main(["bench", "run", "--suite", f"wrong_suites:{name}", "--out", "out", *options])
    sys.modules.pop("wrong_suites", None)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("suite", "message"),
    [
        ("engine", "mine: no engine is called 'higway_bp'"),
        ("width", "mine: residual_mlp cannot be trained on these data: RuntimeError: "),
        ("local", "local object 'local.<locals>.<lambda>'"),
    ],
)
def test_an_invalid_suite_is_an_error_before_anything_runs(suite, message, run, capsys):
    with pytest.raises(SystemExit):
        run(suite)
    printed = capsys.readouterr()
    assert message in printed.err
    assert "Traceback" not in printed.err
    assert not printed.out
