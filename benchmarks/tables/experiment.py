"""An experiment of a suite: what is compared, its cases, the facts that their records tell, and its section."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Mapping
from typing import TypeAlias

from gradfree.benchmarks.records.case import Case
from gradfree.benchmarks.records.records import Record, error_of
from gradfree.benchmarks.tables.frames import pl
from gradfree.benchmarks.tables.section import Section


class Experiment(ABC):
    """One comparison."""

    @property
    def tries(self) -> int:
        """How many trials each training case waits for: the first case for the first so many, and so on."""
        return 0

    def check(self) -> None:
        """Raise a UsageError if something that the cases need is not there."""
        return

    def trials(self, device: str) -> Iterator[Case]:
        """Yield the cases that settings of others are chosen by."""
        return iter(())

    def training(self, seed: int, device: str, records: Mapping[str, Record]) -> Iterator[Case | None]:
        """Yield the cases that are repeated for every seed and may run side by side.

        ``None`` stands for one that is not settled before ``records`` has all trials.
        """
        return iter(())

    def timing(self, device: str) -> Iterator[Case]:
        """Yield the cases that must run alone."""
        return iter(())

    @abstractmethod
    def facts(self, records: Mapping[str, Record], device: str) -> pl.DataFrame:
        """Return what ``records`` tell of ``device``; an empty table if they tell nothing."""

    @abstractmethod
    def section(self, facts: pl.DataFrame) -> Section:
        """Return how these facts are shown, which are all of :meth:`facts` and some."""


Suite = tuple[Experiment, ...]
Finding: TypeAlias = "tuple[Experiment, pl.DataFrame]"
"""An experiment and its facts of one device."""


def cases(suite: Suite, seeds: int, device: str, records: Mapping[str, Record]) -> Iterator[Case | None]:
    """Yield all cases of ``suite``: trials, then everything seed by seed, then the timings.

    ``None`` stands for a case that is not settled before ``records``, by case id, has all trials.
    """
    return (case for _, case in grouped_cases(suite, seeds, device, records))


def grouped_cases(
    suite: Suite, seeds: int, device: str, records: Mapping[str, Record]
) -> Iterator[tuple[Hashable, Case | None]]:
    """Yield all cases as :func:`cases` does, each after its group: those that must see each other's records."""
    for p, experiment in enumerate(suite):
        for n, case in enumerate(experiment.trials(device)):
            yield (p, n // experiment.tries), case
    for seed in range(seeds):
        for p, experiment in enumerate(suite):
            for n, awaited in enumerate(experiment.training(seed, device, records)):
                yield (p, n) if experiment.tries else (p, n, seed), awaited
    for p, experiment in enumerate(suite):
        for n, case in enumerate(experiment.timing(device)):
            yield (p, n, "timing"), case


def findings(suite: Suite, records: Mapping[str, Record]) -> Iterator[Finding]:
    """Yield what ``records``, those of this configuration, tell of each device and experiment, if anything."""
    for device in devices_of(records):
        for experiment in suite:
            facts = experiment.facts(records, device)
            if not facts.is_empty():
                yield experiment, facts


def devices_of(records: Mapping[str, Record]) -> list[str]:
    """Return the devices that records are of."""
    return list(dict.fromkeys(record["config"]["device"] for record in records.values()))


def belonging(suite: Suite, records: Mapping[str, Record]) -> list[Record]:
    """Return those of ``records`` that are of this configuration, with whatever seed, on whatever device."""
    found: dict[str, Record] = {}
    for device in devices_of(records):
        for case in cases(suite, 1, device, records):
            if case is not None:
                found |= {record["case"]: record for record in outcomes(records, case)}
    return list(found.values())


def outcomes(records: Mapping[str, Record], case: Case) -> Iterator[Record]:
    """Yield the records of ``case`` for any seed, whether it failed or not."""
    kind, config = case.kind, case.config
    return (record for record in records.values() if record["kind"] == kind and record["config"] == config)


def matching(records: Mapping[str, Record], case: Case) -> Iterator[Record]:
    """Yield the records of ``case`` for any seed that has results."""
    return (record for record in outcomes(records, case) if not error_of(record))
