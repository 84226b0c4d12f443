"""Cases that have no results, because they crashed or ran out of memory."""

from __future__ import annotations

from collections.abc import Sequence

from gradfree.benchmarks.records.records import Record, error_of
from gradfree.benchmarks.tables.column import column
from gradfree.benchmarks.tables.facts import fact, table
from gradfree.benchmarks.tables.section import Section

_ERROR = "error"


def failure_section(failed: Sequence[Record]) -> Section:
    """Return the section on cases that failed, and what with."""
    # The digest of a case's id tells people nothing.
    told = [
        fact(
            _ERROR, "", row=record["case"].rpartition("/")[0], device=record["config"]["device"], note=error_of(record)
        )
        for record in failed
    ]
    return Section(
        title="failed cases",
        facts=table(told),
        columns=[column("error", _ERROR)],
        legend="They count as missing everywhere else: no mean and no interval includes them.",
        names={"case": "row"},
    )
