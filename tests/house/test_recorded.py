"""``make gpu`` continues where it stopped: recorded tests run again only if what is tested changes."""

import runpy
from pathlib import Path
from time import monotonic

import pytest

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
