"""Searching for settings: Optuna's trials are cases with records, and several processes have one study."""

import json
import shlex
import signal
from dataclasses import replace
from math import log10, nan

import pytest
from forked_scripts import Script
from tiny_suite import TASK, fake

from gradfree.benchmarks.records.records import RecordFile, failure
from gradfree.benchmarks.running.workers import Workers
from gradfree.benchmarks.sweeps.axes import Sweep
from gradfree.benchmarks.sweeps.sweep import TASKS
from gradfree.benchmarks.tasks.catalogue import PYDOC
from gradfree.cli import main

optuna = pytest.importorskip("optuna")

from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution  # noqa: E402
from optuna.trial import TrialState  # noqa: E402

from gradfree.benchmarks.sweeps.search import Space  # noqa: E402
from gradfree.benchmarks.sweeps.study import joined  # noqa: E402

SPACE = "{learning_rate: [1e-4, 1, log], iterations: [0, 3], gamma: [0, 1]}"


def peak(case):
    """A score that is best at a learning rate of 0.01 and two iterations."""
    return 90 - 10 * abs(log10(case.task.learning_rate) + 2) - abs(case.row.options.get("iterations", 2) - 2)


@pytest.fixture(autouse=True)
def cases(monkeypatch):
    """Cases that are run in no time, in order, and what becomes of each: a score, an error or an exception."""
    run, outcomes = [], {}

    def measure(self, cases):
        for case in cases:
            outcome = outcomes.get(len(run), peak(case))
            if isinstance(outcome, BaseException):
                raise outcome
            run.append(case)
            yield failure(case, outcome) if isinstance(outcome, str) else fake(case, {"validation": outcome})[1]

    monkeypatch.setitem(TASKS, "points", TASK)
    monkeypatch.setattr(Workers, "run", measure)
    return run, outcomes


def search(folder, *flags, space=SPACE, trials=6):
    given = ["--tasks", "points", "--engines", "highway_bp", "--space", space, "--trials", str(trials)]
    main(["bench", "search", *given, "--out", str(folder), *flags])


def trials(folder):
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(folder / "study.journal")))
    (name,) = optuna.get_all_study_names(storage)
    return optuna.load_study(study_name=name, storage=storage).trials


def records(folder):
    return RecordFile(folder / "records.jsonl").read()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"iterations": [0, 8]}, IntDistribution(0, 8)),
        ({"iterations": [1, 8, "log"]}, IntDistribution(1, 8, log=True)),
        ({"iterations": [0, 2, 8]}, CategoricalDistribution([0, 2, 8])),
        ({"block": [True, False]}, CategoricalDistribution([True, False])),
        ({"gamma": [0, 1]}, FloatDistribution(0, 1)),
        ({"learning_rate": [1, 2]}, FloatDistribution(1, 2)),
        ({"learning_rate": [1e-4, 1e-1, "log"]}, FloatDistribution(1e-4, 1e-1, log=True)),
        ({"dtype": ["float32", "float64"]}, CategoricalDistribution(["float32", "float64"])),
        ({"batch_size": [4, 8]}, IntDistribution(4, 8)),
    ],
)
def test_a_range_is_of_the_numbers_that_the_setting_takes(given, expected):
    space = Space.of(Sweep(tasks="points", engines="highway_bp"), given)
    assert list(space.ranges.values()) == [expected]


def test_every_end_and_choice_is_checked_in_advance():
    given = {"iterations": [1, 3], "dtype": ["float32", "float64", "bfloat16"]}
    found = list(Space.of(Sweep(engines="highway_bp"), given).extremes())
    assert {settings["iterations"] for settings in found} == {1, 3}
    assert [settings["dtype"] for settings in found] == given["dtype"]


def test_settings_have_three_digits_and_stay_in_their_range():
    space = Space.of(Sweep(engines="highway_bp"), {"gamma": [0.12345, 0.5], "learning_rate": [1e-6, 1e-5, "log"]})
    assert space.settings({"gamma": 0.1234567, "learning_rate": 1.23456e-6}) == {
        "gamma": 0.12345,
        "learning_rate": 1.23e-6,
    }


