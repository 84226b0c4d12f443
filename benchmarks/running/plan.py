"""What a run is to do: which cases, for which seeds and devices, and which share of them."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass

from gradfree.benchmarks.records.case import Case
from gradfree.benchmarks.records.records import Record
from gradfree.benchmarks.tables.experiment import Suite, grouped_cases
from gradfree.cli import UsageError


@dataclass(frozen=True)
class Shard:
    """One share of the cases, of several equal ones.

    Attributes:
        number: which, from 1.
        count: of all shares.
    """

    number: int = 1
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Read ``"1/4"``.

        Raises:
            UsageError: ``text`` is none of the shares.
        """
        numbers = re.fullmatch(r"(\d+)/(\d+)", text)
        shard = cls(*map(int, numbers.groups())) if numbers else cls(0, 0)
        if not 1 <= shard.number <= shard.count:
            raise UsageError(f"--shard counts from 1: 1/4, 2/4, 3/4 and 4/4, say, not {text}.")
        return shard

    def __str__(self) -> str:
        """Return what file names have."""
        return f"{self.number}-of-{self.count}" if self.count > 1 else ""


@dataclass(frozen=True)
class Plan:
    """The cases of a run.

    Attributes:
        suite: the comparisons.
        seeds: training runs of each.
        devices: where.
        shard: the share to run.
    """

    suite: Suite
    seeds: int
    devices: tuple[str, ...]
    shard: Shard = Shard()

    def cases(self, records: Mapping[str, Record]) -> Iterator[Case | None]:
        """Yield the shard's cases; ``None`` for one that is not settled before ``records`` has all trials.

        Whatever waits for trials is on the same shard as they are: no shard needs the others' records.
        """
        numbers: dict[Hashable, int] = {}
        for device in self.devices:
            for group, case in grouped_cases(self.suite, self.seeds, device, records):
                number = numbers.setdefault((device, group), len(numbers))
                if number % self.shard.count == self.shard.number - 1:
                    yield case
