"""``gradfree bench run`` on a tiny suite, in real worker processes."""

import os
import select
import signal
import sys
from contextlib import suppress
from dataclasses import replace

import pytest
from forked_scripts import Script
from tiny_suite import (
    PLAIN,
    SUITE,
    TASK,
    Parentage,
    endless,
    failing,
    fake,
    killed,
    leaving,
    littered,
    points_if_there,
    tiny_cases,
    training,
)

from gradfree.benchmarks.records.records import RecordFile
from gradfree.benchmarks.running.runner import run_cases
from gradfree.benchmarks.running.workers import run_here
from gradfree.benchmarks.suites.index import SUITES
from gradfree.benchmarks.training.comparison import Comparison
from gradfree.cli import main

pytestmark = [pytest.mark.slow, pytest.mark.processes]


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setitem(SUITES, "tiny", SUITE)


def run(folder, *options):
    main(["bench", "run", "--suite", "tiny", "--out", str(folder), "--jobs", "2", "--seeds", "2", *options])


def test_an_interrupted_run_keeps_its_records_and_can_be_continued(tmp_path, monkeypatch, capsys):
    file = RecordFile(tmp_path / "records.jsonl")
    append = RecordFile.append

    def append_and_press_ctrl_c(self, record):
        append(self, record)
        signal.raise_signal(signal.SIGINT)

    # A background process of a shell ignores SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with monkeypatch.context() as patch:
        patch.setattr(RecordFile, "append", append_and_press_ctrl_c)
        patch.setitem(SUITES, "tiny", (*SUITE, Comparison(replace(TASK, data=endless), (PLAIN,))))
        with pytest.raises(SystemExit) as stopped:
            run(tmp_path)
    assert stopped.value.code == 130
    assert "the same command runs the rest" in capsys.readouterr().err
    (kept,) = file.read().items()

    run(tmp_path)
    assert "1 of 7 cases are in" in capsys.readouterr().out
    finished = file.read()
    assert finished.keys() == {case.id for case in tiny_cases(seeds=2)}
    assert (kept[0], finished[kept[0]]) == kept
    assert {"report.md", "report.html"} < {path.name for path in tmp_path.iterdir()}

    before = file.path.read_bytes()
    run(tmp_path)
    assert "7 of 7 cases are in" in capsys.readouterr().out
    assert file.path.read_bytes() == before


