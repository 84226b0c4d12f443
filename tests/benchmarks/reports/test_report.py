"""Tables and sentences from records made up so that every figure is known."""

import io
from dataclasses import replace
from math import nan

import pytest
from matplotlib.image import imread
from report_records import RECORDS, TRAININGS, drawn, failed, markdown, rounds, table_rows, trained
from rich.console import Console
from tiny_suite import CHAIN, HIGHWAY, PLAIN, SUITE, TASK, fake, speed, training

from gradfree.benchmarks.records.case import Row
from gradfree.benchmarks.records.records import RecordFile
from gradfree.benchmarks.reports.report import print_section
from gradfree.benchmarks.suites.index import SUITES
from gradfree.benchmarks.tables.experiment import belonging, sections
from gradfree.benchmarks.tables.plot import save_plots
from gradfree.benchmarks.tables.section import Section
from gradfree.benchmarks.tasks.catalogue import PYDOC
from gradfree.cli import main

# Student's t is 4.303 for three seeds: margins are 2.484 times the standard deviation.
FIGURES = [
    ["backprop", "96.00 ± 2.48", "1.00", "0.99–1.01", "4.0", "1.00", "1.000"],
    ["backprop via chain", "96.00 ± 0.00", "1.25", "1.24–1.26", "5.0", "1.25", "1.000"],
    ["highway_bp k=1", "90.00 ± 24.84", "0.50", "0.49–0.51", "10.0", "2.50", "0.750"],
]
WORDS = [
    "backprop: the baseline.",
    "backprop via chain: 1.25× slower than backprop at 1.25× the memory, accuracy +0.00 ± 2.48 (no difference seen).",
    "highway_bp k=1: 2.00× faster than backprop at 2.50× the memory, accuracy -6.00 ± 22.36 (no difference seen).",
    "Pareto front of step time and test accuracy, fastest first: highway_bp k=1, backprop.",
]


def bullets(text):
    return [line[2:] for line in text.splitlines() if line.startswith("- ")]


def printed(section, width=80):
    console = Console(width=width, file=io.StringIO())
    print_section(section, console)
    return console.file.getvalue()


def test_the_table_has_the_figures():
    text = markdown(*sections(SUITE, RECORDS))
    assert table_rows(text) == FIGURES
    assert "points: residual_mlp, 7 steps, seeds: 3, device: cpu, threads: 1" in text


def test_the_legend_tells_the_interval_the_number_of_seeds_and_the_baselines_time():
    (summary,) = sections(SUITE, RECORDS)
    assert "±: 95 % confidence interval of the mean over seeds (Student's t, n = 3)." in summary.legend
    assert "for one training step (10.0 ms, quartiles 9.9 and 10.1)" in summary.legend


def test_the_terminal_shows_every_figure_in_eighty_columns():
    (summary,) = sections(SUITE, RECORDS)
    text = printed(summary)
    for row in FIGURES:
        assert any(line.split() == " ".join(row).split() for line in text.splitlines())
    assert "…" not in text
    assert summary.legend.split()[-1] in text
    assert " ".join(text.split()).endswith(WORDS[-1])


class Wide(Section):
    title, legend, labels = "wide", "", 2

    def cells(self):
        yield ["layer", "engine", *(f"figure {n}" for n in range(20))]
        yield ["GRU [b]", "dsf", *(f"{n}.25 [1.5]" for n in range(20))]


def test_a_table_that_is_wider_than_the_terminal_goes_on_below_with_the_same_labels():
    text = printed(Wide())
    rows = [line.split() for line in text.splitlines() if "dsf" in line]
    assert len(rows) > 2
    assert all(row[:3] == ["GRU", "[b]", "dsf"] for row in rows)
    assert [figure for row in rows for figure in row[3::2]] == [f"{n}.25" for n in range(20)]
    assert max(map(len, text.splitlines())) <= 80


def test_the_sentences_follow_from_the_figures():
    assert bullets(markdown(*sections(SUITE, RECORDS)))[: len(WORDS)] == WORDS


