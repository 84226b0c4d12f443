"""Records survive crashes of the process that writes them."""

import errno
import json
import os

import pytest
from tiny_suite import HIGHWAY, training

from gradfree.benchmarks.records.records import SCHEMA, RecordFile, failure, measure
from gradfree.cli import UsageError

HIGH = training(HIGHWAY)


def record(case, results):
    return {"schema": SCHEMA, "case": case, "results": results}


def test_a_record_is_read_as_it_was_written(tmp_path):
    file, case = RecordFile(tmp_path / "records.jsonl"), training(HIGHWAY, seed=3)
    made = measure(case)
    file.append(made)
    assert file.read() == {case.id: made}
    assert made["kind"] == "training"
    assert made["seeds"] == [3]
    assert made["config"] == case.config
    assert made["results"] == case.run()
    known = {"gradfree", "commit", "dirty", "python", "torch", "platform", "cpus", "threads", "device"}
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


def test_records_of_a_newer_schema_are_refused_and_kept(tmp_path):
    file = RecordFile(tmp_path / "records.jsonl")
    file.append(record("a", {}))
    file.append({**record("b", {}), "schema": SCHEMA + 1})
    before = file.path.read_bytes()
    with pytest.raises(UsageError, match=r"records\.jsonl, line 2 was written by a newer gradfree: its schema is 2"):
        file.read()
    assert file.path.read_bytes() == before


def test_a_failure_does_not_hide_a_result(tmp_path):
    """Whatever the order: a case may be run again."""
    file, failed, done = RecordFile(tmp_path / "records.jsonl"), failure(HIGH, "first"), measure(HIGH)
    for made in (failed, failure(HIGH, "second"), done, failed):
        file.append(made)
    assert list(file.read().values()) == [done]
    assert (failed["results"], failed["error"]) == ({}, "first")
    assert failed.keys() - {"error"} == done.keys()


def test_a_full_disk_loses_nothing_that_was_written(tmp_path, monkeypatch):
    """Though some bytes of the record still fit, the file is unchanged and the message has a remedy."""
    file = RecordFile(tmp_path / "records.jsonl")
    file.append(record("a", {}))
    before, write, room = file.path.read_bytes(), os.write, [10]

    def write_until_full(descriptor, line):
        size, room[0] = min(room[0], len(line)), 0
        if not size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, line[:size])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write_until_full)
        with pytest.raises(UsageError, match=r"cannot be written: No space left on device.*finished before 'b'"):
            file.append(record("b", {}))
    assert file.path.read_bytes() == before
    file.append(record("b", {}))
    assert file.read().keys() == {"a", "b"}


@pytest.mark.parametrize(
    "line", ["not json", "[1, 2]", '{"schema": 1, "case": "a"}', '{"schema": 0, "case": "a", "results": {}}']
)
def test_the_error_names_an_invalid_line(tmp_path, line):
    file = RecordFile(tmp_path / "records.jsonl")
    file.append(record("a", {"x": 1}))
    with file.path.open("a") as raw:
        raw.write(line + "\n")
    with pytest.raises(UsageError, match=r"records\.jsonl, line 2 is not a record"):
        file.read()
