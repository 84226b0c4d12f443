"""``gradfree bench run`` on a tiny suite, in real worker processes."""

import json
import os
import signal
import sys
from dataclasses import replace

import pytest
from forked_scripts import Script
from tiny_suite import (
    PLAIN,
    SUITE,
    TASK,
    endless,
    failing,
    fake,
    killed,
    leaving,
    littered,
    many_cases,
    points_if_there,
    tiny_cases,
    training,
)

from gradfree.benchmarks.records.records import RecordFile
from gradfree.benchmarks.running.runner import run_cases
from gradfree.benchmarks.running.workers import Workers
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
    assert_equal_bits(finished)


def assert_equal_bits(records):
    """Results do not depend on the worker: autograd and the exact engine have equal numbers."""
    results = {key: record["results"] for key, record in records.items() if record["kind"] == "training"}
    for result in results.values():
        # Only engines that solve chains record cotangents.
        result["fidelity"] = [{**probe, "states": None} for probe in result["fidelity"]]
    plain, chain = (
        [r for key, r in results.items() if f"/{label}/" in key] for label in ("backprop", "backprop via chain")
    )
    assert sorted(map(str, plain)) == sorted(map(str, chain))
    assert all(record["environment"]["threads"] == 1 for record in records.values())


KILLED = '''
import json, multiprocessing, os, select, signal
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from forking import exit_code, fork
from tiny_suite import TASK, endless, many_cases, training
from gradfree.benchmarks.records.records import RecordFile, attempt
from gradfree.benchmarks.running.runner import run_cases
from gradfree.benchmarks.running.workers import Workers

MOMENTS = ("after writing", "while writing", "before writing", "never")

class Here:
    """Runs cases in this process; only one moment is tried with workers, as starting them takes time."""
    jobs = 1

    def run(self, cases):
        yield from map(attempt, cases)

class Killed(RecordFile):
    left = 4

    def append(self, record):
        self.left -= 1
        if self.left or self.moment == "after writing":
            super().append(record)
        elif self.moment == "while writing":
            with self.path.open("a") as raw:
                raw.write(json.dumps(record)[:100])
        if not self.left:
            for worker in multiprocessing.active_children():
                print(worker.pid, file=Path("left behind").open("a"))
            os.kill(os.getpid(), signal.SIGKILL)

def run(moment):
    file = RecordFile(path) if moment == "never" else Killed(path)
    file.moment = moment
    if moment == "before writing":
        # One of the workers never ends.
        run_cases(lambda records: [training(task=replace(TASK, data=endless)), *many_cases()], file, Workers(2))
    else:
        run_cases(lambda records: many_cases(), file, Here())

def ends(process):
    """Return whether a process that is not a child ends within a minute; otherwise kill it."""
    with suppress(ProcessLookupError):
        if not select.select([os.pidfd_open(process)], [], [], 60)[0]:
            os.kill(process, signal.SIGKILL)
            return False
    return True

if __name__ == "__main__":
    # Daemons must not start processes.
    multiprocessing.current_process().daemon = False
    path = Path("records.jsonl")
    exits = [(exit_code(fork(run, moment)), len(RecordFile(path).read())) for moment in MOMENTS]
    workers = Path("left behind").read_text().split()
    Path("result").write_text(json.dumps([exits, [ends(int(worker)) for worker in workers]]))
'''


def test_a_run_killed_three_times_ends_with_one_record_of_each_case(tmp_path, monkeypatch):
    """No record is lost, duplicated or broken, and no process is left behind."""
    (tmp_path / "killed.py").write_text(KILLED)
    monkeypatch.chdir(tmp_path)
    status, said = Script(tmp_path / "killed.py").ended()
    assert status == 0, said
    exits, ended = json.loads((tmp_path / "result").read_text())
    assert exits == [[-9, 4], [-9, 7], [-9, 10], [0, 30]]
    assert ended == [True]
    records = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    assert sorted(record["case"] for record in records) == sorted(case.id for case in many_cases())
    assert not any("error" in record for record in records)


