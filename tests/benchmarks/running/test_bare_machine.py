"""Suites run where nothing is installed that draws, or reads data sets; reports can be made elsewhere."""

import os
import subprocess
import sys

import pytest

from gradfree.benchmarks.records.records import RecordFile
from gradfree.cli import main

# Not scipy nor tokenizers: torchmetrics imports them where they are installed.
ABSENT = ("altair", "datasets", "joblib", "jsonargparse", "PIL", "polars", "rich", "sklearn", "vl_convert")
RUN = """
import sys
from pathlib import Path
from gradfree.benchmarks.bench.commands import run
run("tiny_suite:suite", Path(sys.argv[1]), seeds=1, jobs=2)
"""


@pytest.fixture
def bare(tmp_path, monkeypatch):
    """Runs code in processes that cannot import ``ABSENT``, nor can the workers that they start."""
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
def test_a_suite_runs_and_its_report_is_made_elsewhere(bare, tmp_path, capsys):
    folder = tmp_path / "results"
    said = bare(RUN, folder)
    assert f"gradfree bench report --out {folder}" in said
    records = RecordFile(folder / "records.jsonl").read()
    assert records
    assert not any("error" in record for record in records.values())
    assert f"{len(records)} of {len(records)} cases are in" in bare(RUN, folder)
    main(["bench", "report", "--out", str(folder)])
    assert "highway_bp k=1" in capsys.readouterr().out
    assert (folder / "report.html").exists()
