"""What all plots of a report keep: a look for each label, names and units on axes, nothing on top of anything else."""

import re
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from tiny_suite import PLAIN

from gradfree.benchmarks.case import Row
from gradfree.benchmarks.drawing import Styles
from gradfree.benchmarks.records import RecordFile
from gradfree.benchmarks.report import Report
from gradfree.benchmarks.suites import SUITES

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"


@pytest.fixture(scope="module")
def published():
    """Every plot of the committed reports, by suite and title, as a page or a picture has it."""
    found = []
    for name in sorted(path.parent.name for path in RESULTS.glob("*/records.jsonl")):
        report = Report.of(name, SUITES[name], RecordFile(RESULTS / name / "records.jsonl").read())
        styles = Styles()
        for section in report.sections:
            for title, draw in section.plots().items():
                axes = Figure(figsize=(7.5, 4.2), layout="constrained").subplots()
                draw(axes, styles)
                found.append((name, title, axes))
    return found


def looks(axes):
    """Color and marker of each line of the legend."""
    lines = [getattr(handle, "lines", [handle])[0] for handle in axes.get_legend_handles_labels()[0]]
    labels = axes.get_legend_handles_labels()[1]
    found = zip(labels, lines, strict=True)
    return {label: (line.get_color(), line.get_marker()) for label, line in found if hasattr(line, "get_marker")}


@pytest.mark.slow
def test_a_label_looks_the_same_in_all_plots_of_a_report(published):
    """Whatever other rows they have; but for the shades of one engine's steps."""
    found = defaultdict(set)
    for name, _, axes in published:
        for label, look in looks(axes).items():
            found[name, re.sub(", step .*", " by step", label)].add(look if ", step " not in label else look[:1])
    assert {label for _, label in found} > {"backprop", "foton", "highway_bp with k iterations", "truncated w=1"}
    assert {key: seen for key, seen in found.items() if len(seen) > 1} == {}


@pytest.mark.slow
def test_lines_of_a_plot_differ(published):
    """In color too, as long as there are colors."""
    for name, title, axes in published:
        curves = {c.get_label(): looks(axes)[c.get_label()] for c in axes.containers if c.get_label() in looks(axes)}
        assert len(set(curves.values())) == len(curves), (name, title)
        assert len({color for color, _ in curves.values()}) >= min(len(curves), 9), (name, title)


def test_forty_lines_differ_and_neighbours_in_both():
    """Engines of others included: nothing is known of a label but that it is another."""
    styles = Styles()
    found = [tuple(look.values()) for look in styles([f"engine {n}" for n in range(40)]).values()]
    assert len(set(found)) == 40
    assert all(a[0] != b[0] and a[1] != b[1] for a, b in pairwise(found))
    assert len(styles([f"other {n}" for n in range(100)])) == 100


def test_new_lines_do_not_share_a_color_with_those_that_come_back():
    styles = Styles()
    styles([f"first {n}" for n in range(8)])
    known = styles(["first 0", "first 3"])
    later = styles(["new", "first 0", "newer", "first 3", "newest"])
    assert {label: later[label] for label in known} == known
    assert len({look["color"] for look in later.values()}) == 5


def test_engines_that_differ_in_more_than_k_are_lines_of_their_own():
    options = [{"iterations": k, "gamma": gamma} for gamma in (0.0, 0.5) for k in (0, 1)]
    rows = [Row(f"highway_bp k={o['iterations']} gamma={o['gamma']}", "highway_bp", o) for o in options]
    assert [row.series for row in rows] == [
        *["highway_bp gamma=0.0 with k iterations"] * 2,
        *["highway_bp gamma=0.5 with k iterations"] * 2,
    ]
    assert PLAIN.series == "backprop"
