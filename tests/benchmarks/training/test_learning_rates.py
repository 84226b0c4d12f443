"""Each row's learning rate is chosen on validation data, by trials that are not reported."""

from dataclasses import replace
from math import inf, nan

import pytest
from tiny_suite import HIGHWAY, TASK, TUNED, fake, training

from gradfree.benchmarks.records.records import failure
from gradfree.benchmarks.reports.report import SuiteReport
from gradfree.benchmarks.tasks.catalogue import PYDOC
from gradfree.benchmarks.tasks.task import Score
from gradfree.benchmarks.training.comparison import Trial

LOW, MIDDLE, HIGH = TUNED.learning_rates
LOWER_IS_BETTER = replace(TUNED, task=replace(TASK, score=PYDOC.score))


def tried(part=TUNED, **validation):
    """Return the records of the trials, given the scores of each row by its engine."""
    scores = [score for row in part.rows for score in validation[row.engine]]
    return dict(fake(trial, {"validation": score}) for trial, score in zip(part.trials("cpu"), scores, strict=True))


def rates(part, records):
    return [case and case.task.learning_rate for case in part.training(0, "cpu", records)]


TRIED = tried(backprop=[70, 90, 80], highway_bp=[70, 80, 90])


def test_each_row_has_the_rate_of_its_best_trial():
    assert rates(TUNED, TRIED) == [MIDDLE, HIGH]
    assert rates(TUNED, dict(list(TRIED.items())[:-1])) == [MIDDLE, None]
    best = {case.id: failure(case, "out of memory") for case in TUNED.trials("cpu") if case.id == list(TRIED)[1]}
    assert rates(TUNED, TRIED | dict(best.items())) == [HIGH, HIGH]
    lower = tried(LOWER_IS_BETTER, backprop=[7, 9, 8], highway_bp=[7, 8, 6])
    assert rates(LOWER_IS_BETTER, lower) == [LOW, HIGH]


@pytest.mark.parametrize("part", [TUNED, LOWER_IS_BETTER])
def test_a_diverged_trial_is_not_chosen(part):
    assert rates(part, tried(part, backprop=[nan, 1, nan], highway_bp=[1, nan, nan])) == [MIDDLE, LOW]
    worst = -inf if part is TUNED else inf
    assert rates(part, tried(part, backprop=[worst, 1, worst], highway_bp=[nan, nan, 1])) == [MIDDLE, HIGH]


@pytest.mark.parametrize("done", [1, 6])
def test_the_report_of_a_run_that_was_cut_in_its_trials_says_so(done):
    report = SuiteReport.of("cut", (TUNED,), dict(list(TRIED.items())[:done]))
    assert not report.sections
    said = f"{TASK.name}: {done} of 6 trials of learning rates have run; training follows"
    assert said in report.markdown()
    assert not list(SuiteReport.of("none", (TUNED,), {}).warnings)


def test_a_trial_is_a_training_run_without_a_test_score(monkeypatch):
    scored = []
    of = Score.of
    monkeypatch.setattr(Score, "of", lambda self, model, split: scored.append(split.inputs) or of(self, model, split))
    trial = Trial(task=TASK, row=HIGHWAY, device="cpu")
    results = trial.run()
    (inputs,) = scored
    assert inputs.equal(TASK.data().validation.inputs)
    reported = training(HIGHWAY, seed=trial.seed).run()
    assert reported == {**results, "test": reported["test"]}
    assert trial.seed not in range(1000)


def test_shorter_trials_choose_the_rate_of_the_whole_training():
    part = replace(TUNED, trial_steps=3)
    assert {trial.task.steps for trial in part.trials("cpu")} == {3}
    chosen = list(part.training(0, "cpu", tried(part, backprop=[70, 90, 80], highway_bp=[70, 80, 90])))
    assert [(case.task.learning_rate, case.task.steps) for case in chosen] == [
        (MIDDLE, TASK.steps),
        (HIGH, TASK.steps),
    ]
