"""Phases of recurrent layers: what is timed, and what becomes of the figures."""

from report_records import markdown, section_of, told

from gradfree.benchmarks.records.case import Row
from gradfree.benchmarks.timing.recurrent_layers import RecurrentLayer
from gradfree.benchmarks.timing.recurrent_phases import PHASES, PhaseTiming, PhaseTimings

ROWS = (Row("backprop", "backprop", {}), Row("highway_bp k=1", "highway_bp", {"iterations": 1}))
PART = PhaseTimings((RecurrentLayer("GRU", 2, 6, 3), RecurrentLayer("GRU", 64, 2, 128)), ROWS, threads=1)


def test_the_phases_add_up_to_the_whole_and_are_those_of_the_engine():
    for case in PART.timing("cpu"):
        results = case.run()
        rows = {row["label"]: row["phases"] for row in results["rows"]}
        assert list(rows) == ["forward without graph", "plain", "backprop", "highway_bp k=1"]
        assert rows["plain"]["total"] == 1.0
        assert results["time"] > 0
        used = {label: {phase for phase in PHASES if rows[label][phase]} for label in rows}
        assert used["plain"] == used["forward without graph"] == set()
        assert used["backprop"] == {"forward", "local derivatives", "δ step by step", "parameter gradients"}
        assert used["highway_bp k=1"] == {"forward", "local derivatives", "scan", "pulls", "parameter gradients"}
        assert all(phases[phase] >= 0 for phases in rows.values() for phase in phases)


def fake(case, total, **phases):
    rows = [{"label": "forward without graph", "phases": dict.fromkeys(["total", *PHASES, "rest"], 0.0)}]
    rows[0]["phases"] |= {"total": 0.25, "rest": 0.25}
    rows += [{"label": "plain", "phases": rows[0]["phases"] | {"total": 1.0, "rest": 1.0}}]
    for row in ROWS:
        given = dict.fromkeys(["total", *PHASES, "rest"], 0.0) | {"total": total} | phases
        rows.append({"label": row.label, "phases": given})
    assert isinstance(case, PhaseTiming)
    return {case.id: {"kind": case.kind, "config": case.config, "results": {"time": 0.1, "rows": rows}}}


def test_the_section_shows_every_phase_and_names_the_largest():
    first, second = PART.timing("cpu")
    records = fake(first, 0.5, forward=0.375, scan=0.125) | fake(second, 0.75, forward=0.25, pulls=0.5)
    section = section_of(PART, records)
    text = markdown(section)
    assert "| GRU (2, 6, 3) | forward without graph | 0.25 | – | – | – | – | – | – | – |" in text
    assert "| GRU (2, 6, 3) | backprop | 0.50 | 0.38 | – | – | 0.12 | – | – | – |" in text
    assert section.remarks == [
        "The largest share is the forward pass for backprop on GRU (2, 6, 3), highway_bp k=1 on GRU (2, 6, 3); "
        "pulls for backprop on GRU (64, 2, 128), highway_bp k=1 on GRU (64, 2, 128)."
    ]
    (alone,) = section_of(PART, fake(first, 0.5, forward=0.375)).remarks
    assert alone == "The largest share is the forward pass for backprop, highway_bp k=1."
    assert told(section, row="backprop", setting="GRU (64, 2, 128)", metric="time of pulls")[0] == 0.5
    assert section_of(PART, {}) is None
