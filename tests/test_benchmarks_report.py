"""Tables and sentences from records made up so that every figure is known."""

import io
from dataclasses import replace

import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread
from rich.console import Console
from tiny_suite import CHAIN, HIGHWAY, PLAIN, SUITE, TASK, fake, speed, training

from gradfree.benchmarks.case import Row
from gradfree.benchmarks.part import sections
from gradfree.benchmarks.plot import save_plot
from gradfree.benchmarks.records import RecordFile
from gradfree.benchmarks.report import markdown, terminal_table
from gradfree.benchmarks.suites import SUITES
from gradfree.cli import main

MIB = 2**20


def trained(row, validation, test, cosine=1.0, task=TASK, device="cpu"):
    for seed, (v, t) in enumerate(zip(validation, test, strict=True)):
        probes = [{"step": 0, "cosine": cosine, "relative_error": 1 - cosine}]
        results = {"losses": [], "fidelity": probes, "validation": v, "test": t}
        yield fake(training(row, task=task, seed=seed, device=device), results)


def timed(**figures):
    rows = [
        {"label": label, "ratio": ratio, "ratio_quartiles": [ratio - 0.01, ratio + 0.01], "peak_memory": mib * MIB}
        for label, (ratio, mib) in figures.items()
    ]
    return fake(speed(), {"rows": rows})


TRAININGS = [
    *trained(PLAIN, [96, 97, 98], [95, 96, 97]),
    *trained(CHAIN, [96, 97, 97], [96, 96, 96]),
    *trained(HIGHWAY, [90, 91, 92], [80, 90, 100], cosine=0.75),
]
RECORDS = dict([*TRAININGS, timed(backprop=(1.0, 4), chain=(1.25, 5), highway=(0.5, 10))])
FIGURES = [
    ["backprop", "96.00 ± 1.00", "97.00 ± 1.00", "1.00", "4.0", "1.00", "1.000"],
    ["backprop via chain", "96.00 ± 0.00", "96.67 ± 0.58", "1.25", "5.0", "1.25", "1.000"],
    ["highway_bp k=1", "90.00 ± 10.00", "91.00 ± 1.00", "0.50", "10.0", "2.50", "0.750"],
]


