"""Records survive whatever happens to the process that writes them."""

import json
import math

import pytest
from tiny_suite import HIGHWAY, training

from gradfree.benchmarks.records import SCHEMA, RecordFile, measure
from gradfree.cli import UsageError


def record(case, results):
    return {"schema": SCHEMA, "case": case, "results": results}


def test_a_record_comes_back_as_it_was(tmp_path):
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


def test_no_file_has_no_records(tmp_path):
    assert RecordFile(tmp_path / "none").read() == {}


def test_results_of_a_diverged_run_come_back(tmp_path):
    file = RecordFile(tmp_path / "records.jsonl")
    file.append(record("a", {"validation": math.nan, "test": math.inf}))
    assert math.isnan(file.read()["a"]["results"]["validation"])
    assert file.read()["a"]["results"]["test"] == math.inf


@pytest.mark.parametrize("torn", ['{"schema": 1, "ca', json.dumps(record("c", 3)), "{"])
def test_a_torn_last_line_does_not_count_and_is_replaced(tmp_path, torn):
    """Whole or not: a line without its end was not finished."""
    file = RecordFile(tmp_path / "records.jsonl")
    file.append(record("a", 1))
    with file.path.open("a") as raw:
        raw.write(torn)
    assert file.read() == {"a": record("a", 1)}
    file.append(record("b", 2))
    assert file.read() == {"a": record("a", 1), "b": record("b", 2)}
    assert len(file.path.read_text().splitlines()) == 2


def test_a_file_of_one_torn_line_starts_anew(tmp_path):
    file = RecordFile(tmp_path / "records.jsonl")
    file.path.write_text("{")
    assert file.read() == {}
    file.append(record("a", 1))
    assert file.read() == {"a": record("a", 1)}


def test_records_of_another_schema_do_not_count(tmp_path):
    file = RecordFile(tmp_path / "records.jsonl")
    file.append({**record("a", 1), "schema": SCHEMA + 1})
    assert file.read() == {}


@pytest.mark.parametrize("line", ["not json", "[1, 2]", '{"case": "a"}', "7"])
def test_a_line_that_is_no_record_is_named(tmp_path, line):
    file = RecordFile(tmp_path / "records.jsonl")
    file.append(record("a", 1))
    with file.path.open("a") as raw:
        raw.write(line + "\n")
    with pytest.raises(UsageError, match=r"records\.jsonl, line 2 is no record"):
        file.read()
