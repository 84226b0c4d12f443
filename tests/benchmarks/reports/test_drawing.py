"""What all charts of a report keep: a look for each label, names and units on axes, all that is known of a point."""

import json
import re
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import altair as alt
import pytest
import vl_convert
from jsonschema import ValidationError
from places import RESULTS
from report_records import RECORDS, chart, committed
from tiny_suite import PLAIN, SUITE

from gradfree.benchmarks.records.case import Row
from gradfree.benchmarks.reports.drawing import Look, Looks, spec
from gradfree.benchmarks.reports.report import sections
from gradfree.benchmarks.tables.chart import Axis, Chart, points
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
}


@pytest.fixture(scope="module")
def published():
    """Every chart of the committed reports, by suite and title, as a page has it."""
    found = []
    for name in sorted(path.parent.name for path in RESULTS.glob("*/records.jsonl")):
        looks = Looks()
        charts = [chart for section in committed(name).sections for chart in section.charts]
        found += [(name, chart.title, spec(chart, looks)) for chart in charts]
    return found


def channels(drawn, name):
    """Each encoding of this name in the layers of a chart."""
    return [layer["encoding"][name] for layer in drawn["layer"] if name in layer.get("encoding", {})]


def colors(drawn):
    """The color of each label."""
    scales = [channel["scale"] for channel in channels(drawn, "color") if "scale" in channel]
    return dict(pair for scale in scales for pair in zip(scale["domain"], scale["range"], strict=True))


def tips(drawn):
    """What is shown where the pointer rests on a point, by heading."""
    (layer,) = (one for one in drawn["layer"] if one["mark"]["type"] == "point" and "tooltip" in one["encoding"])
    rows = drawn["datasets"][layer["data"]["name"]]
    return [{tip["title"]: row[tip["field"]] for tip in layer["encoding"]["tooltip"]} for row in rows]


@pytest.mark.slow
def test_a_label_looks_the_same_in_all_charts_of_a_report(published):
    """Whatever other rows they have; but for the shades of one engine's steps, and the pieces of a whole."""
    found = defaultdict(set)
    for name, _, drawn in published:
        stacked = any(layer["mark"]["type"] == "bar" for layer in drawn["layer"])
        for label, color in colors(drawn).items():
            if ", step " not in label and " k=" not in label and not stacked:
                found[name, label].add(color)
    assert {label for _, label in found} > {"backprop", "foton", "highway_bp with k iterations", "truncated w=1"}
    assert {key: seen for key, seen in found.items() if len(seen) > 1} == {}


@pytest.mark.slow
def test_charts_are_what_vega_lite_takes(published):
    """One of each build: which marks there are, with which channels, and how their axes lie."""
    built = {}
    for *_, drawn in published:
        kinds = [channel.get("scale", {}).get("type") for axis in "xy" for channel in channels(drawn, axis)]
        built.setdefault(str([[(one["mark"], sorted(one["encoding"])) for one in drawn["layer"]], kinds]), drawn)
    assert 20 < len(built) < 100
    for drawn in built.values():
        alt.LayerChart.validate(drawn)
    with pytest.raises(ValidationError):
        alt.LayerChart.validate(drawn | {"layer": [{**drawn["layer"][0], "encoding": {"x": {"field": 1}}}]})


@pytest.mark.slow
def test_every_axis_has_a_name_and_its_unit(published):
    for name, title, drawn in published:
        for axis in ("x", "y"):
            for label in {channel["title"] for channel in channels(drawn, axis)}:
                assert re.search(r"\(.+\)", label) or label in WITHOUT_UNIT, (name, title, label)


@pytest.mark.slow
def test_charts_of_a_report_differ_in_title(published):
    titles = [(name, title) for name, title, _ in published]
    assert len(set(titles)) == len(titles)


@pytest.mark.slow
def test_every_chart_answers_to_the_pointer(published):
    for name, title, drawn in published:
        assert any("tooltip" in layer["encoding"] for layer in drawn["layer"]), (name, title)


def test_a_click_on_the_legend_filters():
    """It does if Vega listens to the legend, which it does not where the filter is bound to a layer without one."""
    (section,) = sections(SUITE, RECORDS)
    compiled = vl_convert.vegalite_to_vega(json.dumps(spec(chart(section, "accuracy against step time"), Looks())))
    assert "label_legend" in json.dumps([s for s in compiled["signals"] if s["name"].startswith("shown")])
    assert '"shown_store' in json.dumps(compiled["marks"]).replace("\\", "")


def test_lines_differ_and_neighbours_in_color_and_shape():
    """Engines of others included: nothing is known of a label but that it is another."""
    looks = Looks()
    found = list(looks([f"engine {n}" for n in range(40)]).values())
    assert len(set(found)) == 40
    assert all(a.color != b.color and a.shape != b.shape for a, b in pairwise(found))
    assert len(looks([f"other {n}" for n in range(100)])) == 100


def test_new_lines_do_not_share_a_color_with_those_that_come_back():
    looks = Looks()
    looks([f"first {n}" for n in range(8)])
    known = looks(["first 0", "first 3"])
    later = looks(["new", "first 0", "newer", "first 3", "newest"])
    assert {label: later[label] for label in known} == known
    assert len({look.color for look in later.values()}) == 5


