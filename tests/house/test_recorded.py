"""``make gpu`` continues where it stopped: recorded tests run again only if what is tested changes."""

import json
import runpy
import shutil
from pathlib import Path
from time import monotonic

import pytest
import torch

CI = Path(__file__).parents[2] / ".ci"


def test_recorded_tests_run_again_only_if_the_sources_change(pytester):
    pytester.makepyfile("def test_right():\n    pass\n\n\ndef test_wrong():\n    raise ValueError\n")
    pytester.syspathinsert(CI)
    record = pytester.path / "record.jsonl"

    def run(of):
        done = pytester.runpytest_inprocess("-p", "recorded", "--record", str(record), "--record-of", of)
        return {what: n for what, n in done.parseoutcomes().items() if what != "warnings"}

    assert run("one") == {"passed": 1, "failed": 1}
    assert run("one") == {"deselected": 2}
    # An incomplete line, from a killed process, is ignored.
    *whole, last = record.read_text().splitlines(keepends=True)
    record.write_text("".join(whole) + last[:10])
    assert run("one") == {"failed": 1, "deselected": 1}
    assert run("another") == {"passed": 1, "failed": 1}


def test_a_process_ends_when_its_time_is_over_or_the_device_is_lost(pytester):
    pytester.makepyfile(
        "def test_a():\n    pass\n\n\ndef test_b():\n    raise RuntimeError('CUDA error: illegal access')\n\n\n"
        "def test_c():\n    pass\n"
    )
    pytester.syspathinsert(CI)

    def run(record, shard):
        options = "--record", record, "--record-of", "one", "--shard", shard
        done = pytester.runpytest_inprocess("-p", "recorded", *options)
        return int(done.ret), {what: n for what, n in done.parseoutcomes().items() if what in ("passed", "failed")}

    assert [run("short", "0") for _ in range(3)] == [(2, {"passed": 1}), (2, {"failed": 1}), (0, {"passed": 1})]
    assert [run("long", "60") for _ in range(2)] == [(2, {"passed": 1, "failed": 1}), (0, {"passed": 1})]


def test_a_test_in_which_the_process_dies_is_tried_twice(pytester, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(CI))
    pytester.makepyfile("import os\n\n\ndef test_dying():\n    os._exit(7)\n\n\ndef test_right():\n    pass\n")
    options = "-p", "recorded", "--record", "record.jsonl", "--record-of", "one"
    assert [int(pytester.runpytest_subprocess(*options).ret) for _ in range(3)] == [7, 7, 0]
    lines = [json.loads(line) for line in (pytester.path / "record.jsonl").read_text().splitlines()]
    assert {line["name"].rpartition(":")[2]: line["outcome"] for line in lines if "name" in line} == {
        "test_dying": "failed",
        "test_right": "passed",
    }


def test_results_in_an_archive_are_gone_on_from(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(CI)
    gpu = runpy.run_path(str(CI / "gpu.py"))
    out = tmp_path / "gpu"
    (out / "tests").mkdir(parents=True)
    (out / "tests/one.jsonl").write_text("earlier")
    gpu["pack"](out)
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["gpu.tar.gz"]
    shutil.rmtree(out)
    gpu["unpack"](out)
    assert (out / "tests/one.jsonl").read_text() == "earlier"
    (out / "tests/one.jsonl").write_text("newer")
    gpu["unpack"](out)
    assert (out / "tests/one.jsonl").read_text() == "newer"


def test_first_minutes_run_the_cases_without_a_result_and_give_up_those_that_never_end(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(CI)
    first = runpy.run_path(str(CI / "first_minutes.py"))
    ran = []

    def failing():
        raise ValueError("no such layer")

    def cases(*names):
        return [(name, failing if name == "failing" else lambda name=name: ran.append(name) or {}) for name in names]

    path, end = tmp_path / "first.jsonl", monotonic() + 60
    assert not first["run"](cases("late"), first["Progress"](path, "one"), monotonic())
    assert not first["run"](cases("failing", "short"), first["Progress"](path, "one"), end)
    assert first["run"](cases("failing", "short"), first["Progress"](path, "one"), end)
    with path.open("a") as file:
        file.write('{"begun": "endless"}\n{"begun": "endless"}\n{"begun": "cut"}\n{"na')
    assert first["run"](cases("failing", "short", "endless", "cut", "late"), first["Progress"](path, "one"), end)
    assert ran == ["short", "cut", "late"]
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    errors = {line["name"]: line["error"] for line in lines if "error" in line}
    assert errors.keys() == {"failing", "endless"}
    assert errors["failing"] == "ValueError: no such layer"
    assert errors["endless"].startswith("too long")
    assert first["run"](cases("short"), first["Progress"](path, "another"), end)
    assert ran[3:] == ["short"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_every_case_of_the_first_minutes_runs(device, monkeypatch):
    """At small sizes."""
    monkeypatch.syspath_prepend(CI)
    torch.set_default_dtype(torch.float32)
    first = runpy.run_path(str(CI / "first_minutes.py"))
    found = {name: first["attempt"](measure) for name, measure in first["cases"](torch.device(device), 256)}
    assert len(found) > 20
    assert not {name: result["error"] for name, result in found.items() if "error" in result}
    assert found["GRU (1, 16384, 64) shooting"]["float32"]["errors"]["engine"] < 1e-4


def test_stages_share_the_time_and_unfinished_ones_continue(monkeypatch, tmp_path, capsys):
    monkeypatch.syspath_prepend(CI)
    gpu = runpy.run_path(str(CI / "gpu.py"))
    calls = []

    def stage(name, unfinished_at_first, problems=()):
        def work(run):
            calls.append((name, run.end - monotonic()))
            first = [called for called, _ in calls].count(name) == 1
            return gpu["Result"](list(problems), first and unfinished_at_first)

        return gpu["Stage"](name, work, {"long": 3, "short": 1}[name])

    left, failed = gpu["run_stages"](
        [stage("long", True), stage("short", False, ["broken"])], tmp_path, monotonic() + 100
    )
    assert (left, failed) == ([], True)
    assert [name for name, _ in calls] == ["long", "short", "long"]
    assert [seconds for _, seconds in calls] == pytest.approx([75, 100, 100], abs=5)
    assert "long: not done yet" in capsys.readouterr().out


def test_every_listed_test_file_exists(monkeypatch):
    monkeypatch.syspath_prepend(CI)
    gpu = runpy.run_path(str(CI / "gpu.py"))
    tests = CI.parent / "tests"
    assert [name for name in gpu["EXACTNESS"] + gpu["OTHERS"] if not (tests / f"{name}.py").exists()] == []


def test_the_digest_has_the_device_and_refuses_unknown_ones(monkeypatch):
    monkeypatch.syspath_prepend(CI)
    gpu = runpy.run_path(str(CI / "gpu.py"))
    assert "cpu" in gpu["digest"]("cpu")
    with pytest.raises(SystemExit, match="nowhere"):
        gpu["digest"]("nowhere")
