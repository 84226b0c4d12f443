"""Charts as they are drawn."""

from dataclasses import replace

import altair as alt
import polars as pl
import pytest
from jsonschema import ValidationError

from gradfree.benchmarks.reports.drawing import spec, styles
from gradfree.benchmarks.tables.chart import Axis, Chart


def chart(labels, kind="linear"):
    frame = pl.DataFrame({"label": labels, "row": labels}).with_columns(
        pl.lit(1.0).alias("x"), pl.lit(2.0).alias("y"), pl.lit(None, pl.String).alias("setting")
    )
    ends = [pl.lit(None, pl.Float64).alias(f"{axis}_{end}") for axis in "xy" for end in ("low", "high")]
    return Chart(
        "accuracy of many rows against the time of a step",
        frame.with_columns(ends),
        Axis("time (s)", kind),
        Axis("loss"),
    )


def test_no_two_labels_of_a_report_look_the_same():
    drawn = styles([chart([f"row {n}" for n in range(40)])])
    assert len(set(drawn.values())) == len(drawn) == 40


def test_an_axis_says_that_its_scale_is_logarithmic():
    for kind, title in (("linear", "time (s)"), ("log", "time (s), log scale")):
        one = chart(["a", "b"], kind)
        assert {layer["encoding"]["x"]["title"] for layer in spec(one, styles([one]))["layer"]} == {title}


def test_lines_of_titles_have_room_on_a_phone():
    one = chart(["a", "b"])
    assert max(map(len, spec(one, styles([one]))["title"]["text"])) <= 40


def test_points_of_one_line_are_labelled_with_their_iterations():
    one = chart(["highway_bp with k iterations"] * 2 + ["autograd"])
    rows = pl.Series(["highway_bp k=0", "highway_bp k=4", "autograd"])
    frame = one.points.with_columns(row=rows, k=pl.Series([0, 4, None]))
    drawn = spec(replace(one, points=frame), styles([one]))
    (layer,) = (layer for layer in drawn["layer"] if layer["mark"]["type"] == "text")
    assert [point["text"] for point in drawn["datasets"][layer["data"]["name"]]] == ["k=0", "k=4"]
    alt.LayerChart.validate(drawn)


def test_a_chart_of_single_runs_says_that_each_seed_has_a_line():
    one = chart(["a"])
    runs = replace(one, points=one.points.with_columns(line=pl.lit("a, seed 0")))
    assert spec(one, styles([one]))["title"]["subtitle"] == ""
    assert spec(runs, styles([one]))["title"]["subtitle"] == "one line for each seed"


def test_an_invalid_chart_is_found():
    one = chart(["a", "b"])
    drawn = spec(one, styles([one]))
    alt.LayerChart.validate(drawn)
    with pytest.raises(ValidationError):
        alt.LayerChart.validate(drawn | {"layer": [{**drawn["layer"][0], "encoding": {"x": {"field": 1}}}]})
