"""Figures of README and docs are written from records, and a check finds outdated ones."""

import json
import re
from collections import Counter

import pytest
from figures import FigureError, Figures, changes, declarations, written
from places import RESULTS

from gradfree.benchmarks.records.records import RecordFile

DECLARED = declarations()
LAYERS = {"suite": "long-sequences", "section": "recurrent layers, 256", "setting": "GRU (1, 16384, 64)"}
TIME = {"metric": "time of forward and backward", "unit": "× plain"}


@pytest.mark.parametrize(
    ("row", "more", "shown"),
    [
        ("shooting", {}, r"3\d× faster"),
        ("plain", {}, "baseline"),
        ("plain", {"unit": "s", "show": "{value:.0f} ms", "scale": 1e3}, r"\d{4} ms"),
        ("shooting", {"metric": "peak memory", "show": "times"}, r"0\.9×"),
        ("backprop", {"setting": "LSTM (1, 4096, 64)"}, r"4\.\d× slower"),
        ("shooting", {"setting": "LSTM (1, 16384, 128)"}, "no difference seen"),
    ],
)
def test_ratios_are_shown_as_factors(row, more, shown):
    found = Figures({"figure": {"x": {**LAYERS, **TIME, "row": row, **more}}}).of("figure", "x")
    assert re.fullmatch(shown, found)


@pytest.mark.parametrize(
    "text",
    [
        "<!-- figure: nothing -->1<!-- end -->",
        "<!-- figure: vague -->1<!-- end -->",
        "<!-- figure: long-gru -->1",
        "<!-- figure: long-gru -->1 <!-- figure: long-gru -->1<!-- end -->",
        "<!-- table: long-gru -->1<!-- end -->",
        "<!-- figure: long-gru -->1<!-- end -->",
        "<!-- records: nothing -->1<!-- end -->",
    ],
)
def test_markers_that_do_not_name_one_fact_are_refused(text):
    figures = Figures({"figure": {"vague": {**LAYERS, **TIME}, "long-gru": DECLARED["figure"]["long-gru"]}})
    with pytest.raises(FigureError, match="page"):
        written(text, figures, "page")


@pytest.mark.parametrize(
    ("rows", "column", "missing"),
    [(["plain", "none"], {}, "none"), (["plain", "shooting"], {"metric": "none", "heading": "speed"}, "speed")],
)
def test_a_row_or_column_without_a_record_is_refused(rows, column, missing):
    known = {"heading": "time"}
    declared = {"heading": "engine", "where": {**LAYERS, **TIME}, "by": "row", "rows": {name: name for name in rows}}
    figures = Figures({"table": {"found": {**declared, "columns": [known, {**known, **column}]}}})
    with pytest.raises(FigureError, match=rf"\[table.found\]: no record for '{missing}'"):
        figures.of("table", "found")


def test_an_empty_figure_is_refused(monkeypatch):
    monkeypatch.setattr("figures.shown", lambda known, declared: "– faster")
    with pytest.raises(FigureError, match=r"\[figure.long-gru\]: its record has no value: – faster"):
        Figures(DECLARED).of("figure", "long-gru")


def test_outdated_pages_are_found(tmp_path):
    figures = Figures({"figure": {"long-gru": DECLARED["figure"]["long-gru"]}})
    page = tmp_path / "README.md"
    text = "<!-- figure: long-gru -->1<!-- end --> <!-- records: page --><!-- end -->"
    page.write_text(text, encoding="utf-8")
    ((found, new),) = changes(figures, tmp_path)
    assert (found, new) == (page, written(text, figures, "README.md"))
    page.write_text(new, encoding="utf-8")
    assert not list(changes(figures, tmp_path))


@pytest.mark.parametrize("marker", ["<!-- figure: long-gru -->", "<!-- table: found -->", "<!-- chart: bars -->"])
def test_a_page_says_which_versions_made_its_records(marker, tmp_path):
    records = list(RecordFile(RESULTS / "long-sequences" / "records.jsonl").read().values())
    for record in records[:5]:
        record["environment"]["gradfree"] = "0.1.0"
    (tmp_path / "long-sequences").mkdir()
    text = "".join(json.dumps(record) + "\n" for record in records)
    (tmp_path / "long-sequences" / "records.jsonl").write_text(text, encoding="utf-8")
    figures = Figures(
        {
            "figure": {"long-gru": DECLARED["figure"]["long-gru"]},
            "table": {"found": {"head": ["layer", "speed"], "cells": [["GRU", "{long-gru}"]]}},
            "chart": {"bars": {"title": "{long-gru}", "baseline": "torch", "bars": {"GRU": "long-gru"}}},
        },
        tmp_path,
    )
    text = written(f"{marker}<!-- end --> <!-- records: page --><!-- end -->", figures, "docs/page.md")
    versions = Counter(record["environment"]["gradfree"] for record in records)
    said = text.partition("<!-- records: page -->")[2]
    assert said.startswith("`long-sequences` gradfree 0.1.0 (5 records at ")
    assert Counter({v: int(n) for v, n in re.findall(r"([\d.rc]+) \((\d+) records", said)}) == versions
