"""Which rows a contest times: at least one, and none that is refused."""

import pytest

from gradfree.benchmarks.advice.contest import contest
from gradfree.benchmarks.advice.job import Job
from gradfree.benchmarks.records.case import Row
from gradfree.benchmarks.suites.rows import iterated

JOB = Job("user_module:build", "user_module:loader", None, None, "cpu")


def test_one_engine_is_tried_even_without_time_left():
    standings = contest(JOB, JOB.build(), iterated("highway_bp", 0, 1), 0.0)
    assert [c.row.label for c in standings.contestants] == ["backprop", "highway_bp k=0"]
    assert standings.untried == ["highway_bp k=1"]


@pytest.mark.filterwarnings("ignore")
def test_an_engine_refused_on_the_first_batch_is_not_timed():
    standings = contest(JOB, JOB.build(), (Row("foton", "foton", {}), *iterated("highway_bp", 0)), 1.0)
    assert [c.row.label for c in standings.contestants] == ["backprop", "highway_bp k=0"]
    assert "foton" in standings.failures
