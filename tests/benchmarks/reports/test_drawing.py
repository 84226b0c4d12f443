"""Charts of reports are valid Vega-Lite."""

import altair as alt
import polars as pl
import pytest
from jsonschema import ValidationError
from places import RESULTS
from report_records import committed

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


@pytest.mark.slow
def test_charts_are_valid_vega_lite():
    """Checked for one chart of each combination of marks, channels and scales in the committed reports."""
    built = {}
    reports = [committed(path.parent.name) for path in RESULTS.glob("*/records.jsonl")]
    charts = [one for report in reports for section in report.sections for one in section.drawn]
    for one in (spec(one, styles([one])) for one in charts):
        encodings = [layer.get("encoding", {}) for layer in one["layer"]]
        kinds = [e[axis].get("scale", {}).get("type") for axis in "xy" for e in encodings if axis in e]
        built.setdefault(str([[(layer["mark"], sorted(layer["encoding"])) for layer in one["layer"]], kinds]), one)
    assert 5 < len(built) < 100
    for one in built.values():
        alt.LayerChart.validate(one)
    with pytest.raises(ValidationError):
        alt.LayerChart.validate(one | {"layer": [{**one["layer"][0], "encoding": {"x": {"field": 1}}}]})