def test_as_many_trials_as_asked_for_each_with_its_record(tmp_path, cases, capsys):
    run, _ = cases
    search(tmp_path, trials=12)
    done = trials(tmp_path)
    assert [trial.state for trial in done] == [TrialState.COMPLETE] * 12
    assert records(tmp_path).keys() == {case.id for case in run}
    assert [trial.value for trial in done] == [records(tmp_path)[case.id]["results"]["validation"] for case in run]
    assert {case.kind for case in run} == {"trial"}
    assert all(1e-4 <= case.task.learning_rate <= 1 for case in run)
    assert all(0 <= case.row.options["gamma"] <= 1 for case in run)
    best = max(run, key=peak)
    assert f"Best of 12 trials, points: validation accuracy (%) {peak(best):.4g} with gamma=" in capsys.readouterr().out

    search(tmp_path, trials=12)
    assert "12 of 12 trials are in" in capsys.readouterr().out
    search(tmp_path, trials=14)
    assert len(trials(tmp_path)) == 14


def test_one_seed_makes_one_search_of_one_process(tmp_path):
    for folder, seed in ("a", 0), ("b", 0), ("c", 1):
        search(tmp_path / folder, "--seed", str(seed), trials=11)
    first, again, other = (list(records(tmp_path / folder)) for folder in "abc")
    assert first == again
    assert not set(first) & set(other)


def test_interrupted_it_goes_on_as_if_it_had_not_been(tmp_path, cases, capsys):
    run, outcomes = cases
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    search(whole, trials=13)
    outcomes[len(run) + 11] = KeyboardInterrupt()
    with pytest.raises(SystemExit) as stopped:
        search(cut, trials=13)
    assert stopped.value.code == 130
    assert "the same command goes on" in capsys.readouterr().err
    assert list(records(cut)) == list(records(whole))[:11]
    outcomes.clear()
    search(cut, trials=13)
    assert list(records(cut)) == list(records(whole))
    states = [trial.state for trial in trials(cut)]
    assert states == [TrialState.COMPLETE] * 11 + [TrialState.FAIL] + [TrialState.COMPLETE] * 2


def test_settings_that_have_a_record_are_not_run_again(tmp_path, cases):
    run, _ = cases
    search(tmp_path, space="{iterations: [0, 1]}", trials=8)
    assert len(trials(tmp_path)) == 8
    assert len(run) == len(records(tmp_path)) == 2


def test_a_case_that_crashes_is_a_failed_trial_and_the_study_goes_on(tmp_path, cases, capsys):
    run, outcomes = cases
    outcomes.update({1: "Traceback\nMemoryError: too deep", 2: nan})
    search(tmp_path)
    done = trials(tmp_path)
    assert [trial.state for trial in done] == [TrialState.COMPLETE, TrialState.FAIL] + [TrialState.COMPLETE] * 4
    assert done[1].user_attrs["error"].endswith("MemoryError: too deep")
    assert "error" in records(tmp_path)[run[1].id]
    assert done[2].value == -float("inf")
    out = capsys.readouterr().out
    assert "trial 1 failed: gamma=" in out
    assert "Best of 6 trials" in out


def test_of_a_score_that_is_better_low_the_lowest_is_best_and_none_that_diverged(tmp_path, cases, monkeypatch, capsys):
    monkeypatch.setitem(TASKS, "points", replace(TASK, score=PYDOC.score))
    _, outcomes = cases
    outcomes.update({0: 5.0, 1: nan, 2: 4.0, 3: 6.0})
    search(tmp_path, trials=4)
    assert "Best of 4 trials, points: validation perplexity (per character) 4 with" in capsys.readouterr().out


def test_where_every_trial_fails_there_is_no_best_one(tmp_path, cases, capsys):
    _, outcomes = cases
    outcomes.update(dict.fromkeys(range(3), "OSError: no such disk"))
    with pytest.raises(SystemExit) as ended:
        search(tmp_path, trials=3)
    assert ended.value.code == 2
    assert "no trial has a score. The last one: gamma=" in capsys.readouterr().err
    assert [trial.state for trial in trials(tmp_path)] == [TrialState.FAIL] * 3


