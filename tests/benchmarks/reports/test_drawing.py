"""Charts of reports: one color a label, units on axes, tooltips, valid Vega-Lite."""

import json
import re

import altair as alt
import pytest
import vl_convert
from jsonschema import ValidationError
from places import RESULTS
from report_records import RECORDS, chart, committed
from tiny_suite import SUITE

from gradfree.benchmarks.reports.drawing import spec, styles
from gradfree.benchmarks.reports.report import sections

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
    """Every chart of the committed reports: suite, title and specification."""
    found = []
    for name in sorted(path.parent.name for path in RESULTS.glob("*/records.jsonl")):
        charts = committed(name).charts
        known = styles(charts)
        found += [(name, chart.title, spec(chart, known)) for chart in charts]
    return found


def drawn(chart):
    """Return the specification of a single chart."""
    return spec(chart, styles([chart]))


def channels(spec, name):
    """Return the encodings of this name in all layers of a chart."""
    return [layer["encoding"][name] for layer in spec["layer"] if name in layer.get("encoding", {})]


@pytest.mark.slow
def test_charts_are_valid_vega_lite(published):
    """Checked for one chart of each combination of marks, channels and scales."""
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
def test_axes_have_units_and_points_have_tooltips(published):
    for name, title, one in published:
        for axis in ("x", "y"):
            for label in {c["title"] for c in channels(one, axis) if "title" in c and c["type"] != "nominal"}:
                assert re.search(r"\(.+\)", label) or label in WITHOUT_UNIT, (name, title, label)
        assert any("tooltip" in layer["encoding"] for layer in one["layer"]), (name, title)


def test_a_click_on_the_legend_filters():
    """Vega has a signal for the legend, which is missing if the filter is bound to a layer without a legend."""
    (section,) = sections(SUITE, RECORDS)
    compiled = vl_convert.vegalite_to_vega(json.dumps(drawn(chart(section, "accuracy against step time"))))
    assert "label_legend" in json.dumps([s for s in compiled["signals"] if s["name"].startswith("shown")])
    assert '"shown_store' in json.dumps(compiled["marks"]).replace("\\", "")