def table_rows(text):
    """The cells of a Markdown table, without its head."""
    return [[c.strip() for c in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")][2:]


def test_the_table_has_the_figures():
    text = markdown(list(sections(SUITE, RECORDS)))
    assert table_rows(text) == FIGURES
    assert "points: residual_mlp, 7 steps, seeds: 3, device: cpu, threads: 1" in text


def test_the_terminal_shows_every_figure_in_eighty_columns():
    (summary,) = sections(SUITE, RECORDS)
    console = Console(width=80, file=io.StringIO())
    console.print(terminal_table(summary))
    printed = console.file.getvalue()
    for row in FIGURES:
        assert any(line.split() == " ".join(row).split() for line in printed.splitlines())
    assert "…" not in printed
    assert summary.legend.split()[-1] in printed


def test_the_sentences_follow_from_the_figures():
    (summary,) = sections(SUITE, RECORDS)
    assert list(summary.remarks()) == [
        "Slower than backprop per step: backprop via chain (1.25×).",
        "Faster than backprop per step: highway_bp k=1 (0.50×).",
        "Within one spread of backprop's validation accuracy (97.00 ± 1.00 %), or better: backprop via chain.",
        "Worse than backprop's validation accuracy (97.00 ± 1.00 %) by more than its spread: highway_bp k=1.",
    ]


def test_perplexity_is_better_when_lower():
    from gradfree.benchmarks.tasks import PYDOC

    task = replace(TASK, score=PYDOC.score)
    suite = (replace(SUITE[0], task=task),)
    records = dict(
        [
            *trained(PLAIN, [10, 11, 12], [10, 11, 12], task=task),
            *trained(CHAIN, [12.1, 12.1, 12.1], [9, 9, 9], task=task),
            *trained(HIGHWAY, [9, 9, 9], [12, 12, 12], task=task),
        ]
    )
    (summary,) = sections(suite, records)
    assert list(summary.remarks()) == [
        "Within one spread of backprop's validation perplexity (11.00 ± 1.00 per character), or better: "
        "highway_bp k=1.",
        "Worse than backprop's validation perplexity (11.00 ± 1.00 per character) by more than its spread: "
        "backprop via chain.",
    ]


def test_a_ratio_within_the_noise_is_called_neither_slower_nor_faster():
    records = dict([*TRAININGS, timed(backprop=(1.0, 4), chain=(1.005, 4), highway=(0.995, 4))])
    (summary,) = sections(SUITE, records)
    assert not any("per step" in remark for remark in summary.remarks())


def test_what_was_not_measured_is_shown_as_a_dash():
    text = markdown(list(sections(SUITE, dict(trained(PLAIN, [97], [96])))))
    assert table_rows(text)[0] == ["backprop", "96.00 ± –", "97.00 ± –", "–", "–", "–", "1.000"]
    assert table_rows(text)[1] == ["backprop via chain", "– ± –", "– ± –", "–", "–", "–", "–"]


def test_records_of_another_configuration_do_not_count():
    stale = dict(trained(HIGHWAY, [50, 50, 50], [50, 50, 50], task=replace(TASK, steps=8)))
    assert list(sections(SUITE, RECORDS | stale)) == list(sections(SUITE, RECORDS))
    assert list(sections(SUITE, stale)) == []


def test_devices_are_not_mixed():
    other = dict(trained(PLAIN, [50, 50], [50, 50], device="cuda"))
    cpu, cuda = sections(SUITE, RECORDS | other)
    assert (cpu.device, cpu.rows[0].test.mean) == ("cpu", 96)
    assert (cuda.device, cuda.rows[0].test.mean) == ("cuda", 50)


@pytest.mark.parametrize("records", [RECORDS, dict(TRAININGS), dict(trained(PLAIN, [97], [96]))])
def test_the_plot_is_drawn_from_whatever_there_is(records, tmp_path):
    save_plot(list(sections(SUITE, records)), tmp_path / "report.png")
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")


def test_the_lower_plot_shows_how_the_angle_shrinks_with_k():
    """An engine with iterations is a line, any other a level; backprop, without any angle, is left out."""
    gate = Row("dsf gate", "dsf", {"feedback": "gate"})
    more = Row("highway_bp k=3", "highway_bp", {"iterations": 3})
    part = replace(SUITE[0], rows=(PLAIN, CHAIN, gate, HIGHWAY, more))
    cosines = [1.0, 1.0, 0.5, 0.75, 0.875]
    records = dict(r for row, cosine in zip(part.rows, cosines, strict=True) for r in trained(row, [97], [96], cosine))
    (section,) = sections((part,), records)
    top, bottom = Figure().subplots(2)
    section.draw(top, bottom)
    lines = {line.get_label(): line.get_xydata().tolist() for line in bottom.get_lines()}
    assert lines == {"dsf gate": [[0, 0.5], [1, 0.5]], "highway_bp with k iterations": [[1, 0.25], [3, 0.125]]}
    assert bottom.get_yscale() == "log"


@pytest.mark.parametrize(("count", "shape"), [(1, (6, 8)), (4, (24, 8)), (5, (24, 16)), (8, (24, 16))])
def test_many_sections_are_drawn_in_rows(count, shape, tmp_path):
    (section,) = sections(SUITE, RECORDS)
    save_plot([section] * count, tmp_path / "report.png")
    height, width, _ = imread(tmp_path / "report.png").shape
    assert (width, height) == tuple(120 * inches for inches in shape)


def test_report_prints_and_writes_what_the_records_say(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(SUITES, "tiny", SUITE)
    file = RecordFile(tmp_path / "records.jsonl")
    for record in RECORDS.values():
        file.append(record)
    main(["bench", "report", "--suite", "tiny", "--out", str(tmp_path)])
    assert "97.00 ± 1.00" in capsys.readouterr().out
    assert table_rows((tmp_path / "report.md").read_text(encoding="utf-8")) == FIGURES
    assert (tmp_path / "report.png").exists()