def test_settings_that_do_not_go_together_are_a_failed_trial(tmp_path, cases, monkeypatch, capsys):
    """They are seen when they come up: in advance every end and choice is tried, not every combination."""
    monkeypatch.setattr(Space, "extremes", lambda self: iter([{"iterations": 0}]))
    search(tmp_path, space="{iterations: [-1, 0]}")
    states = {trial.params["iterations"]: trial.state for trial in trials(tmp_path)}
    assert states == {-1: TrialState.FAIL, 0: TrialState.COMPLETE}
    assert "HighwayBP: iterations must be at least 0" in capsys.readouterr().out


def test_what_others_are_at_counts_until_they_are_gone(tmp_path):
    ranges = {"x": FloatDistribution(0, 1)}
    with joined(tmp_path, "study", True) as one:
        with joined(tmp_path, "study", True) as two:
            asked = [one.ask(ranges, 2, seed=0), two.ask(ranges, 2, seed=0)]
            assert asked[0].params != asked[1].params
            assert one.records.path != two.records.path
            one.tell(asked[0], 1.0)
            assert one.ask(ranges, 2, seed=0) is None
        (again,) = [one.ask(ranges, 2, seed=0)]
        assert again.params == asked[1].params
        one.tell(again, 2.0)
        assert one.ask(ranges, 2, seed=0) is None
        assert [trial.value for trial in one.counted()] == [1.0, 2.0]


@pytest.mark.parametrize(
    "flags",
    [
        ["--tasks", "points", "--steps", "5"],
        ["--tasks", "points", "--model", "{residual_mlp: {expansion: 2}}", "--target", "80"],
        ["--model", "{user_module:build: {depth: 3}}", "--data", "user_module:loader", "--chains", "[blocks]"],
    ],
)
def test_the_command_that_is_printed_trains_the_best_settings(flags, tmp_path, capsys):
    space = "{learning_rate: [1e-6, 2e-5, log], gamma: [1e-6, 1e-5], batch_size: [4, 8]}"
    engines = "{highway_bp: {iterations: 1}}"
    given = ["--engines", engines, "--space", space, "--trials", "4", "--out", str(tmp_path)]
    main(["bench", "search", *flags, *given])
    command = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert command[:3] == ["gradfree", "bench", "run"]
    main([*command[1:], "--list"])
    (best,) = [name for name, r in records(tmp_path).items() if r["results"]["validation"] == best_value(tmp_path)]
    listed = capsys.readouterr().out.splitlines()
    # Backprop's two learning rates, and the engine's other one.
    assert [line for line in listed if line.startswith("done")] == [f"done     {best}"]
    assert len([line for line in listed if line.startswith("missing  trial")]) == 3


def best_value(folder):
    return max(trial.value for trial in trials(folder))


