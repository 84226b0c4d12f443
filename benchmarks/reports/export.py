"""A report's numbers as files for other programs."""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import csv, parquet

from gradfree.benchmarks.tables.section import Section

_SCHEMA = pa.schema(
    {
        **dict.fromkeys(("section", "subject", "setting", "quantity", "unit"), pa.string()),
        **dict.fromkeys(("value", "low", "high"), pa.float64()),
        "seeds": pa.int64(),
    }
)


def export(sections: Sequence[Section], csv_path: Path, parquet_path: Path) -> None:
    """Write one row a number: the title of its section and the attributes of its Fact, NaN as null."""
    rows = [
        {"section": section.title, **{name: _known(value) for name, value in fact._asdict().items()}}
        for section in sections
        for fact in section.facts()
    ]
    table = pa.Table.from_pylist(rows, schema=_SCHEMA)
    csv.write_csv(table, csv_path)
    parquet.write_table(table, parquet_path)


def _known(value: Any) -> Any:
    return None if isinstance(value, float) and isnan(value) else value
