"""Which settings have a turn: somebody always, nobody who is refused or has the gradient of another."""

import pytest
import user_module

from gradfree import list_engines
from gradfree.benchmarks.advice.contest import Budget, contest, rows_to_try
from gradfree.benchmarks.advice.job import Job
from gradfree.benchmarks.records.case import Row
from gradfree.benchmarks.suites.rows import iterated

JOB = Job("user_module:build", "user_module:loader", None, None, "cpu")


def test_of_settings_of_one_gradient_one_is_tried():
    _, rows = rows_to_try(user_module.build(), None, list_engines())
    labels = {row.label for row in rows}
    assert {"highway_bp k=0", "fixed_point k=1"} <= labels
    assert not {"dsf feedback=gate", "truncated window=2"} & labels


def test_one_engine_is_tried_though_the_time_is_over():
    standings = contest(JOB, JOB.build(), iterated("highway_bp", 0, 1), Budget(0.0), lambda _: None)
    assert [c.row.label for c in standings.contestants] == ["backprop", "highway_bp k=0"]
    assert standings.untried == ["highway_bp k=1"]


@pytest.mark.filterwarnings("ignore")
def test_what_is_refused_on_the_first_batch_is_not_timed():
    standings = contest(JOB, JOB.build(), (Row("foton", "foton", {}), *iterated("highway_bp", 0)), Budget(1.0), str)
    assert [c.row.label for c in standings.contestants] == ["backprop", "highway_bp k=0"]
    assert "foton" in standings.failures