def test_perplexity_is_better_when_lower():
    task = replace(TASK, score=PYDOC.score)
    suite = (replace(SUITE[0], task=task),)
    records = dict(
        [
            *trained(PLAIN, [9, 9, 9], [10, 11, 12], task=task),
            *trained(CHAIN, [9, 9, 9], [12.1, 13.1, 14.101], task=task),
            *trained(HIGHWAY, [9, 9, 9], [9, 10, 11.001], task=task),
        ]
    )
    (summary,) = sections(suite, records)
    assert summary.verdicts() == [
        "the baseline",
        "not timed, perplexity +2.10 ± 0.00 (worse)",
        "not timed, perplexity -1.00 ± 0.00 (better)",
    ]


def test_what_was_not_measured_is_shown_as_a_dash():
    text = markdown(*sections(SUITE, dict(trained(PLAIN, [97], [96]))))
    assert table_rows(text)[0] == ["backprop", "96.00 ± –", "–", "–", "–", "–", "1.000"]
    assert table_rows(text)[1] == ["backprop via chain", "– ± –", "–", "–", "–", "–", "–"]
    assert "backprop via chain: not timed, accuracy not compared." in bullets(text)


def test_a_run_that_diverged_is_called_so():
    records = RECORDS | dict(trained(CHAIN, [nan, 97, 97], [nan, 96, 96]))
    (summary,) = sections(SUITE, records)
    assert table_rows(markdown(summary))[1][1] == "diverged"
    assert "accuracy not comparable, as a run diverged" in summary.verdicts()[1]
    assert [row.label for row in summary.front] == ["highway_bp k=1", "backprop"]


def test_failed_runs_count_as_missing_and_are_told():
    some = RECORDS | dict([failed(training(CHAIN, seed=1))])
    summary, failures = sections(SUITE, some)
    assert table_rows(markdown(summary))[1][:2] == ["backprop via chain", "96.00 ± 0.00"]
    # The seeds that are left differ by 1 and by -1: t is 12.706.
    assert summary.verdicts()[1] == (
        "1.25× slower than backprop at 1.25× the memory, accuracy +0.00 ± 12.71 (no difference seen); "
        "failed with 1 of 3 seeds: RuntimeError: out of | memory"
    )
    assert table_rows(markdown(failures).replace(r"\|", "/")) == [
        ["training/points/backprop via chain/cpu/seed 1", "RuntimeError: out of / memory"]
    ]

    whole = RECORDS | dict(failed(training(CHAIN, seed=seed)) for seed in range(3))
    summary, _ = sections(SUITE, whole)
    assert table_rows(markdown(summary))[1][:3] == ["backprop via chain", "failed", "1.25"]
    assert "failed with 3 of 3 seeds" in summary.verdicts()[1]
    assert summary.seeds == 3


def test_a_failed_timing_leaves_the_scores():
    summary, failures = sections(SUITE, dict([*TRAININGS, failed(speed())]))
    assert table_rows(markdown(summary))[2] == ["highway_bp k=1", "90.00 ± 24.84", "–", "–", "–", "–", "0.750"]
    assert table_rows(markdown(failures))[0][0] == "speed/points/all rows/cpu/seed 0"


def test_a_report_of_nothing_but_failures(tmp_path):
    records = dict([failed(training(PLAIN)), failed(speed())])
    summary, failures = sections(SUITE, records)
    assert table_rows(markdown(summary))[0] == ["backprop", "failed", "–", "–", "–", "–", "–"]
    assert summary.verdicts()[0] == "the baseline; failed with 1 of 1 seeds: RuntimeError: out of | memory"
    assert len(table_rows(markdown(failures))) == 2
    assert "out of | memory" in " ".join(printed(failures).split())
    save_plots([summary, failures], tmp_path / "report.png")


def test_records_of_another_configuration_do_not_count():
    stale = dict(trained(HIGHWAY, [50, 50, 50], [50, 50, 50], task=replace(TASK, steps=8)))
    stale |= dict([failed(training(HIGHWAY, task=replace(TASK, steps=8), seed=9))])
    assert list(sections(SUITE, RECORDS | stale)) == list(sections(SUITE, RECORDS))
    assert list(sections(SUITE, stale)) == []
    assert belonging(SUITE, RECORDS | stale) == list(RECORDS.values())


