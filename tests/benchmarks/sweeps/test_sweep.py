"""Sweeps: options on the command line become comparisons or an error message."""

import re
from dataclasses import replace

import pytest
from report_records import rounds, section_of
from tiny_suite import CHAIN, HIGHWAY, PLAIN, TASK, fake, training

from gradfree import list_engines
from gradfree.benchmarks.records.case import Row
from gradfree.benchmarks.reports.report import texts
from gradfree.benchmarks.sweeps.axes import RunRequest, Sweep
from gradfree.benchmarks.sweeps.sweep import TASKS, suite_of
from gradfree.benchmarks.training.comparison import Comparison
from gradfree.benchmarks.training.target import TimeToTarget
from gradfree.cli import UsageError, main


@pytest.fixture(autouse=True)
def points(monkeypatch):
    monkeypatch.setitem(TASKS, "points", TASK)


def test_every_combination_is_compared():
    sweep = Sweep(
        tasks="points,digits",
        engines={"highway_bp": {"iterations": [0, 2], "gamma": 0.2}, "dsf": None},
        batch_size="4,8",
        depth=[8, 14],
        dtype="float32,float64",
    )
    suite = suite_of(sweep)
    assert len(suite) == 2 * 2 * 2 * 2
    names = [part.task.name for part in suite]
    assert names[0] == "points batch=4 depth=8 dtype=float32"
    assert names[-1] == "digits batch=8 depth=14 dtype=float64"
    assert len(set(names)) == len(names)
    for part in suite:
        assert [row.label for row in part.rows] == [
            "backprop",
            "highway_bp k=0 gamma=0.2",
            "highway_bp k=2 gamma=0.2",
            "dsf",
        ]
        assert dict(part.rows[1].options) == {"iterations": 0, "gamma": 0.2}
    task = suite[0].task
    assert (task.batch_size, task.options["depth"], task.dtype) == (4, 8, "float32")
    assert task.steps == TASK.steps


def test_names_of_tasks_may_have_hyphens():
    (part,) = suite_of(Sweep(tasks="pydoc-gru", engines="autograd,highway_bp"))
    assert (part.task.model, [row.name for row in part.rows]) == ("recurrent_lm", ["autograd", "highway_bp"])


def test_names_of_engines_may_have_hyphens():
    (part,) = suite_of(Sweep(tasks="points", engines="highway-bp"))
    assert [row.engine for row in part.rows] == ["backprop", "highway_bp"]


