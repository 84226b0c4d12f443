"""Records on disk: one JSON object a line, appended when a case is finished and never changed."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypedDict

from filelock import FileLock, Timeout

from gradfree.benchmarks.records.case import Case
from gradfree.benchmarks.records.environment import environment
from gradfree.cli import UsageError
from gradfree.engines.engine import named_baseline
from gradfree.wording import plain

SCHEMA = 1


class _Finished(TypedDict):
    schema: int
    case: str
    kind: str
    config: dict[str, Any]
    seeds: list[int]
    results: dict[str, Any]
    environment: dict[str, Any]
    timestamp: str


class Record(_Finished, total=False):
    """The record of a finished case. Python's JSON: numbers may be NaN and Infinity.

    A failed case has empty ``results`` and an ``error``, whose last line is the message.
    """

    error: str


def attempt(case: Case) -> Record:
    """Run ``case`` and return its record; if it raises, the record has the traceback."""
    try:
        with named_baseline():
            results = case.run()
    except Exception:
        return failure(case, traceback.format_exc().strip())
    return record_of(case.id, case.kind, case.config, [case.seed], results, case.device)


def failure(case: Case, error: str) -> Record:
    """Return the record of a failed case."""
    return Record(**record_of(case.id, case.kind, case.config, [case.seed], {}, case.device), error=error)


def record_of(
    name: str, kind: str, config: dict[str, Any], seeds: list[int], results: dict[str, Any], device: str
) -> Record:
    """Return a record with the current environment and time."""
    return Record(
        schema=SCHEMA,
        case=name,
        kind=kind,
        config=config,
        seeds=seeds,
        results=results,
        environment=environment(device),
        timestamp=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )


class RecordFile:
    """A file of records. If the process is killed at any moment, only unfinished cases are lost.

    Args:
        path: the file, for example ``records.jsonl``.
    """

    def __init__(self, path: Path):
        self.path = path

    def read(self) -> dict[str, Record]:
        """Return the records by case id; an incomplete last line is ignored.

        If a case has several records, the last one that did not fail counts.

        Raises:
            UsageError: a line is not a record, or another gradfree's.
        """
        records: dict[str, Record] = {}
        for record in _read(self.path):
            if "error" not in record or "error" in records.get(record["case"], record):
                records[record["case"]] = record
        return records

    @contextmanager
    def reserved(self) -> Iterator[None]:
        """Lock the file against other processes.

        Raises:
            UsageError: another process has locked it.
        """
        with ExitStack() as stack:
            # Some cluster file systems do not support locks.
            with suppress(NotImplementedError):
                try:
                    stack.enter_context(FileLock(self.path.with_name(f".{self.path.name}.lock"), timeout=0))
                except Timeout:
                    raise UsageError(
                        f"another run is writing to {self.path}. Wait for it, or choose another folder with --out."
                    ) from None
                except OSError as error:
                    raise UsageError(
                        f"cannot write to {self.path.parent}: {error.strerror}. Choose another folder with --out."
                    ) from error
            yield

    def append(self, record: Record) -> None:
        """Append ``record`` and wait until it is on disk.

        Raises:
            UsageError: it cannot be written, for example because the disk is full; the file keeps the earlier records.
        """
        try:
            content = self.path.read_bytes() if self.path.exists() else b""
            if content and not content.endswith(b"\n"):
                # The last line was never finished.
                os.truncate(self.path, content.rfind(b"\n") + 1)
            with self.path.open("ab") as file:
                file.write(json.dumps(record).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise UsageError(
                f"{self.path} cannot be written: {error.strerror}. It has all cases that were finished before "
                f"{record['case']!r}. Solve the problem, then run the same command again for the rest."
            ) from error


def _read(path: Path) -> Iterator[Record]:
    """Yield the records in ``path``; none if the file does not exist."""
    if not path.exists():
        return
    try:
        *lines, _ = path.read_bytes().split(b"\n")
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.") from error
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            whole = isinstance(record["case"], str) and isinstance(record["results"], dict)
            known = whole and record["schema"] == SCHEMA
        except (ValueError, TypeError, KeyError):
            known = False
        if not known:
            raise UsageError(
                f"{path}, line {number} is not a record that this gradfree can read: use the one that wrote it, delete "
                "the line, or choose another folder with --out."
            )
        yield record


def error_of(record: Record) -> str:
    """Return the last line of a record's error; empty if the case did not fail."""
    lines = plain(str(record.get("error") or "")).strip().splitlines()
    return lines[-1] if lines else ""
