"""The environments of a report's records, with a warning if they differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gradfree.benchmarks.records.records import Record
from gradfree.wording import count

_PER_SECTION = "device"
"""Each section has one device, so several devices are no reason for a warning."""


@dataclass(frozen=True)
class Provenance:
    """The environments of some records."""

    records: Sequence[Record]

    def lines(self) -> Iterator[str]:
        """Yield one line for each environment: its number of records, their dates, and a description."""
        environments = Counter(tuple(described(record).items()) for record in self.records)
        for environment, made in environments.items():
            days = [r["timestamp"][:10] for r in self.records if tuple(described(r).items()) == environment]
            when = " to ".join(dict.fromkeys([min(days), max(days)]))
            yield f"{count(made, 'record')}, {when}: {', '.join(f'{name} {value}' for name, value in environment)}"

    def warnings(self) -> Iterator[str]:
        """Yield a warning for each difference between the environments."""
        environments = [described(record) for record in self.records]
        for name in dict.fromkeys(name for environment in environments for name in environment):
            values = Counter(environment.get(name, "unknown") for environment in environments)
            if len(values) > 1 and name != _PER_SECTION:
                shares = ", ".join(f"{value} ({count(made, 'record')})" for value, made in values.items())
                yield f"The records mix environments, {name}: {shares}."


def described(record: Record) -> dict[str, str]:
    """Return the environment of a record as text, with commit and uncommitted changes in one entry."""
    environment = dict(record["environment"])
    commit, dirty = environment.pop("commit", None), environment.pop("dirty", None)
    if commit is not None:
        environment["commit"] = commit[:7] + (" with uncommitted changes" if dirty else "")
    return {name: str(value) for name, value in environment.items()}