KILLED = """
import multiprocessing, os, signal
from dataclasses import replace
from pathlib import Path
from tiny_suite import TASK, endless, training
from gradfree.benchmarks.running.workers import run_here

if __name__ == "__main__":
    # Daemons must not start processes.
    multiprocessing.current_process().daemon = False
    for record in run_here([training(task=replace(TASK, data=endless)), training()], jobs=2):
        Path("worker").write_text(str(multiprocessing.active_children()[0].pid))
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_run_leaves_no_process(tmp_path, monkeypatch):
    (tmp_path / "killed.py").write_text(KILLED)
    monkeypatch.chdir(tmp_path)
    status, said = Script(tmp_path / "killed.py").ended()
    assert status == -signal.SIGKILL, said
    with suppress(ProcessLookupError):
        assert select.select([os.pidfd_open(int((tmp_path / "worker").read_text()))], [], [], 60)[0]


def test_a_failed_case_has_a_record_and_runs_again_only_with_retry(tmp_path, monkeypatch, capsys):
    """For cases that raise, are killed or exit: the other cases run, the report is made, and the command fails."""
    losing = [failing, killed, leaving, points_if_there]
    lost = [Comparison(replace(TASK, data=data, name=data.__name__), (PLAIN,)) for data in losing]
    monkeypatch.setitem(SUITES, "tiny", (*lost, *SUITE))
    monkeypatch.setenv("POINTS", "")
    file = RecordFile(tmp_path / "records.jsonl")
    with pytest.raises(SystemExit) as ended:
        run(tmp_path, "--seeds", "1")
    assert ended.value.code == 2
    message = capsys.readouterr().err
    assert "8 of 12 cases failed; --retry runs them again." in message
    assert "OSError: no such points" in message
    records = file.read()
    errors = {name.split("/")[1]: r["error"] for name, r in records.items() if r["kind"] == "training" and "error" in r}
    assert errors["failing"].startswith("Traceback")
    assert errors["failing"].endswith("OSError: no such points")
    assert errors["killed"] == "the process was killed by SIGKILL: the system does so when memory runs out"
    assert errors["leaving"] == "the process ended with exit code 7"
    assert [r["results"] for r in records.values() if "error" in r] == [{}] * 8
    assert {case.id for case in tiny_cases()} < records.keys()
    assert "points: residual_mlp" in (tmp_path / "report.md").read_text(encoding="utf-8")

    before = file.path.read_bytes()
    monkeypatch.setenv("POINTS", "are there")
    for options, failures in ((), 8), (("--retry",), 6):
        assert file.path.read_bytes() == before
        with pytest.raises(SystemExit):
            run(tmp_path, "--seeds", "1", *options)
        assert sum("error" in record for record in file.read().values()) == failures
    assert file.path.read_bytes().startswith(before)


def test_a_case_that_takes_too_long_is_ended_and_recorded():
    quick = Parentage(device="cpu", seed=0)
    list(run_here([quick]))  # The first case waits for the fork server.
    cases = [training(task=replace(TASK, data=endless)), quick]
    records = {record["kind"]: record for record in run_here(cases, jobs=2, limit=5.0)}
    assert "too long" in records["training"]["error"]
    assert "error" not in records["parentage"]


@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux only")
def test_only_cases_on_the_cpu_run_in_forked_processes():
    """CUDA may refuse to work in a forked process."""
    parents = [
        record["results"]["parent"]
        for device in ("cpu", "mps")
        for record in run_here([Parentage(device=device, seed=0)])
    ]
    assert [parent == os.getpid() for parent in parents] == [False, True]


def test_a_dry_run_lists_all_cases_and_runs_nothing(tmp_path, capsys):
    RecordFile(tmp_path / "records.jsonl").append(fake(tiny_cases()[0], {})[1])
    run(tmp_path, "--dry-run")
    skipped, running, *lines = capsys.readouterr().out.splitlines()
    assert skipped.startswith("1 of 7 cases are in")
    assert running == "6 of 7 cases would run:"
    assert [line.split()[0] for line in lines] == ["done"] + 6 * ["missing"]
    assert lines[0].endswith(tiny_cases()[0].id)
    assert lines[0].startswith("done     points autograd, seed 0: training/points/backprop/")
    assert [path.name for path in tmp_path.iterdir()] == ["records.jsonl"]


def test_ray_gives_the_records_of_a_local_run(tmp_path, monkeypatch):
    """Each case runs in a new process, and a failure does not affect other cases."""
    ray = pytest.importorskip("ray")
    from gradfree.benchmarks.running.ray_workers import run_on_ray

    file = RecordFile(tmp_path / "records.jsonl")
    lost = [training(task=replace(TASK, data=data, name=data.__name__)) for data in (failing, killed)]
    littering = [training(task=replace(TASK, data=littered), seed=seed) for seed in range(2)]
    ray.init(num_cpus=2, include_dashboard=False, runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path)}})
    try:
        run_cases(lambda records: [*lost, *littering, training()], file, run_on_ray)
    finally:
        ray.shutdown()
    records = file.read()
    assert ["error" in records[case.id] for case in (*lost, *littering)] == [True, True, False, False]
    assert records[lost[0].id]["error"].endswith("OSError: no such points")
    assert records[training().id]["environment"]["threads"] == 1
    run_cases(lambda records: [training()], RecordFile(tmp_path / "local.jsonl"), run_here)
    (here,) = RecordFile(tmp_path / "local.jsonl").read().values()
    assert records[here["case"]]["results"] == here["results"]
