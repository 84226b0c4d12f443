"""Where the records of a report come from, and a warning where that is not one place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gradfree.benchmarks.records.records import Record
from gradfree.wording import count

_PER_SECTION = "device"
"""Sections never mix these."""


@dataclass(frozen=True)
class Provenance:
    """The environments of some records."""

    records: Sequence[Record]

    def lines(self) -> Iterator[str]:
        """Yield one line an environment: how many records it made, when, and what it is."""
        environments = Counter(tuple(described(record).items()) for record in self.records)
        for environment, made in environments.items():
            days = [r["timestamp"][:10] for r in self.records if tuple(described(r).items()) == environment]
            when = " to ".join(dict.fromkeys([min(days), max(days)]))
            yield f"{count(made, 'record')}, {when}: {', '.join(f'{name} {value}' for name, value in environment)}"

    def warnings(self) -> Iterator[str]:
        """Yield in what the environments differ."""
        environments = [described(record) for record in self.records]
        for name in dict.fromkeys(name for environment in environments for name in environment):
            values = Counter(environment.get(name, "unknown") for environment in environments)
            if len(values) > 1 and name != _PER_SECTION:
                shares = ", ".join(f"{value} ({count(made, 'record')})" for value, made in values.items())
                yield f"The records mix environments, {name}: {shares}."


def described(record: Record) -> dict[str, str]:
    """Return the environment of a record for people, commit and state of the checkout in one."""
    environment = dict(record["environment"])
    commit, dirty = environment.pop("commit", None), environment.pop("dirty", None)
    if commit is not None:
        environment["commit"] = commit[:7] + (" with uncommitted changes" if dirty else "")
    return {name: str(value) for name, value in environment.items()}