def test_a_failed_case_has_a_record_and_the_other_cases_run(tmp_path, monkeypatch, capsys):
    """For cases that raise, are killed or exit: the other cases run, the report is made, and the command fails."""
    losing = [Comparison(replace(TASK, data=data, name=data.__name__), (PLAIN,)) for data in (failing, killed, leaving)]
    monkeypatch.setitem(SUITES, "tiny", (*losing, *SUITE))
    with pytest.raises(SystemExit) as ended:
        run(tmp_path, "--seeds", "1")
    assert ended.value.code == 2
    records = RecordFile(tmp_path / "records.jsonl").read()
    errors = {name.split("/")[1]: r["error"] for name, r in records.items() if r["kind"] == "training" and "error" in r}
    assert errors["failing"].startswith("Traceback")
    assert errors["failing"].endswith("OSError: no such points")
    assert errors["killed"] == "the process was killed by SIGKILL: the system does so when memory runs out"
    assert errors["leaving"] == "the process ended with exit code 7"
    assert [r["results"] for r in records.values() if "error" in r] == [{}] * 6
    assert {case.id for case in tiny_cases()} < records.keys()
    assert "points: residual_mlp" in (tmp_path / "report.md").read_text(encoding="utf-8")
    message = capsys.readouterr().err
    assert "6 of 10 cases failed; --retry runs them again." in message
    assert "OSError: no such points" in message


def test_failed_cases_run_again_only_with_retry(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(SUITES, "tiny", (Comparison(replace(TASK, data=points_if_there), (PLAIN,)),))
    file, options = RecordFile(tmp_path / "records.jsonl"), ("--seeds", "1")
    monkeypatch.setenv("POINTS", "")
    with pytest.raises(SystemExit):
        run(tmp_path, *options)
    before = file.path.read_bytes()
    with pytest.raises(SystemExit):
        run(tmp_path, *options)
    assert file.path.read_bytes() == before
    monkeypatch.setenv("POINTS", "are there")
    run(tmp_path, *options, "--retry")
    assert file.path.read_bytes().startswith(before)
    assert ["error" in record for record in file.read().values()] == [False, False]


def test_dry_run_and_list_run_nothing(tmp_path, capsys):
    file = RecordFile(tmp_path / "records.jsonl")
    file.append(dict([fake(tiny_cases()[0], {})])[tiny_cases()[0].id])
    before = file.path.read_bytes()
    run(tmp_path, "--dry-run")
    out = capsys.readouterr().out
    assert "1 of 7 cases are in" in out
    assert "6 of 7 cases would run" in out
    assert out.count("missing  ") == 6
    run(tmp_path, "--list")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["done"] + 6 * ["missing"]
    assert lines[0].endswith(tiny_cases()[0].id)
    with pytest.raises(SystemExit):
        run(tmp_path, "--no-resume")
    assert "has 1 records; choose another --out" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["records.jsonl"]
    assert file.path.read_bytes() == before


def test_ray_gives_the_records_of_a_local_run(tmp_path, monkeypatch):
    """Each case runs in a new process, and a failure does not affect other cases."""
    ray = pytest.importorskip("ray")
    from gradfree.benchmarks.running.ray_workers import RayWorkers

    file = RecordFile(tmp_path / "records.jsonl")
    lost = [training(task=replace(TASK, data=data, name=data.__name__)) for data in (failing, killed)]
    littering = [training(task=replace(TASK, data=littered), seed=seed) for seed in range(2)]
    ray.init(num_cpus=2, include_dashboard=False, runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path)}})
    try:
        run_cases(lambda records: [*lost, *littering, training()], file, RayWorkers())
    finally:
        ray.shutdown()
    records = file.read()
    assert ["error" in records[case.id] for case in (*lost, *littering)] == [True, True, False, False]
    assert records[lost[0].id]["error"].endswith("OSError: no such points")
    assert records[training().id]["environment"]["threads"] == 1
    run_cases(lambda records: [training()], RecordFile(tmp_path / "local.jsonl"), Workers(1))
    (here,) = RecordFile(tmp_path / "local.jsonl").read().values()
    assert records[here["case"]]["results"] == here["results"]
