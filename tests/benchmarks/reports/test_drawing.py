"""Charts of reports are valid Vega-Lite."""

import altair as alt
import pytest
from jsonschema import ValidationError
from places import RESULTS
from report_records import committed

from gradfree.benchmarks.reports.drawing import spec, styles


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
