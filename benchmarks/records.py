"""Results on disk: one JSON object a line, added when a case is finished and never changed."""

from __future__ import annotations

import json
import os
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypedDict

from gradfree.benchmarks.case import Case
from gradfree.benchmarks.environment import environment
from gradfree.cli import UsageError

SCHEMA = 1


class Record(TypedDict):
    """A finished case. JSON as Python writes it: numbers may be NaN and Infinity."""

    schema: int
    case: str
    kind: str
    config: dict[str, Any]
    seeds: list[int]
    results: dict[str, Any]
    environment: dict[str, Any]
    timestamp: str


def measure(case: Case) -> Record:
    """Run ``case`` and return its record."""
    results = case.run()
    return Record(
        schema=SCHEMA,
        case=case.id,
        kind=case.kind,
        config=case.config,
        seeds=[case.seed],
        results=results,
        environment=environment(case.device),
        timestamp=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )


class RecordFile:
    """A file of records that survives being killed at any moment: only what was not finished is lost."""

    def __init__(self, path: Path):
        self.path = path

    def read(self) -> dict[str, Record]:
        """Return the records of this schema by case id; an unfinished last line does not count.

        Raises:
            UsageError: a line is no record.
        """
        if not self.path.exists():
            return {}
        *lines, _ = self.path.read_bytes().split(b"\n")
        records: dict[str, Record] = {}
        for number, line in enumerate(lines, 1):
            try:
                record = json.loads(line)
                current = record["schema"] == SCHEMA
            except (ValueError, TypeError, KeyError) as error:
                raise UsageError(f"{self.path}, line {number} is no record: delete the line.") from error
            if current:
                records[record["case"]] = record
        return records

    def append(self, record: Record) -> None:
        """Add ``record`` and wait until the disk has it."""
        line = json.dumps(record).encode() + b"\n"
        self._drop_unfinished_line()
        # One write to a file in append mode: all of the line or, if killed, a line without end.
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(descriptor, line)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _drop_unfinished_line(self) -> None:
        if not self.path.exists():
            return
        content = self.path.read_bytes()
        if not content.endswith(b"\n"):
            os.truncate(self.path, content.rfind(b"\n") + 1)
