"""The report as one HTML page and as files for other programs."""

import re
from html import unescape

import polars as pl
from report_records import RECORDS
from tiny_suite import SUITE

from gradfree.benchmarks.reports.publication import page, publish
from gradfree.benchmarks.reports.report import SuiteReport, texts


def report(records=RECORDS):
    return SuiteReport.of("tiny & small", SUITE, records)


def test_the_page_is_self_contained():
    text = page(report())
    assert text.startswith("<!DOCTYPE html>")
    assert "<h1>tiny &amp; small</h1>" in text
    before, _, scripts = text.partition("<script>")
    assert not re.search(r"<(link|iframe|object|img)\b|@import|url\(", before)
    assert set(re.findall(r'href="(.)', before)) <= {"#"}
    assert set(re.findall(r'href="#([^"]+)"', before)) <= set(re.findall(r'id="([^"]+)"', text))
    assert "vegaEmbed" in scripts
    assert "<noscript>" in text


def test_the_page_has_every_figure_and_verdict():
    (summary,) = report().sections
    rows = [[*row, words] for row, words in zip(texts(summary), summary.verdicts, strict=True)]
    cells = re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", page(report()).partition("<script>")[0], re.DOTALL)
    expected = [cell for row in ([*summary.head, "in words"], *rows) for cell in row]
    assert [unescape(re.sub("<[^>]+>", "", cell)).strip() for cell in cells] == expected


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
