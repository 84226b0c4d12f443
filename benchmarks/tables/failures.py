"""Cases that have no results, because they crashed or ran out of memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gradfree.benchmarks.records.records import Record, error_of
from gradfree.benchmarks.tables.section import Section


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
