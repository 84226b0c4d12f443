"""Tables and sentences of reports on made-up records with known figures."""

import io
from dataclasses import replace
from math import nan

import pytest
from report_records import RECORDS, TRAININGS, failed, markdown, section_of, table_rows, timed, trained
from rich.console import Console
from tiny_suite import CHAIN, HIGHWAY, SUITE, TASK, training

from gradfree.benchmarks.records.records import RecordFile
from gradfree.benchmarks.reports.publication import publish
from gradfree.benchmarks.reports.report import SuiteReport, print_section
from gradfree.benchmarks.suites.index import SUITES
from gradfree.benchmarks.tables.experiment import records_of
from gradfree.cli import UsageError, main

# Student's t is 4.303 for three seeds: margins are 2.484 times the standard deviation.
FIGURES = [
    ["autograd", "96.00 ± 2.48", "1.00", "0.99–1.01", "4.0", "1.00", "1.000"],
    ["backprop via chain", "96.00 ± 0.00", "1.25", "1.24–1.26", "5.0", "1.25", "1.000"],
    ["highway_bp k=1", "90.00 ± 24.84", "0.50", "0.49–0.51", "10.0", "2.50", "0.750"],
]
WORDS = [
    "autograd: the baseline.",
    "backprop via chain: 1.25× slower than autograd at 1.25× the memory, accuracy +0.00 ± 2.48 (no difference seen).",
    "highway_bp k=1: 2.00× faster than autograd at 2.50× the memory, accuracy -6.00 ± 22.36 (no difference seen).",
    "Pareto front of step time and test accuracy, best score first, with differences seed by seed: "
    "highway_bp k=1 (-6.00).",
]


def printed(section, width=80):
    console = Console(width=width, file=io.StringIO())
    print_section(section, console)
    return console.file.getvalue()


def test_the_table_has_the_figures():
    text = markdown(section_of(*SUITE, RECORDS))
    assert table_rows(text) == FIGURES
    assert "points: residual_mlp, 7 steps, seeds: 3, device: cpu, threads: 1" in text
    sentences = [line[2:] for line in text.splitlines() if line.startswith("- ") and not line.startswith("- **")]
    assert sentences[: len(WORDS)] == WORDS


def test_the_terminal_shows_every_figure_in_eighty_columns():
    summary = section_of(*SUITE, RECORDS)
    text = printed(summary)
    for row in FIGURES:
        assert any(line.split() == " ".join(row).split() for line in text.splitlines())
    assert "…" not in text
    assert summary.legend.split()[-1] in text
    assert " ".join(text.split()).endswith(WORDS[-1])


def test_a_row_that_is_not_seen_to_be_faster_does_not_take_the_baselines_place_on_the_front():
    tied = dict([*TRAININGS, timed((1.0, 4), (1.25, 5), (0.995, 10))])
    (front,) = (text for text in section_of(*SUITE, tied).remarks if text.startswith("Pareto front"))
    assert front.endswith("seed by seed: autograd.")


def test_a_diverged_run_is_shown_as_diverged():
    records = RECORDS | dict(trained(CHAIN, [nan, 97, 97], [nan, 96, 96]))
    summary = section_of(*SUITE, records)
    assert table_rows(markdown(summary))[1][1] == "diverged"
    assert "accuracy not comparable, as a run diverged" in summary.verdicts[1]
    assert summary.remarks == WORDS[3:]


def test_failed_runs_count_as_missing_and_are_listed():
    some = RECORDS | dict([failed(training(CHAIN, seed=1))])
    report = SuiteReport.of("", SUITE, some)
    (summary,) = report.sections
    assert table_rows(markdown(summary))[1][:2] == ["backprop via chain", "96.00 ± –"]
    assert "(Student's t, n = 3), from 3 seeds on: of fewer it is too wide to say anything" in summary.legend
    assert summary.verdicts[1] == (
        "1.25× slower than autograd at 1.25× the memory, accuracy +0.00 (too few seeds to tell); "
        "failed with 1 of 3 seeds: RuntimeError: out of | memory"
    )
    failure = "training/points/backprop via chain/cpu/seed 1 failed and counts as missing"
    assert next(report.warnings) == f"{failure}: RuntimeError: out of | memory."

    whole = RECORDS | dict(failed(training(CHAIN, seed=seed)) for seed in range(3))
    summary = section_of(*SUITE, whole)
    assert table_rows(markdown(summary))[1][:3] == ["backprop via chain", "failed", "1.25"]
    assert "failed with 3 of 3 seeds" in summary.verdicts[1]
    assert "seeds: 3" in summary.title


