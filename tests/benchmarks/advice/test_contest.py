"""Which rows a contest times: at least one, none that is refused, and none for longer than it has."""

import threading
from itertools import chain, repeat
from time import monotonic

import pytest

from gradfree.benchmarks.advice.contest import Contestant, baseline, contest
from gradfree.benchmarks.advice.job import Job
from gradfree.benchmarks.records.case import Row
from gradfree.benchmarks.suites.rows import iterated
from gradfree.cli import UsageError

JOB = Job("user_module:build", "user_module:loader", None, None, "cpu")
ENDLESS = Row("endless", "user_module:Endless", {})


def standings(rows, seconds):
    model = JOB.build()
    return contest(JOB, model, baseline(JOB, model), rows, monotonic() + seconds)


def test_one_engine_is_tried_even_without_time_left():
    found = standings(iterated("highway_bp", 0, 1), 0.0)
    assert [c.row.label for c in found.contestants] == ["backprop", "highway_bp k=0"]
    assert found.untried == ["highway_bp k=1"]


def test_a_model_that_cannot_be_copied_is_an_error_in_one_line():
    model = JOB.build()
    model.lock = threading.Lock()
    with pytest.raises(UsageError, match=r"cannot be trained on .*cannot pickle '_thread.lock' object"):
        baseline(JOB, model)


@pytest.mark.filterwarnings("ignore")
def test_an_engine_refused_on_the_first_batch_is_not_timed():
    found = standings((Row("foton", "foton", {}), *iterated("highway_bp", 0)), 1.0)
    assert [c.row.label for c in found.contestants] == ["backprop", "highway_bp k=0"]
    assert "foton" in found.failures


@pytest.fixture
def take(monkeypatch):
    """Return a function that lets steps take the given seconds, by label."""

    def give(given):
        def seconds(self, job, batch, steps=1, losses=None):
            loss = self.step(batch)
            if losses is not None:
                losses.append(loss)
            return next(given[self.row.label])

        monkeypatch.setattr(Contestant, "seconds", seconds)

    return give


def test_a_long_step_that_was_disturbed_is_timed_again(take):
    slow = chain([2.0, 2.0], repeat(0.5))
    take({"backprop": repeat(1.0), "highway_bp k=0": slow, "highway_bp k=1": repeat(2.0)})
    found = standings(iterated("highway_bp", 0, 1), 60.0)
    assert [c.first_ratio for c in found.contestants] == [None, None, 2.0]


def test_short_steps_have_their_rounds_though_the_first_turn_was_disturbed(take):
    take({"backprop": chain([0.2, 0.05, 0.3], repeat(0.05)), "highway_bp k=0": repeat(0.05)})
    found = standings(iterated("highway_bp", 0), 0.0)
    assert [len(c.times) for c in found.contestants] == [3, 3]


def test_a_step_that_does_not_end_is_stopped_and_the_answer_comes():
    found = standings((*iterated("highway_bp", 0), ENDLESS), 1.0)
    stopped = [c.row.label for c in found.contestants if c.first_ratio is not None]
    assert "endless" in [*stopped, *found.untried]
    assert next(c.row.label for c in found.contestants if c.cost) == "backprop"
