"""Charts of reports are valid Vega-Lite, and a click on the legend filters them."""

import json

import altair as alt
import pytest
import vl_convert
from jsonschema import ValidationError
from places import RESULTS
from report_records import RECORDS, chart, committed, section_of
from tiny_suite import SUITE

from gradfree.benchmarks.reports.drawing import spec, styles


def channels(spec, name):
    """Return the encodings of this name in all layers of a chart."""
    return [layer["encoding"][name] for layer in spec["layer"] if name in layer.get("encoding", {})]


@pytest.mark.slow
def test_charts_are_valid_vega_lite():
    """Checked for one chart of each combination of marks, channels and scales in the committed reports."""
    built = {}
    reports = [committed(path.parent.name) for path in RESULTS.glob("*/records.jsonl")]
    charts = [one for report in reports for section in report.sections for one in section.drawn]
    for one in (spec(one, styles([one])) for one in charts):
        kinds = [channel.get("scale", {}).get("type") for axis in "xy" for channel in channels(one, axis)]
        built.setdefault(str([[(layer["mark"], sorted(layer["encoding"])) for layer in one["layer"]], kinds]), one)
    assert 5 < len(built) < 100
    for one in built.values():
        alt.LayerChart.validate(one)
    with pytest.raises(ValidationError):
        alt.LayerChart.validate(one | {"layer": [{**one["layer"][0], "encoding": {"x": {"field": 1}}}]})


def test_a_click_on_the_legend_filters():
    """Vega has a signal for the legend, which is missing if the filter is bound to a layer without a legend."""
    section = section_of(*SUITE, RECORDS)
    one = chart(section, "accuracy against step time")
    compiled = vl_convert.vegalite_to_vega(json.dumps(spec(one, styles([one]))))
    assert "label_legend" in json.dumps([s for s in compiled["signals"] if s["name"].startswith("shown")])
    assert '"shown_store' in json.dumps(compiled["marks"]).replace("\\", "")
