"""Records survive crashes of the process that writes them."""

import json

import pytest
from tiny_suite import HIGHWAY, training

from gradfree.benchmarks.records.records import SCHEMA, RecordFile, attempt, failure
from gradfree.cli import UsageError

HIGH = training(HIGHWAY)


def record(case, results):
    return {"schema": SCHEMA, "case": case, "results": results}


def test_a_record_is_read_as_it_was_written(tmp_path):
    file, case = RecordFile(tmp_path / "records.jsonl"), training(HIGHWAY, seed=3)
    made = attempt(case)
    file.append(made)
    assert file.read() == {case.id: made}
    assert made["kind"] == "training"
    assert made["seeds"] == [3]
    assert made["config"] == case.config
    assert made["results"] == case.run()
    known = {"gradfree", "commit", "dirty", "python", "torch", "platform", "cpus", "instructions", "threads", "device"}
    assert made["environment"].keys() == known
    assert made["timestamp"].endswith("+00:00")


@pytest.mark.parametrize("torn", ['{"schema": 1, "ca', json.dumps(record("c", {})), "{"])
def test_an_incomplete_last_line_is_ignored_and_replaced(tmp_path, torn):
    """Even if the JSON is complete: a line without a line end is unfinished."""
    file = RecordFile(tmp_path / "records.jsonl")
    file.append(record("a", {"x": 1}))
    with file.path.open("a") as raw:
        raw.write(torn)
    assert file.read() == {"a": record("a", {"x": 1})}
    file.append(record("b", {"x": 2}))
    assert file.read() == {"a": record("a", {"x": 1}), "b": record("b", {"x": 2})}
    assert len(file.path.read_text().splitlines()) == 2


def test_a_failure_does_not_hide_a_result(tmp_path):
    """Whatever the order: a case may be run again."""
    file, failed, done = RecordFile(tmp_path / "records.jsonl"), failure(HIGH, "first"), attempt(HIGH)
    for made in (failed, failure(HIGH, "second"), done, failed):
        file.append(made)
    assert list(file.read().values()) == [done]
    assert (failed["results"], failed["error"]) == ({}, "first")
    assert failed.keys() - {"error"} == done.keys()


@pytest.mark.parametrize(
    "line", ["not json", "[1, 2]", '{"schema": 1, "case": "a"}', '{"schema": 2, "case": "a", "results": {}}']
)
def test_the_error_names_an_invalid_line(tmp_path, line):
    file = RecordFile(tmp_path / "records.jsonl")
    file.append(record("a", {"x": 1}))
    with file.path.open("a") as raw:
        raw.write(line + "\n")
    with pytest.raises(UsageError, match=r"records\.jsonl, line 2 is not a record"):
        file.read()
