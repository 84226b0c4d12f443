"""The report as one HTML page and as files for other programs."""

import re
from html import unescape

from report_records import RECORDS
from tiny_suite import SUITE

from gradfree.benchmarks.reports.publication import page
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