def test_other_settings_are_another_study_of_the_folder(tmp_path, cases):
    run, _ = cases
    search(tmp_path, trials=2)
    search(tmp_path, space="{iterations: [0, 3]}", trials=2)
    assert len(run) == 4
    search(tmp_path, trials=2)
    assert len(run) == 4


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--space", "{learning_rat: [1e-4, 1e-1]}"], "no setting of the training or of highway_bp is called"),
        (["--space", "{learning_rat: [1e-4, 1e-1]}"], "Did you mean 'learning_rate'?"),
        (["--space", "{window: [1, 4]}"], "there are: learning_rate, batch_size, length, depth, dtype, steps, "),
        (["--space", "{gamma: [0.5, 0.1]}"], "--space gamma: [0.5, 0.1] is no range: the first number must be below"),
        (["--space", "{gamma: [0.5, 0.5]}"], "the first number must be below"),
        (["--space", "{gamma: [0, .inf]}"], "the first number must be below"),
        (["--space", "{learning_rate: [0, 0.1, log]}"], "--space learning_rate: "),
        (["--space", "{gamma: 0.1}"], "--space gamma: 0.1 is no range, [low, high] or [low, high, log], and no list"),
        (["--space", "{gamma: [0.1]}"], "is no range"),
        (["--space", "{gamma: [0.1, 2]}"], "gamma must be from 0 to 1, not 2.0"),
        (["--space", "{depth: [0, 3]}"], "--depth takes numbers above 0"),
        (["--space", "{iterations: [0, 2]}", "--engines", "{highway_bp: {iterations: 1}}"], "--engines fixes iter"),
        (["--space", "{learning_rate: [0.1, 1]}", "--learning-rates", "1"], "--learning-rates fixes learning_rate,"),
        (["--space", "{batch_size: [1, 2]}", "--batch-size", "2"], "--batch-size fixes batch_size, which --space"),
        (["--space", "{steps: [1, 2]}", "--seconds", "2"], "--steps and --seconds are two budgets"),
        (["--space", "{}"], "say what is to be found: --space '{learning_rate:"),
        (["--space", SPACE, "--engines", "dsf,highway_bp"], "a search is for one engine: --engines highway_bp"),
        (["--space", "{gamma: [0, 1]}", "--engines", "highway"], "no engine is called 'highway'"),
        (["--space", SPACE, "--depth", "2,3"], "a search is of one task, model and engine, with one value of all"),
        (["--space", "{depth: [2, 3]}", "--learning-rates", "1,2"], "a search is of one task"),
        (["--space", "{depth: [2, 3]}", "--engines", "{highway_bp: {gamma: [0, 1]}}"], "a search is of one task"),
        (["--space", SPACE, "--trials", "0"], "--trials must be at least 1, not 0"),
        (["--space", SPACE, "--device", "tpu"], "tpu"),
    ],
)
def test_what_cannot_be_searched_is_refused_before_anything_is_written(flags, message, tmp_path, capsys):
    out = tmp_path / "out"
    with pytest.raises(SystemExit) as ended:
        main(["bench", "search", "--tasks", "points", "--engines", "highway_bp", "--out", str(out), *flags])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


def test_a_damaged_journal_is_said(tmp_path, capsys):
    (tmp_path / "study.journal").write_text("garbage\nmore\n")
    with pytest.raises(SystemExit):
        search(tmp_path)
    assert f"{tmp_path}/study.journal cannot be read: " in capsys.readouterr().err


MISSING = "import sys; sys.modules['optuna'] = None; from gradfree.cli import main; main(['bench', 'search'])"


@pytest.mark.processes
@pytest.mark.slow
def test_without_optuna_the_extra_is_named(tmp_path):
    (tmp_path / "missing.py").write_text(MISSING)
    status, said = Script(tmp_path / "missing.py").ended()
    assert status == 2
    assert said.startswith("gradfree: error: optuna")
    assert said.endswith("Do, in a checkout of it: pip install '.[optuna]'\n")


SEARCHES = """
import os
import sys
from forking import exit_code, fork
from gradfree.benchmarks.records.records import attempt
from gradfree.benchmarks.running.workers import Workers
from gradfree.benchmarks.sweeps import search
from gradfree.cli import main

def run(kill):
    def here(self, cases):
        if kill:
            os.environ["DOOMED"] = ""
        yield from map(attempt, cases)

    Workers.run = here
    main(sys.argv[1:])

killed = exit_code(fork(run, True))
two = [fork(run, False) for _ in range(2)]
print("ended:", killed, *map(exit_code, two))
"""


@pytest.mark.processes
@pytest.mark.slow
def test_two_processes_make_the_trials_that_are_asked_for_whatever_became_of_a_third(tmp_path):
    """One is killed in the midst of its trial, then two start at once: not a trial more or less, and each of them has
    one whole line of records."""
    flags = ["--model", "user_module:build_doomed", "--data", "user_module:loader", "--engines", "highway_bp"]
    flags += ["--steps", "5", "--space", SPACE, "--trials", "6", "--out", str(tmp_path)]
    (tmp_path / "searches.py").write_text(SEARCHES)
    status, said = Script(tmp_path / "searches.py", "bench", "search", *flags).ended()
    assert status == 0, said
    assert f"ended: {-signal.SIGKILL} 0 0\n" in said
    assert "Best of 6 trials" in said
    done = [trial.value for trial in trials(tmp_path)[1:]]
    assert trials(tmp_path)[0].state == TrialState.FAIL
    lines = [line for file in tmp_path.glob("records-*.jsonl") for line in file.read_text().splitlines()]
    assert sorted(json.loads(line)["results"]["validation"] for line in lines) == sorted(done)
    assert len(done) == 6
