"""The report as one HTML page and as files for other programs."""

import csv
from base64 import b64decode
from html.parser import HTMLParser
from math import isnan
from xml.etree import ElementTree

from pyarrow import parquet
from report_records import RECORDS, drawn, failed
from tiny_suite import CHAIN, SUITE, training

from gradfree.benchmarks.reports.export import export
from gradfree.benchmarks.reports.page import page
from gradfree.benchmarks.reports.report import Report
from gradfree.benchmarks.tables.drawing import Styles
from gradfree.benchmarks.tables.plot import svg

VOID = {"meta", "img", "br", "hr", "link"}
SCRIPT = "RuntimeError: <script>alert('&')</script>"


class Page(HTMLParser):
    """Checks that every tag is closed in its turn; collects cells, pictures and addresses."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.cells, self.addresses, self.ids = [], [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.tags.append(tag)
        self.ids += [attrs["id"]] if "id" in attrs else []
        self.addresses += [attrs[name] for name in ("src", "href") if name in attrs]
        assert tag != "img" or attrs["alt"]
        if tag not in VOID:
            self.open.append(tag)
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("td", "th"):
            self.cells[-1] += data


def report(records=RECORDS):
    return Report.of("tiny & small", SUITE, records)


def test_the_page_is_whole_and_needs_nothing_from_elsewhere():
    text = page(report())
    found = Page(text)
    assert text.startswith("<!DOCTYPE html>")
    assert "<h1>tiny &amp; small</h1>" in text
    assert not {"script", "link", "iframe", "object"} & set(found.tags)
    assert all(address.startswith(("#", "data:image/svg+xml;base64,")) for address in found.addresses)
    assert {address[1:] for address in found.addresses if address.startswith("#")} <= set(found.ids)
    assert "@import" not in text
    assert "url(" not in text


def test_the_page_has_every_figure_and_verdict():
    summary, *_ = report().sections
    head, *rows = summary.cells()
    expected = [[*head, "in words"], *([*row, words] for row, words in zip(rows, summary.verdicts(), strict=True))]
    assert Page(page(report())).cells == [cell for row in expected for cell in row]


def test_the_page_has_every_plot():
    summary, *_ = report().sections
    pictures = [a.partition(",")[2] for a in Page(page(report())).addresses if a.startswith("data:")]
    styles = Styles()
    assert [b64decode(picture) for picture in pictures] == [svg(*plot, styles) for plot in summary.plots().items()]
    for picture in pictures:
        root = ElementTree.fromstring(b64decode(picture))
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        # Letters are drawn: no font of the reader's machine matters.
        assert not list(root.iter("{http://www.w3.org/2000/svg}text"))


def test_both_axes_of_every_plot_have_names():
    summary, *_ = report().sections
    for title in summary.plots():
        axes = drawn(summary, title)
        assert axes.get_xlabel()
        assert axes.get_ylabel()


def test_errors_are_shown_and_cannot_change_the_page():
    text = page(report(RECORDS | dict([failed(training(CHAIN, seed=3), SCRIPT)])))
    assert "<script>" not in text
    assert SCRIPT in Page(text).cells


def test_the_page_warns_of_mixed_environments():
    records = {name: {**record, "environment": {**record["environment"]}} for name, record in RECORDS.items()}
    next(iter(records.values()))["environment"]["torch"] = "<2.6>"
    assert '<p class="warning">' not in page(report())
    assert '<p class="warning">The records mix environments, torch: &lt;2.6&gt; (1 records), unknown' in page(
        report(records)
    )


def test_csv_and_parquet_have_every_number(tmp_path):
    found = report().sections
    export(found, tmp_path / "report.csv", tmp_path / "report.parquet")
    facts = [{"section": section.title, **fact._asdict()} for section in found for fact in section.facts()]
    expected = [{k: None if isinstance(v, float) and isnan(v) else v for k, v in fact.items()} for fact in facts]
    assert len(expected) == 33
    assert parquet.read_table(tmp_path / "report.parquet").to_pylist() == expected
    with (tmp_path / "report.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    as_text = {"value": float, "low": float, "high": float, "seeds": int}
    read = [{k: (as_text.get(k, str)(v) if v or k not in as_text else None) for k, v in row.items()} for row in rows]
    assert read == expected