def test_devices_are_not_mixed():
    other = dict(trained(PLAIN, [50, 50], [50, 50], device="cuda"))
    cpu, cuda = sections(SUITE, RECORDS | other)
    assert (cpu.device, cpu.rows[0].score.mean) == ("cpu", 96)
    assert (cuda.device, cuda.rows[0].score.mean) == ("cuda", 50)


def test_the_score_is_drawn_against_the_time_with_intervals_and_front():
    (section,) = sections(SUITE, RECORDS)
    axes = drawn(section, "accuracy against step time")
    bars = {c.get_label(): [line.get_segments()[0].tolist() for line in c.lines[2]] for c in axes.containers}
    (low, right), (bottom, top) = bars["highway_bp with k iterations"]
    assert [low, right] == [[0.49, 90], [0.51, 90]]
    assert [bottom[1], top[1]] == pytest.approx([90 - 24.84, 90 + 24.84], abs=0.01)
    (front,) = (line for line in axes.get_lines() if line.get_label() == "Pareto front")
    assert front.get_xydata().tolist() == [[0.5, 90], [1.0, 96]]
    assert axes.get_xlabel() == "step time, as a multiple of backprop's (×)"
    assert axes.get_ylabel() == "test accuracy (%), higher is better"


def test_the_gradients_plot_shows_how_the_angle_shrinks_with_k():
    """An engine with iterations is a line, any other a level; backprop, without any angle, is left out."""
    gate = Row("dsf gate", "dsf", {"feedback": "gate"})
    more = Row("highway_bp k=3", "highway_bp", {"iterations": 3})
    part = replace(SUITE[0], rows=(PLAIN, CHAIN, gate, HIGHWAY, more))
    cosines = [1.0, 1.0, 0.5, 0.75, 0.875]
    records = dict(r for row, cosine in zip(part.rows, cosines, strict=True) for r in trained(row, [97], [96], cosine))
    (section,) = sections((part,), records)
    axes = drawn(section, "gradients against iterations")
    lines = {line.get_label(): line.get_xydata().tolist() for line in axes.get_lines()}
    assert lines.pop("highway_bp with k iterations") == [[1, 0.25], [3, 0.125]]
    assert {label: {y for _, y in points} for label, points in lines.items()} == {"dsf gate": {0.5}}
    assert axes.get_yscale() == "log"


def test_without_several_k_gradients_are_drawn_by_engine():
    """Against iterations there would be an axis with nothing on it."""
    part = replace(SUITE[0], rows=(PLAIN, Row("dsf gate", "dsf", {"feedback": "gate"}), HIGHWAY))
    records = dict(r for row, c in zip(part.rows, [1.0, 0.5, 0.75], strict=True) for r in trained(row, [97], [96], c))
    (section,) = sections((part,), records)
    assert [title.partition(": ")[2] for title in section.plots()] == ["gradients by engine"]
    axes = drawn(section, "gradients by engine")
    assert [container.lines[0].get_xydata().tolist() for container in axes.containers] == [[[0, 0.5]], [[1, 0.25]]]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["dsf gate", "highway_bp k=1"]
    assert axes.get_yscale() == "log"


@pytest.mark.parametrize(("cosine", "drawn_at_all"), [(1 - 1e-14, False), (1 + 1e-12, False), (0.999, True)])
def test_rounding_is_not_drawn_as_a_distance(cosine, drawn_at_all):
    """Whatever the row is called: what is exact but for rounding is no distance from the exact gradient."""
    part = replace(SUITE[0], rows=(PLAIN, CHAIN, Row("dfa", "dfa", {})))
    records = dict(r for row, c in zip(part.rows, [1.0, 0.5, cosine], strict=True) for r in trained(row, [97], [96], c))
    (section,) = sections((part,), records)
    axes = drawn(section, "gradients by engine")
    names = [label.get_text() for label in axes.get_xticklabels()]
    assert names == ["backprop via chain", *["dfa"][: int(drawn_at_all)]]


