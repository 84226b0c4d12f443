"""``gradfree bench run`` on a suite of seconds, in real worker processes."""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_suite import PLAIN, SUITE, TASK, endless, failing, tiny_cases

from gradfree.benchmarks.comparison import Comparison
from gradfree.benchmarks.records import RecordFile
from gradfree.benchmarks.suites import SUITES
from gradfree.cli import main

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setitem(SUITES, "tiny", SUITE)


def run(folder, *options):
    main(["bench", "run", "--suite", "tiny", "--out", str(folder), "--jobs", "2", "--seeds", "2", *options])


def test_interrupted_a_run_keeps_what_is_finished_and_does_the_rest_later(tmp_path, monkeypatch, capsys):
    file = RecordFile(tmp_path / "records.jsonl")
    append = RecordFile.append

    def append_and_press_ctrl_c(self, record):
        append(self, record)
        signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(RecordFile, "append", append_and_press_ctrl_c)
        patch.setitem(SUITES, "tiny", (*SUITE, Comparison(replace(TASK, data=endless), (PLAIN,))))
        with pytest.raises(SystemExit) as stopped:
            run(tmp_path)
    assert stopped.value.code == 130
    assert "the same command does the rest" in capsys.readouterr().err
    (kept,) = file.read().items()

    run(tmp_path)
    assert "1 of 7 cases are in" in capsys.readouterr().out
    finished = file.read()
    assert finished.keys() == {case.id for case in tiny_cases(seeds=2)}
    assert (kept[0], finished[kept[0]]) == kept
    assert {"report.md", "report.png"} < {path.name for path in tmp_path.iterdir()}

    before = file.path.read_bytes()
    run(tmp_path)
    assert "7 of 7 cases are in" in capsys.readouterr().out
    assert file.path.read_bytes() == before


def test_every_worker_gives_the_same_bits(tmp_path):
    """One thread each: which worker runs a case, and beside what, does not change its numbers."""
    run(tmp_path)
    records = RecordFile(tmp_path / "records.jsonl").read()
    results = {key: record["results"] for key, record in records.items() if record["kind"] == "training"}
    plain, chain = (
        [r for key, r in results.items() if f"/{label}/" in key] for label in ("backprop", "backprop via chain")
    )
    assert sorted(map(str, plain)) == sorted(map(str, chain))
    assert all(record["environment"]["threads"] == 1 for record in records.values())


KILLED = """
import os, signal
from tiny_suite import tiny_cases
from pathlib import Path
from gradfree.benchmarks.comparison import Comparison
from gradfree.benchmarks.records import RecordFile
from gradfree.benchmarks.runner import run_cases

class Killed(RecordFile):
    def append(self, record):
        super().append(record)
        os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    run_cases(lambda records: tiny_cases(), Killed(Path("records.jsonl")), jobs=2)
"""


def test_killed_a_run_leaves_its_records_and_no_process(tmp_path):
    (tmp_path / "killed.py").write_text(KILLED)
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    # The workers inherit the pipes: they are closed, and the call returns, when the last worker has ended.
    done = subprocess.run(
        [sys.executable, "killed.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        timeout=60,
    )
    assert done.returncode == -signal.SIGKILL
    assert len(RecordFile(tmp_path / "records.jsonl").read()) == 1


def test_a_failing_case_is_named(tmp_path, monkeypatch):
    broken = Comparison(replace(TASK, data=failing), (PLAIN,))
    monkeypatch.setitem(SUITES, "tiny", (broken,))
    with pytest.raises(RuntimeError, match=r"'training/points/backprop/cpu/seed 0/.*' failed") as failed:
        run(tmp_path, "--jobs", "1")
    assert "no such points" in str(failed.value.__cause__)
