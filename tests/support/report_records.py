"""Made-up records with known figures, and functions that read them from reports."""

from __future__ import annotations

from functools import cache

from places import RESULTS
from tiny_suite import CHAIN, HIGHWAY, PLAIN, TASK, fake, speed, training

from gradfree.benchmarks.records.records import RecordFile
from gradfree.benchmarks.reports.report import SuiteReport
from gradfree.benchmarks.suites.index import SUITES
from gradfree.benchmarks.tables.experiment import findings
from gradfree.benchmarks.tables.facts import select

MIB = 2**20
ENVIRONMENT = {
    "gradfree": "0.1.0",
    "commit": "0123456789",
    "dirty": False,
    "torch": "2.13.0",
    "threads": 1,
    "device": "cpu",
}
TRACEBACK = "Traceback (most recent call last):\n  File ...\nRuntimeError: out of | memory"


def trained(row, validation, test, cosine=1.0, task=TASK, device="cpu"):
    """Yield ids and records of training runs with these scores, one for each seed."""
    for seed, (v, t) in enumerate(zip(validation, test, strict=True)):
        probes = [{"step": 0, "cosine": cosine, "relative_error": 1 - cosine}]
        results = {"losses": [], "fidelity": probes, "validation": v, "test": t}
        yield fake(training(row, task=task, seed=seed, device=device), results)


def failed(case, error=TRACEBACK):
    """Return the id and record of a failed case."""
    name, record = fake(case, {})
    return name, {**record, "error": error}


def rounds(label, ratio, mib):
    """Return a row's costs; the baseline's step takes 10 ms."""
    ratios = ratio, ratio - 0.01, ratio + 0.01
    time, *time_quartiles = (r / 100 for r in ratios)
    return {
        "label": label,
        "time": time,
        "time_quartiles": time_quartiles,
        "ratio": ratio,
        "ratio_quartiles": list(ratios[1:]),
        "peak_memory": mib * MIB,
    }


def timed(backprop, chain, highway):
    """Return the id and record of the costs of all rows, each given by its step time's ratio and its MiB."""
    rows = {"backprop": backprop, "backprop via chain": chain, "highway_bp k=1": highway}
    return fake(speed(), {"rows": [rounds(label, *costs) for label, costs in rows.items()]})


TRAININGS = [
    *trained(PLAIN, [96, 97, 98], [95, 96, 97]),
    *trained(CHAIN, [96, 97, 97], [96, 96, 96]),
    *trained(HIGHWAY, [90, 91, 92], [80, 90, 100], cosine=0.75),
]
RECORDS = dict([*TRAININGS, timed((1.0, 4), (1.25, 5), (0.5, 10))])


@cache
def committed(name):
    """Return the report made now from the committed records of a suite."""
    return SuiteReport.of(name, SUITES[name], RecordFile(RESULTS / name / "records.jsonl").read())


def markdown(*sections):
    return SuiteReport("", sections, []).markdown()


def table_rows(text):
    """Return the cells of a Markdown table, without its head."""
    return [[c.strip() for c in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")][2:]


def section_of(experiment, records):
    """Return the section of an experiment with these records, ``None`` if there are no facts."""
    found = list(findings((experiment,), records))
    return experiment.section(found[0][1]) if found else None


def chart(section, ending):
    """Return the chart whose title ends with ``ending``."""
    (found,) = (chart for chart in section.charts if chart.title.endswith(ending))
    return found


def lines(chart):
    """Return the points of each line by label."""
    found = {}
    for label, x, y in chart.points.select("label", "x", "y").iter_rows():
        found.setdefault(label, []).append([x, y])
    return found


def fact_values(section, **where):
    """Return the value, both ends of the interval, and the number of runs of the only fact with these columns."""
    (row,) = select(section.facts, **where).iter_rows(named=True)
    return row["value"], row["low"], row["high"], row["n"]
