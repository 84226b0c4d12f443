"""Engines that solve chains in time to a tolerance, both passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from gradfree.chains.report import Report
from gradfree.chains.site import Site
from gradfree.convergence.outcome import finest_tolerance, tolerance_for
from gradfree.engines.engine import Engine
from gradfree.engines.options import check_count, check_number


@dataclass(frozen=True, kw_only=True)
class ToleranceEngine(Engine):
    """An engine that sweeps until a tolerance, outputs and cotangents alike, or gives up for the sequential call.

    Args:
        tolerance: the largest mismatch, relative to the largest state or cotangent. ``None``: 1e-12 in float64, 1e-5 in
            float32, eight times what any other dtype resolves.
        max_sweeps: the most sweeps; ``None``: the engine's own choice.

    Raises:
        TypeError: no number.
        ValueError: a tolerance that no dtype resolves, or of 1 and more; too few sweeps.
    """

    tolerance: float | None = None
    max_sweeps: int | None = None

    def __post_init__(self) -> None:
        name, finest = type(self).__name__, finest_tolerance(torch.float64)
        if self.max_sweeps is not None:
            check_count(self, "max_sweeps", self.min_sweeps)
        if self.tolerance is None:
            return
        check_number(self, "tolerance", "a number or None")
        if not finest <= self.tolerance < 1.0:
            raise ValueError(
                f"{name}: tolerance must be below 1 and at least {finest:.0e}, what float64 resolves, not "
                f"{self.tolerance}."
            )

    @classmethod
    def exact_ones(cls) -> Sequence[Engine]:
        """Return the engine with its own tolerance for each precision."""
        return (cls(),)

    @property
    def min_sweeps(self) -> int:
        """The fewest that it can be limited to."""
        return 1

    @property
    def gate_remedy(self) -> str:
        """What a gate is needed for and what to do without, as a refusal ends; nothing if none is needed."""
        return ""

    def solves(self, kind: type[Site]) -> bool:
        """Return whether ``kind`` is one of chains in time."""
        return kind.dimension == "time" and super().solves(kind)

    def outputs_within(self, dtype: torch.dtype) -> float:
        """Return the tolerance."""
        return tolerance_for(self.tolerance, dtype)

    def judge(self, model: nn.Module, report: Report) -> Report:
        """Return ``report`` with the chains whose precision is below the tolerance, or that lack a gate."""
        found = super().judge(model, report)
        problems = list(found.problems)
        for path, site in report.chains.items():
            dtypes = {p.dtype for block in site.blocks.values() for p in block.parameters() if p.is_floating_point()}
            coarse = max(dtypes, key=finest_tolerance, default=torch.float64)
            if self.tolerance is not None and self.tolerance < finest_tolerance(coarse):
                problems.append(
                    f"{path!r} has weights of {coarse}, which resolves {finest_tolerance(coarse):.0e} at best, not the "
                    f"tolerance of {self.tolerance:.0e}. Leave tolerance out, or make it larger."
                )
        if self.gate_remedy:
            gateless = (path for path, site in report.chains.items() if not site.has_residual)
            problems += [f"{path!r} has no gate {self.gate_remedy}" for path in gateless]
        return Report(found.chains, problems, found.notes)
