"""What the runs of one engine on one task come to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import nan
from statistics import fmean
from typing import Any

from gradfree.benchmarks.records.case import Row
from gradfree.benchmarks.records.records import Record, error_of
from gradfree.benchmarks.tables.estimates import Estimate, Spread
from gradfree.benchmarks.training.training import score_in


@dataclass(frozen=True)
class RowSummary:
    """What is known of one engine on one task; NaN where no record tells.

    Attributes:
        row: the engine.
        learning_rate: that it was trained with.
        validation: score by seed.
        test: score by seed.
        cosine: of its gradients and exact ones, mean over training steps and seeds.
        time: of a step, in seconds.
        ratio: of its step time to the baseline's.
        memory: peak of a step, in bytes.
        errors: what runs failed with, by seed.
    """

    row: Row
    learning_rate: float
    validation: Mapping[int, float]
    test: Mapping[int, float]
    cosine: float
    time: Spread
    ratio: Spread
    memory: float
    errors: Mapping[int, str] = field(default_factory=dict)

    @classmethod
    def of(cls, row: Row, learning_rate: float, runs: Sequence[Record], cost: dict[str, Any] | None) -> RowSummary:
        """Put the records of an engine's training runs, failed ones too, and its costs together."""
        results = {run["seeds"][0]: run["results"] for run in runs if not error_of(run)}
        probes = [probe["cosine"] for result in results.values() for probe in result["fidelity"]]
        return cls(
            row=row,
            learning_rate=learning_rate,
            validation={seed: score_in(result, "validation") for seed, result in results.items()},
            test={seed: score_in(result, "test") for seed, result in results.items()},
            cosine=fmean(probes) if probes else nan,
            time=Spread.recorded(cost, "time") if cost else Spread(),
            ratio=Spread.recorded(cost, "ratio") if cost else Spread(),
            memory=cost["peak_memory"] if cost else nan,
            errors={run["seeds"][0]: error for run in runs if (error := error_of(run))},
        )

    @property
    def label(self) -> str:
        """The engine's, for people."""
        return self.row.label

    @property
    def score(self) -> Estimate:
        """The test score."""
        return Estimate.of(list(self.test.values()))

    @property
    def mebibytes(self) -> float:
        """The peak memory, in MiB."""
        return self.memory / 2**20

    @property
    def failures(self) -> str:
        """What went wrong, in words; nothing if nothing did."""
        if not self.errors:
            return ""
        causes = "; ".join(dict.fromkeys(self.errors.values()))
        return f"failed with {len(self.errors)} of {len(self.errors) + len(self.test)} seeds: {causes}"