def test_a_point_tells_all_that_is_known_of_it_with_units():
    (section,) = sections(SUITE, RECORDS)
    *_, highway = tips(spec(chart(section, "accuracy against step time"), Looks()))
    assert highway["row"] == "highway_bp k=1"
    assert highway["step time (× backprop)"] == "0.5 (quartiles: 0.49 to 0.51)"
    assert highway["test accuracy (%)"] == "90 (95 % CI: 65.16 to 114.8)"
    assert highway["peak memory (MiB)"] == "10"


def test_an_accuracy_is_drawn_within_its_bounds():
    (section,) = sections(SUITE, RECORDS)
    drawn = spec(chart(section, "accuracy against step time"), Looks())
    low, high = channels(drawn, "y")[0]["scale"]["domain"]
    # But for room for a marker at the bound: the interval itself goes on to 114.84.
    assert 0 <= low < 100 < high < 104


def errors(*values):
    """A chart of errors, of which each may be off by 50."""
    facts = table(
        fact(
            "error",
            "%",
            Estimate(value, value - 50, value + 50, 3),
            row=f"engine {n}",
            series=f"engine {n}",
            at=n + 1.0,
        )
        for n, value in enumerate(values)
    )
    return Chart(
        "errors", points(facts, "at", Figure("error")), Axis("size (count)", "counts"), Axis("error (%)", "log")
    )


def test_intervals_that_go_below_0_end_with_a_logarithmic_axis():
    """And hide no other row."""
    drawn = spec(errors(0.2, 20.0), Looks())
    y = channels(drawn, "y")[0]["scale"]
    assert (y["type"], y["domain"][0]) == ("log", pytest.approx(0.1))
    lows = [row["y_low"] for rows in drawn["datasets"].values() for row in rows if "y_low" in row]
    assert min(lows) == pytest.approx(0.1)


@pytest.mark.parametrize("across", [0.5, 5000.0])
def test_a_line_across_the_chart_is_within_it(across):
    """Also where all points lie on one side of it: outside of the frame nobody could read it."""
    drawn = spec(replace(errors(200.0, 300.0), rules={"the border": across}), Looks())
    low, high = channels(drawn, "y")[0]["scale"]["domain"]
    assert low < across < high


def test_counts_have_a_tick_each_and_equal_ratios_equal_distances():
    x = channels(spec(errors(1.0, 2.0, 3.0), Looks()), "x")[0]
    assert (x["axis"]["values"], x["scale"]["type"], x["scale"]["base"]) == ([1, 2, 3], "log", 2)


def test_lines_with_intervals_at_the_same_place_stand_a_little_aside():
    facts = table(
        fact("score", "%", Estimate(5.0, 4.0, 6.0, 3), row=row, series=row, setting=str(at), at=at)
        for row in ("a", "b")
        for at in (1.0, 4.0)
    )
    drawn = spec(
        Chart("", points(facts, "at", Figure("score")), Axis("n (count)", "counts"), Axis("score (%)")), Looks()
    )
    (found,) = {json.dumps([row["x"] for row in rows]) for rows in drawn["datasets"].values()}
    one, other = json.loads(found)[0], json.loads(found)[2]
    assert 1 < other / one < 1.05
    assert one * other == pytest.approx(1.0)


def test_k_is_written_beside_the_ends_of_each_line_on_a_side_of_its_own():
    """Two engines, as fast and as good as each other at each k."""
    rows = [Row(f"{e} k={k}", e, {"iterations": k}) for e in ("highway_bp", "fixed_point") for k in (0, 1, 2)]
    facts = table(
        told
        for row in rows
        for told in (
            fact("time", "s", 1.0 + row.iterations, row=row.label, series=row.series, k=row.iterations),
            fact("score", "%", 90.0 + row.iterations, row=row.label, series=row.series, k=row.iterations),
        )
    )
    found = points(facts, Figure("time"), Figure("score"))
    drawn = spec(Chart("", found, Axis("time (s)"), Axis("score (%)"), "faint"), Looks())
    texts = [layer for layer in drawn["layer"] if layer["mark"]["type"] == "text"]
    assert [[row["text"] for row in drawn["datasets"][layer["data"]["name"]]] for layer in texts] == [
        ["k=0", "k=2"]
    ] * 2
    assert len({layer["mark"]["align"] for layer in texts}) == 2


def test_engines_that_differ_in_more_than_k_are_lines_of_their_own():
    options = [{"iterations": k, "gamma": gamma} for gamma in (0.0, 0.5) for k in (0, 1)]
    rows = [Row(f"highway_bp k={o['iterations']} gamma={o['gamma']}", "highway_bp", o) for o in options]
    assert [row.series for row in rows] == [
        *["highway_bp gamma=0.0 with k iterations"] * 2,
        *["highway_bp gamma=0.5 with k iterations"] * 2,
    ]
    assert PLAIN.series == "backprop"


def test_rows_of_one_series_have_shades_of_its_color():
    """From pale to the color itself, k by k."""
    own = Look("#0072b2", "circle")
    assert own.faded(1.0) == own
    assert own.faded(0.0).color == "#b8b8b8"
    assert own.faded(0.5).color == "#5c95b5"
