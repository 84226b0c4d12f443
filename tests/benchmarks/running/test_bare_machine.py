"""Suites run without the packages that draw reports or read data sets; the report can be made elsewhere."""

import os
import subprocess
import sys

import pytest

from gradfree.benchmarks.records.records import RecordFile
from gradfree.cli import main

# Without scipy and tokenizers, which torchmetrics imports if they are installed.
ABSENT = ("altair", "datasets", "joblib", "jsonargparse", "PIL", "polars", "rich", "sklearn", "vl_convert")
RUN = """
import sys
from pathlib import Path
from gradfree.benchmarks.bench.commands import run
for _ in range(2):
    run("tiny_suite:suite", Path(sys.argv[1]), seeds=1, jobs=2)
"""


@pytest.fixture
def bare(tmp_path, monkeypatch):
    """Return a function that runs code in a process that, like its workers, cannot import ``ABSENT``."""
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({ABSENT}))\n")
    path = os.pathsep.join(map(str, [tmp_path, *(folder for folder in sys.path if folder)]))

    def run(code, *arguments):
        command = [sys.executable, "-c", code, *map(str, arguments)]
        done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    return run


@pytest.mark.slow
@pytest.mark.processes
def test_a_suite_runs_without_the_packages_for_reports(bare, tmp_path, capsys):
    folder = tmp_path / "results"
    said = bare(RUN, folder)
    assert f"gradfree bench report --out {folder}" in said
    records = RecordFile(folder / "records.jsonl").read()
    assert records
    assert not any("error" in record for record in records.values())
    assert f"{len(records)} of {len(records)} cases are in" in said
    main(["bench", "report", "--out", str(folder)])
    assert "highway_bp k=1" in capsys.readouterr().out
    assert (folder / "report.html").exists()
