"""What all charts of a report keep: a look for each label, names and units on axes, room for every marker."""

import json
import re
from collections import defaultdict
from dataclasses import replace

import altair as alt
import pytest
import vl_convert
from jsonschema import ValidationError
from places import RESULTS
from report_records import RECORDS, chart, committed
from tiny_suite import PLAIN, SUITE

from gradfree.benchmarks.records.case import Row
from gradfree.benchmarks.reports.drawing import COLORS, SHAPES, looks, spec
from gradfree.benchmarks.reports.report import sections
from gradfree.benchmarks.tables.chart import Axis, Chart, bars, points
from gradfree.benchmarks.tables.column import Figure
from gradfree.benchmarks.tables.facts import Estimate, fact, table

WITHOUT_UNIT = {
    "engine",
    "strategy",
    "row",
    "cosine with the true gradient",
    "1 − cosine of the gradient and the exact one",
    "1 − cosine of the cotangents",
    "cosine with the exact gradient",
    "cosine of δ with backpropagation's",
    "cosine of feedback weights with the layers' own",
}


@pytest.fixture(scope="module")
def published():
    """Every chart of the committed reports, by suite and title, as a page has it."""
    found = []
    for name in sorted(path.parent.name for path in RESULTS.glob("*/records.jsonl")):
        charts = committed(name).charts
        known = looks(charts)
        found += [(name, chart.title, spec(chart, known)) for chart in charts]
    return found


def drawn(chart):
    """A chart by itself, as a page has it."""
    return spec(chart, looks([chart]))


def channels(spec, name):
    """Each encoding of this name in the layers of a chart."""
    return [layer["encoding"][name] for layer in spec["layer"] if name in layer.get("encoding", {})]


def colors(spec):
    """The color of each label."""
    scales = [channel["scale"] for channel in channels(spec, "color") if "scale" in channel]
    return dict(pair for scale in scales for pair in zip(scale["domain"], scale["range"], strict=True))


@pytest.mark.slow
def test_a_label_looks_the_same_in_all_charts_of_a_report(published):
    """Whatever other rows they have."""
    found = defaultdict(set)
    for name, _, one in published:
        for label, color in colors(one).items():
            found[name, label].add(color)
    assert {label for _, label in found} > {"backprop", "foton", "highway_bp with k iterations", "truncated w=1"}
    assert {key: seen for key, seen in found.items() if len(seen) > 1} == {}


@pytest.mark.slow
def test_charts_are_what_vega_lite_takes(published):
    """One of each build: which marks there are, with which channels, and how their axes lie."""
    built = {}
    for *_, one in published:
        kinds = [channel.get("scale", {}).get("type") for axis in "xy" for channel in channels(one, axis)]
        built.setdefault(str([[(layer["mark"], sorted(layer["encoding"])) for layer in one["layer"]], kinds]), one)
    assert 5 < len(built) < 100
    for one in built.values():
        alt.LayerChart.validate(one)
    with pytest.raises(ValidationError):
        alt.LayerChart.validate(one | {"layer": [{**one["layer"][0], "encoding": {"x": {"field": 1}}}]})


@pytest.mark.slow
def test_every_axis_has_a_name_and_its_unit_and_every_point_a_tooltip(published):
    for name, title, one in published:
        for axis in ("x", "y"):
            for label in {c["title"] for c in channels(one, axis) if "title" in c and c["type"] != "nominal"}:
                assert re.search(r"\(.+\)", label) or label in WITHOUT_UNIT, (name, title, label)
        assert any("tooltip" in layer["encoding"] for layer in one["layer"]), (name, title)


@pytest.mark.slow
def test_charts_of_a_report_differ_in_title(published):
    titles = [(name, title) for name, title, _ in published]
    assert len(set(titles)) == len(titles)


def test_a_click_on_the_legend_filters():
    """It does if Vega listens to the legend, which it does not where the filter is bound to a layer without one."""
    (section,) = sections(SUITE, RECORDS)
    compiled = vl_convert.vegalite_to_vega(json.dumps(drawn(chart(section, "accuracy against step time"))))
    assert "label_legend" in json.dumps([s for s in compiled["signals"] if s["name"].startswith("shown")])
    assert '"shown_store' in json.dumps(compiled["marks"]).replace("\\", "")


def test_lines_differ_in_color_or_shape():
    labels = [f"engine {n}" for n in range(len(COLORS) * len(SHAPES))]
    facts = table(fact("time", "s", 1.0, row=label, series=label) for label in labels)
    found = looks([Chart("", bars(facts, Figure("time"), "row"), Axis("time (s)"), Axis("engine", "names"))])
    assert len(set(found.values())) == len(labels)


def test_an_accuracys_interval_is_drawn_within_its_bounds():
    """The interval itself goes on to 114.84."""
    (section,) = sections(SUITE, RECORDS)
    spec = drawn(chart(section, "accuracy against step time"))
    highs = [row["y_high"] for rows in spec["datasets"].values() for row in rows if row.get("y_high")]
    assert max(highs) == 100


def errors(*values):
    """A chart of errors, of which each may be off by 50."""
    facts = table(
        fact("error", "%", Estimate(v, v - 50, v + 50, 3), row=f"engine {n}", series=f"engine {n}", at=n + 1.0)
        for n, v in enumerate(values)
    )
    found = points(facts, "at", Figure("error"))
    return Chart("errors", found, Axis("size (count)", "counts"), Axis("error (%)", "log"))


def test_intervals_that_go_below_0_end_with_a_logarithmic_axis():
    """And hide no other row."""
    spec = drawn(errors(0.2, 20.0))
    assert channels(spec, "y")[-1]["scale"]["type"] == "log"
    lows = [row["y_low"] for rows in spec["datasets"].values() for row in rows if "y_low" in row]
    assert min(lows) == pytest.approx(0.1)


@pytest.mark.parametrize("across", [0.5, 5000.0])
def test_a_line_across_the_chart_and_every_marker_lie_within_it(across):
    """Also where all points lie on one side of it: outside of the frame nobody could read it."""
    spec = drawn(replace(errors(200.0, 300.0), rules={"the border": across}))
    compiled = vl_convert.vegalite_to_vega(json.dumps(spec))
    (scale,) = [scale for scale in compiled["scales"] if scale["name"] == "y"]
    assert {"data": "data_0", "field": "y"} in scale["domain"]["fields"] or len(scale["domain"]["fields"]) > 2
    assert scale["padding"] >= 10


def test_counts_have_a_tick_each_and_equal_ratios_equal_distances():
    x = channels(drawn(errors(1.0, 2.0, 3.0)), "x")[-1]
    assert (x["axis"]["values"], x["scale"]["type"]) == ([1, 2, 3], "log")


def test_engines_that_differ_in_more_than_k_are_lines_of_their_own():
    options = [{"iterations": k, "gamma": gamma} for gamma in (0.0, 0.5) for k in (0, 1)]
    rows = [Row(f"highway_bp k={o['iterations']} gamma={o['gamma']}", "highway_bp", o) for o in options]
    assert [row.series for row in rows] == [
        *["highway_bp gamma=0.0 with k iterations"] * 2,
        *["highway_bp gamma=0.5 with k iterations"] * 2,
    ]
    assert PLAIN.series == "autograd"