def test_records_of_another_configuration_are_ignored():
    stale = dict(trained(HIGHWAY, [50, 50, 50], [50, 50, 50], task=replace(TASK, steps=8)))
    stale |= dict([failed(training(HIGHWAY, task=replace(TASK, steps=8), seed=9))])
    whole, own = (SuiteReport.of("", SUITE, records).markdown() for records in (RECORDS | stale, RECORDS))
    assert whole == own
    assert SuiteReport.of("", SUITE, stale).sections == []
    assert records_of(SUITE, RECORDS | stale) == list(RECORDS.values())


def test_the_command_report_prints_and_writes_the_report(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(SUITES, "tiny", SUITE)
    file = RecordFile(tmp_path / "records.jsonl")
    for record in dict([*RECORDS.items(), failed(training(CHAIN, seed=3))]).values():
        file.append(record)
    main(["bench", "report", "--suite", "tiny", "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    assert "96.00 ± 2.48" in printed
    assert "\nReport: " in printed
    assert table_rows((tmp_path / "report.md").read_text(encoding="utf-8"))[:3] == FIGURES
    written = {path.suffix: path.stat().st_size for path in tmp_path.glob("report.*")}
    assert written.keys() == {".html", ".md", ".csv", ".parquet"}
    assert all(written.values())


@pytest.mark.parametrize(
    ("ratio", "answer"),
    [
        (0.5, "highway_bp k=1 is the fastest row with no worse accuracy seen: 2.00× faster than autograd at 2.50× the"),
        (1.5, "no row is faster than autograd with no worse accuracy seen; the nearest is backprop via chain: 1.25×"),
    ],
)
def test_a_report_begins_with_the_answer(ratio, answer):
    """On the terminal and in Markdown."""
    costs = timed((1.0, 4), (1.25, 5), (ratio, 10))
    records = dict([*TRAININGS, costs, *trained(HIGHWAY, [90, 91, 92], [94, 95, 98], 0.75)])
    report, console = SuiteReport.of("", SUITE, records), Console(width=500, file=io.StringIO())
    report.print(console)
    for text in (console.file.getvalue(), report.markdown().removeprefix("- **")):
        assert text.startswith(f"points, 7 steps: {answer}")


def test_fewer_than_three_seeds_say_nothing_about_the_score():
    """Neither in the answer, nor in the table, the words and the chart."""
    records = {name: record for name, record in RECORDS.items() if record["seeds"] != [2]}
    section = section_of(*SUITE, records)
    assert section.answer == (
        "points, 7 steps: too few seeds to tell whether a row keeps autograd's accuracy; the fastest is highway_bp "
        "k=1: 2.00× faster than autograd at 2.50× the memory, accuracy -10.50 (too few seeds to tell)."
    )
    assert [row[1].partition(" ")[2] for row in table_rows(markdown(section))[:3]] == ["± –"] * 3
    assert section.charts[0].points["y_low"].drop_nulls().is_empty()


@pytest.mark.parametrize("scores", [[50, 51, 52], [50, 70, 98]], ids=["worse", "maybe much worse"])
def test_a_faster_row_with_a_worse_score_is_not_the_answer(scores):
    """Also if the difference is insignificant only because its interval is wide."""
    section = section_of(*SUITE, RECORDS | dict(trained(HIGHWAY, [1, 1, 1], scores, cosine=0.75)))
    assert "the nearest is backprop via chain" in section.answer


def test_a_report_that_cannot_be_written_is_an_error(tmp_path):
    with pytest.raises(UsageError, match=r"cannot write the report to .*: No such file or dir.*\. Records are kept"):
        publish(SuiteReport.of("tiny", SUITE, RECORDS), tmp_path / "nowhere")


def test_error_messages_are_escaped_for_terminal_and_markdown():
    """Tried with escape sequences of a colored message, a bell, and Markdown's special characters."""
    spoilt = "ValueError: \x1b[31mred\x1b[0m \x07<b>bold</b> | `code` *star* [a](b) __x__ k_1"
    records = RECORDS | dict([failed(training(CHAIN, seed=3), spoilt)])
    report = SuiteReport.of("", SUITE, records)
    console = Console(file=io.StringIO(), width=300)
    report.print(console)
    plain = "ValueError: red <b>bold</b> | `code` *star* [a](b) __x__ k_1"
    printed = console.file.getvalue()
    assert plain in printed
    assert not {"\x1b", "\x07"} & {*printed, *"".join(report.facts["note"].drop_nulls())}
    escaped = r"ValueError: red \<b>bold\</b> \| \`code\` \*star\* \[a](b) \_\_x\_\_ k_1"
    assert report.markdown().count(escaped) == 3
