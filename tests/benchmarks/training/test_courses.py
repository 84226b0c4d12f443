"""Timed training runs: interleaved steps equal those of a separate run, and all of their time counts."""

from dataclasses import replace

import pytest
import torch
from report_records import fact_values, section_of

from gradfree.benchmarks.data.bundled import Data, Joined, Split
from gradfree.benchmarks.records.case import Row
from gradfree.benchmarks.records.records import attempt
from gradfree.benchmarks.suites.long_sequences import ADDING_LONG
from gradfree.benchmarks.tasks.task import TextTask
from gradfree.benchmarks.timing.timed import Timings
from gradfree.benchmarks.training.comparison import Training
from gradfree.benchmarks.training.courses import courses

ROWS = (Row("backprop", "backprop", {}), Row("shooting", "shooting", {"segments": 32}))
TASK = replace(ADDING_LONG, data=replace(ADDING_LONG.data, length=64, train=20), steps=20, batch_size=2)
PART = Timings(courses, (TASK,), ROWS, threads=1)


def test_turns_equal_a_training_run_and_the_report_has_time_and_fallbacks():
    (case,) = PART.timing("cpu")
    record = attempt(case)
    exact, shooting = record["results"]["rows"]
    alone = Training(task=TASK, row=ROWS[0], device="cpu", seed=0).run()
    assert exact["losses"] == [pytest.approx(one["loss"]) for one in alone["losses"]]
    assert exact["losses"] == pytest.approx(shooting["losses"], rel=1e-3)
    assert exact["total"] == pytest.approx(sum(exact["times"]))
    section = section_of(PART, {case.id: record})
    cells = {heading: cell.text for heading, cell in zip(section.head, section.rows[1], strict=True)}
    assert cells["engine"] == "shooting"
    # The model has long memory, so shooting falls back to the sequential pass for some fifty steps.
    assert cells["sequential"] == "1.00"
    assert cells["passes in segments"] == "1"
    assert fact_values(section, row="shooting", metric="largest difference in training loss")[0] < 1e-3


def test_rows_of_a_batch_read_a_text_in_order():
    tokens = torch.arange(24).reshape(12, 2)
    text = Joined(lambda: Data(*(Split(tokens, tokens + 1),) * 3), 2)
    assert text().train.inputs.tolist() == torch.arange(24).reshape(6, 4).tolist()
    task = TextTask(**{**vars(TASK), "data": text, "steps": 4})
    firsts = [batch.inputs[:, 0].tolist() for batch in task.batches(text().train, seed=0)]
    assert firsts == [[0, 12], [4, 16], [8, 20], [0, 12]]