def test_without_an_inexact_row_there_is_no_plot_of_gradients():
    part = replace(SUITE[0], rows=(PLAIN, CHAIN))
    (section,) = sections((part,), dict(r for row in part.rows for r in trained(row, [97], [96], 1 - 1e-12)))
    assert not section.plots()


def test_an_accuracy_is_drawn_within_its_bounds():
    (section,) = sections(SUITE, RECORDS)
    low, high = drawn(section, "accuracy against step time").get_ylim()
    # But for room for a marker at the bound: the interval itself goes on to 114.84.
    assert 0 <= low < 100 < high < 104


def test_errors_that_are_far_apart_are_drawn_on_a_logarithmic_axis():
    """Intervals that go below 0 end with the axis, and hide no other row."""
    task = replace(TASK, score=PYDOC.score)
    rows = dict([*trained(PLAIN, [1] * 3, [0.1, 0.2, 0.3], task=task), *trained(CHAIN, [1] * 3, [1, 2, 60], task=task)])
    costs = {"rows": [rounds(label, 1.0, 1) for label in ("backprop", "backprop via chain", "highway_bp k=1")]}
    (section,) = sections((replace(SUITE[0], task=task),), rows | dict([fake(replace(speed(), task=task), costs)]))
    axes = drawn(section, "perplexity against step time")
    assert axes.get_yscale() == "log"
    assert axes.get_ylim()[0] == pytest.approx(0.1)


def test_without_timing_there_is_no_plot_against_time():
    (section,) = sections(SUITE, dict(TRAININGS))
    assert list(section.plots()) == ["points, 7 steps, cpu: gradients by engine"]


@pytest.mark.parametrize(("count", "shape"), [(1, (2, 1)), (5, (4, 3))])
def test_the_picture_has_all_plots_in_rows(count, shape, tmp_path):
    (section,) = sections(SUITE, RECORDS)
    assert len(section.plots()) == 2
    save_plots([section] * count, tmp_path / "report.png")
    height, width, _ = imread(tmp_path / "report.png").shape
    assert (width, height) == (750 * shape[0], 420 * shape[1])


def test_report_prints_and_writes_what_the_records_say(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(SUITES, "tiny", SUITE)
    file = RecordFile(tmp_path / "records.jsonl")
    for record in dict([*RECORDS.items(), failed(training(CHAIN, seed=3))]).values():
        file.append(record)
    main(["bench", "report", "--suite", "tiny", "--out", str(tmp_path)])
    assert "96.00 ± 2.48" in capsys.readouterr().out
    assert table_rows((tmp_path / "report.md").read_text(encoding="utf-8"))[:3] == FIGURES
    written = {path.suffix: path.stat().st_size for path in tmp_path.glob("report.*")}
    assert written.keys() == {".html", ".md", ".png", ".csv", ".parquet"}
    assert all(written.values())


def test_every_number_is_told_with_its_unit_and_interval():
    (section,) = sections(SUITE, RECORDS)
    facts = {(f.subject, f.quantity, f.unit): (f.value, f.low, f.high, f.seeds) for f in section.facts()}
    label = "highway_bp k=1"
    value, low, high, seeds = facts[label, "test accuracy, difference to backprop", "%"]
    assert (value, seeds) == (-6, 3)
    assert (low, high) == pytest.approx((-28.36, 16.36), abs=0.01)
    assert facts[label, "step time", "s"][:3] == (0.005, 0.0049, 0.0051)
    assert facts[label, "step time", "× backprop"][:3] == (0.5, 0.49, 0.51)
    assert facts[label, "peak memory", "MiB"][0] == 10
    assert facts[label, "peak memory", "× backprop"][0] == 2.5
    assert facts[label, "validation accuracy", "%"][0] == 91
    assert facts[label, "cosine with the exact gradient", "1"][0] == 0.75
    assert facts[label, "on the Pareto front", "1"][0] == 1
    assert facts["backprop via chain", "on the Pareto front", "1"][0] == 0
    assert facts[label, "learning rate", "1"][0] == TASK.learning_rate
    assert facts[label, "failed runs", "1"][0] == 0
