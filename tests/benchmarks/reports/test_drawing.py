"""What all plots of a report keep: a look for each label, names and units on axes, nothing on top of anything else."""

import re
from collections import defaultdict
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from places import RESULTS
from report_records import drawn, rounds, trained
from tiny_suite import PLAIN, SUITE, fake, speed

from gradfree.benchmarks.records.case import Row
from gradfree.benchmarks.records.records import RecordFile
from gradfree.benchmarks.reports.report import Report
from gradfree.benchmarks.suites.index import SUITES
from gradfree.benchmarks.tables.drawing import Styles
from gradfree.benchmarks.tables.experiment import sections

WITHOUT_UNIT = {
    "engine",
    "strategy",
    "row",
    "cosine with the true gradient",
    "1 − cosine of the gradient and the exact one",
}
SWEEPS = tuple(
    Row(f"{engine} k={k}", engine, {"iterations": k}) for engine in ("highway_bp", "fixed_point") for k in (0, 1)
)


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


@pytest.mark.slow
def test_every_axis_has_a_name_and_its_unit(published):
    for name, title, axes in published:
        for label in (axes.get_xlabel(), axes.get_ylabel()):
            assert re.search(r"\(.+\)", label) or label in WITHOUT_UNIT, (name, title, label)


@pytest.mark.slow
def test_no_legend_hides_what_is_drawn(published):
    for name, title, axes in published:
        if legend := axes.get_legend():
            FigureCanvasAgg(axes.figure).draw()
            assert not legend.get_window_extent().overlaps(axes.get_window_extent()), (name, title)


@pytest.mark.slow
def test_plots_of_a_report_differ_in_title(published):
    titles = [(name, title) for name, title, _ in published]
    assert len(set(titles)) == len(titles)


def test_the_names_of_points_at_the_same_place_lie_apart():
    """And tell by color whose they are: two engines, as fast and as good as each other at each k."""
    part = replace(SUITE[0], rows=(PLAIN, *SWEEPS))
    records = dict(r for row in part.rows for r in trained(row, [97], [90 + row.options.get("iterations", 0)], 0.5))
    costs = {"rows": [rounds(row.label, 1.0 + row.options.get("iterations", 0), 1) for row in part.rows]}
    (section,) = sections((part,), records | dict([fake(replace(speed(), rows=part.rows), costs)]))
    axes = drawn(section, "accuracy against step time")
    renderer = FigureCanvasAgg(axes.figure).get_renderer()
    assert sorted(text.get_text() for text in axes.texts) == ["k=0", "k=0", "k=1", "k=1"]
    for one, other in combinations(axes.texts, 2):
        assert not one.get_window_extent(renderer).overlaps(other.get_window_extent(renderer))
    assert len({text.get_color() for text in axes.texts}) == 2


def test_engines_that_differ_in_more_than_k_are_lines_of_their_own():
    options = [{"iterations": k, "gamma": gamma} for gamma in (0.0, 0.5) for k in (0, 1)]
    rows = [Row(f"highway_bp k={o['iterations']} gamma={o['gamma']}", "highway_bp", o) for o in options]
    assert [row.series for row in rows] == [
        *["highway_bp gamma=0.0 with k iterations"] * 2,
        *["highway_bp gamma=0.5 with k iterations"] * 2,
    ]
    assert PLAIN.series == "backprop"
