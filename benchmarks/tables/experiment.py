"""The interface of experiments: cases to run, facts computed from their records, and the section that shows them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping

from gradfree.benchmarks.records.case import Case
from gradfree.benchmarks.records.records import Record
from gradfree.benchmarks.tables.frames import pl
from gradfree.benchmarks.tables.section import Section


class Experiment(ABC):
    """One comparison of a suite."""

    def check(self) -> None:
        """Raise a UsageError if something that the cases need is missing."""
        return

    def trials(self, device: str) -> Iterator[Case]:
        """Yield the cases whose results decide the settings of other cases."""
        return iter(())

    def training(self, seed: int, device: str, records: Mapping[str, Record]) -> Iterator[Case | None]:
        """Yield the cases that are repeated for every seed and may run in parallel.

        ``None`` stands for a case whose settings are unknown until ``records`` has all trials.
        """
        return iter(())

    def timing(self, device: str) -> Iterator[Case]:
        """Yield the cases that must run with nothing beside them."""
        return iter(())

    @abstractmethod
    def facts(self, records: Mapping[str, Record], device: str) -> pl.DataFrame:
        """Return the facts in ``records`` about ``device``; an empty table if there are none."""

    @abstractmethod
    def section(self, facts: pl.DataFrame) -> Section:
        """Return the section that shows ``facts``: those of :meth:`facts`, maybe with others added."""


Suite = tuple[Experiment, ...]


def cases(suite: Suite, seeds: int, device: str, records: Mapping[str, Record]) -> Iterator[Case | None]:
    """Yield all cases of ``suite``: trials, then everything seed by seed, then the timings.

    ``None`` stands for a case whose settings are unknown until ``records``, by case id, has all trials.
    """
    for experiment in suite:
        yield from experiment.trials(device)
    for seed in range(seeds):
        for experiment in suite:
            yield from experiment.training(seed, device, records)
    for experiment in suite:
        yield from experiment.timing(device)


def findings(suite: Suite, records: Mapping[str, Record]) -> Iterator[tuple[Experiment, pl.DataFrame]]:
    """Yield each experiment with its facts of each device, if ``records`` has any."""
    for device in devices_of(records):
        for experiment in suite:
            facts = experiment.facts(records, device)
            if not facts.is_empty():
                yield experiment, facts


def devices_of(records: Mapping[str, Record]) -> list[str]:
    """Return the devices of ``records``."""
    return list(dict.fromkeys(record["config"]["device"] for record in records.values()))


def records_of(suite: Suite, records: Mapping[str, Record]) -> list[Record]:
    """Return the records of the suite's cases, for any seed and device."""
    found: dict[str, Record] = {}
    for device in devices_of(records):
        for case in cases(suite, 1, device, records):
            if case is not None:
                found |= {record["case"]: record for record in records_of_case(records, case)}
    return list(found.values())


def records_of_case(records: Mapping[str, Record], case: Case) -> Iterator[Record]:
    """Yield the records of ``case`` for any seed, failed ones included."""
    kind, config = case.kind, case.config
    return (record for record in records.values() if record["kind"] == kind and record["config"] == config)