def test_names_of_suites_may_have_underscores(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main(["bench", "report", "--suite", "orthogonal_layers"])
    assert "results/orthogonal-layers has no records" in capsys.readouterr().err


def test_a_task_that_no_engine_fits_is_left_out_with_a_message(capsys):
    (part,) = suite_of(Sweep(tasks="points,digits-orthogonal", engines="highway_bp", dtype="float32"))
    assert part.task.name == "points dtype=float32"
    left_out, reason = capsys.readouterr().err.splitlines()
    assert left_out == "digits_orthogonal dtype=float32 is left out: no engine to compare with autograd."
    assert reason.startswith("digits_orthogonal dtype=float32 without highway_bp: the model has no chain")


def test_engines_that_the_model_does_not_allow_are_skipped_with_a_message(capsys):
    (part,) = suite_of(Sweep(tasks="points", engines="all"))
    skipped = [
        (re.match(r"points without (.*?): the model has no chain", line)[1].split(", "), line)
        for line in capsys.readouterr().err.splitlines()
    ]
    (of_layers, layers), (in_time, time) = skipped
    assert {*of_layers} >= {"foton", "pepita"}
    assert "known layers" in layers
    assert {*in_time} >= {"newton", "shooting"}
    assert "nn.GRU" in time
    assert {row.engine for row in part.rows} == {*list_engines()} - {*of_layers, *in_time}
    assert {"backprop", "highway_bp"} <= {row.engine for row in part.rows}


@pytest.mark.parametrize("row", [PLAIN, HIGHWAY, Row("dsf", "dsf", {})], ids=lambda row: row.label)
def test_evaluations_during_training_do_not_change_the_results(row):
    plain, watched = (training(row, task=replace(TASK, evaluations=n)).run() for n in (0, 3))
    curve = watched.pop("curve")
    assert watched == plain
    assert [evaluation["step"] for evaluation in curve] == [0, 3, 6]
    assert curve[-1]["validation"] == plain["validation"]


def curve(*scores):
    evaluations = [{"step": 10 * n, "validation": score} for n, score in enumerate(scores)]
    return {"validation": scores[-1], "test": 0.0, "fidelity": [], "curve": evaluations}


def test_time_to_target_is_steps_times_the_time_of_a_step():
    comparison = Comparison(replace(TASK, evaluations=3), (PLAIN, CHAIN, HIGHWAY))
    runs = {
        PLAIN.label: [curve(50, 70, 90), curve(50, 85, 70)],
        CHAIN.label: [curve(80, 80, 80), curve(80, 10, 10)],
        HIGHWAY.label: [curve(10, 20, 90), curve(10, 20, 30)],
    }
    records = dict(
        fake(training(row, task=comparison.task, seed=seed), results)
        for row in comparison.rows
        for seed, results in enumerate(runs[row.label])
    )
    target = TimeToTarget(comparison, 80.0)
    assert section_of(target, records) is None
    (timing,) = comparison.timing("cpu")
    costs = [rounds(row.label, ratio, ratio) for row, ratio in zip(comparison.rows, (10.0, 20.0, 30.0), strict=True)]
    section = section_of(target, records | dict([fake(timing, {"rows": costs})]))
    assert texts(section) == [
        ["autograd", "100.00", "16", "1.60", "1.00", "2 of 2"],
        ["backprop via chain", "200.00", "1", "0.20", "0.12", "2 of 2"],
        ["highway_bp k=1", "300.00", "–", "–", "–", "1 of 2"],
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "no task is given: use --tasks digits"),
        ({"tasks": "digit"}, "no task is called 'digit'.*Did you mean 'digits'"),
        ({"tasks": "points", "engines": "highway"}, "no engine is called 'highway'.*Did you mean 'highway_bp'"),
        ({"tasks": "points", "engines": "foton"}, "no engine to compare.*\npoints without foton"),
        ({"tasks": "points", "model": "residual_mlp"}, "leave out --tasks or --model"),
        ({"tasks": "points", "engines": "nowhere:Engine"}, "'nowhere:Engine' cannot be imported: ModuleNotFoundError"),
        (
            {"tasks": "points", "engines": {"highway_bp": [0, 1]}},
            r"the options of highway_bp need names, as in '{highway_bp: {iterations: \[0, 1\]}}', not \[0, 1\]",
        ),
        ({"tasks": "points", "engines": ["fa", {"dsf": {}}]}, "write names with options as '{fa: , highway_bp: {"),
        ({"tasks": "points", "engines": "[fa, {dsf: {"}, "write names with options as '{fa: , highway_bp: {"),
        ({"tasks": "points", "engines": "fa: {"}, "fa: { is not a name; write names with options as"),
        ({"model": "mine:build"}, "a run with --model also needs --data module:function"),
        ({"tasks": "points", "steps": 0}, "--steps must be above 0"),
        ({"tasks": "points", "engines": "dsf", "learning_rates": "nan,0.1"}, "--learning-rates takes numbers above 0"),
        ({"tasks": "points", "length": 4}, "'points' has no --length.*copying"),
        ({"tasks": "points", "dtype": "float33"}, "no dtype is called 'float33'.*Did you mean 'float32'"),
        ({"tasks": "points", "loss": "mine:loss"}, "leave out --tasks or --loss"),
        ({"loss": "mine:l", "score": "mine:s"}, "a run with --loss and --score also needs --model module:function and"),
    ],
)
def test_invalid_sweeps_are_refused(options, message):
    with pytest.raises(UsageError) as refused:
        suite_of(Sweep(**options))
    assert re.search(message, str(refused.value), re.DOTALL)


def test_a_config_file_equals_the_same_flags(tmp_path, monkeypatch, capsys):
    (tmp_path / "sweep.yaml").write_text(
        "tasks: points\nengines:\n  highway_bp: {iterations: [0, 1]}\n  dsf:\nbatch_size: [4, 8]\ndtype: float32\n"
        "seeds: 2\ndry_run: true\n"
    )
    monkeypatch.chdir(tmp_path)
    main(["bench", "run", "--config", "sweep.yaml"])
    file = capsys.readouterr().out
    engines = "{highway_bp: {iterations: [0, 1]}, dsf: null}"
    flags = ["--tasks", "points", "--engines", engines, "--batch-size", "4,8", "--dtype", "float32", "--seeds", "2"]
    main(["bench", "run", "--dry-run", *flags])
    assert capsys.readouterr().out == file
    assert len(file.splitlines()) == 1 + 2 * (4 * 2 + 1)
    assert [path.name for path in tmp_path.iterdir()] == ["sweep.yaml"]


def test_each_sweep_has_its_own_folder(tmp_path):
    """Equal sweeps have equal folders, so that they can be continued; the folder stores the request."""
    one = RunRequest(Sweep(tasks="points", engines={"highway_bp": {"iterations": [0, 2]}}, depth="2,4"))
    assert re.fullmatch(r"points-[0-9a-f]{6}", one.folder.name)
    others = [RunRequest(replace(one.sweep, depth="2")), RunRequest(one.sweep, "mine:loader")]
    assert len({kept.folder for kept in (one, RunRequest(one.sweep), *others)}) == 3
    one.save(tmp_path)
    assert RunRequest.load(tmp_path) == one
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(UsageError, match=r"run\.json is not the file of a run: 'sweep'"):
        RunRequest.load(tmp_path)
