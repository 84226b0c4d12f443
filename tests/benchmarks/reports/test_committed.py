"""The committed reports."""

import altair as alt
import pytest
from places import RESULTS
from report_records import committed

from gradfree.benchmarks.reports.drawing import spec, styles

pytestmark = pytest.mark.slow


def kind(chart):
    """Return what decides a chart's marks, channels and scales."""
    columns = tuple((c.name, c.dtype) for c in chart.points if c.null_count() < len(c))
    return chart.x.kind, chart.y.kind, chart.lines, bool(chart.rules), bool(chart.ringed), columns


@pytest.mark.parametrize("name", sorted(path.parent.name for path in RESULTS.glob("*/report.md")))
def test_committed_reports_equal_those_made_now_and_their_charts_are_valid_vega_lite(name):
    """If texts or statistics of reports change, write the reports again with `gradfree bench report`."""
    report = committed(name)
    assert report.markdown() == (RESULTS / name / "report.md").read_text(encoding="utf-8")
    for chart in {kind(chart): chart for section in report.sections for chart in section.drawn}.values():
        alt.LayerChart.validate(spec(chart, styles([chart])))
