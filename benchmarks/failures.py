"""Cases that have no results, because they crashed or ran out of memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gradfree.benchmarks.records import Record
from gradfree.benchmarks.section import Section


def error_of(record: Record) -> str:
    """Return in a line what a case failed with, nothing if it did not fail."""
    lines = str(record.get("error") or "").strip().splitlines()
    return lines[-1] if lines else ""


@dataclass(frozen=True)
class FailureSection(Section):
    """Failed cases and what they failed with."""

    records: Sequence[Record]

    title = "failed cases"
    legend = "They count as missing everywhere else: no mean and no interval includes them."

    def cells(self) -> Iterator[list[str]]:
        """Yield the table's head and one row a case."""
        yield ["case", "error"]
        for record in self.records:
            # The digest tells people nothing.
            yield [record["case"].rpartition("/")[0], error_of(record)]
