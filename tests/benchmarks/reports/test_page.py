"""The report as one HTML page and as files for other programs."""

from html.parser import HTMLParser

import polars as pl
from report_records import RECORDS
from tiny_suite import SUITE

from gradfree.benchmarks.reports.publication import page, publish
from gradfree.benchmarks.reports.report import SuiteReport, texts

VOID = {"meta", "img", "br", "hr", "link"}


class Page(HTMLParser):
    """Checks that tags are nested correctly; collects cells, figures, addresses and scripts."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.cells, self.addresses, self.ids, self.scripts = [], [], [], [], [], []
        self.values, self.charts = [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.tags.append(tag)
        self.ids += [attrs["id"]] if "id" in attrs else []
        self.addresses += [attrs[name] for name in ("src", "href") if name in attrs]
        self.charts += [attrs["data-chart"]] if "data-chart" in attrs else []
        if tag not in VOID:
            self.open.append(tag)
        if tag in ("td", "th"):
            self.cells.append("")
            self.values += [attrs.get("data-value")] if tag == "td" else []
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "td" in self.open or "th" in self.open:
            self.cells[-1] += data
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data


def report(records=RECORDS):
    return SuiteReport.of("tiny & small", SUITE, records)


def test_the_page_is_valid_and_self_contained():
    text = page(report())
    found = Page(text)
    assert text.startswith("<!DOCTYPE html>")
    assert "<h1>tiny &amp; small</h1>" in text
    assert not {"link", "iframe", "object", "img"} & set(found.tags)
    assert all(address.startswith("#") for address in found.addresses)
    assert {address[1:] for address in found.addresses} <= set(found.ids)
    assert "@import" not in text.partition("<script>")[0]
    assert "url(" not in text.partition("<script>")[0]
    # It includes the drawing scripts, and has a message for browsers without scripts.
    assert any("vegaEmbed" in script for script in found.scripts)
    assert "noscript" in found.tags


def test_the_page_has_every_figure_and_verdict():
    (summary,) = report().sections
    expected = [
        [*summary.head, "in words"],
        *([*row, words] for row, words in zip(texts(summary), summary.verdicts, strict=True)),
    ]
    assert Page(page(report())).cells == [cell for row in expected for cell in row]


def test_csv_and_parquet_have_every_number(tmp_path):
    publish(report(), tmp_path)
    facts = report().facts
    assert facts["section"].unique().to_list() == [section.title for section in report().sections]
    # Each row has 9 facts of single runs, 3 means, 4 costs, a difference, a rate, failures and the front; one row has
    # defaults; model, optimizer, batch size and rate are common to all.
    assert len(facts) == 3 * 20 + 1 + 4
    assert pl.read_parquet(tmp_path / "report.parquet").equals(facts)
    read, kept = pl.read_csv(tmp_path / "report.csv", schema=facts.schema), ("row", "seed", "value", "low", "high", "n")
    assert read.select(kept).equals(facts.select(kept))
