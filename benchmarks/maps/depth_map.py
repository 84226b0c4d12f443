"""The map of depth: engines' share of backpropagation's time over a net's depth, width and batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from math import log
from typing import Any, ClassVar

import polars as pl

from gradfree.benchmarks.maps.deep_steps import BY_BLOCK, COMPILED, GRAPHED, PLAIN, DeepNet, DeepStep
from gradfree.benchmarks.records.case import Case
from gradfree.benchmarks.tables import verdict
from gradfree.benchmarks.tables.chart import Axis, Chart, points
from gradfree.benchmarks.tables.column import Column, Figure, column
from gradfree.benchmarks.tables.estimates import Estimate
from gradfree.benchmarks.tables.facts import Fact, estimates, fact
from gradfree.benchmarks.tables.section import Section
from gradfree.benchmarks.timing.side_by_side import MEMORY, Timings, times

_COSINE = "cosine with the exact gradient"
_SHARE = times(PLAIN)
_BESIDE = COMPILED, BY_BLOCK, GRAPHED
"""What backpropagation is, where it is not plain."""


@dataclass(frozen=True)
class DepthMap(Timings[DeepNet]):
    """Engines on deep nets.

    Attributes:
        title: what the nets are, for people.
        compiled_up_to: the most blocks of nets that are compiled, too.
    """

    metric: ClassVar[str] = "time of forward and backward"
    title: str = "deep nets"
    compiled_up_to: int = 0

    def case(self, net: DeepNet, /, **where: Any) -> DeepStep:
        """Return the case that times a net."""
        return DeepStep(net=net, compiled=net.depth <= self.compiled_up_to, **where)

    def where(self, case: Case) -> dict[str, Any]:
        """Return the net, and its depth."""
        return {"setting": case.topic, "at": float(case.about.depth)}

    def cost(self, cost: Mapping[str, Any], results: Mapping[str, Any]) -> Iterator[Fact]:
        """Yield what a row takes, and how close its gradients are."""
        yield from super().cost(cost, results)
        if "cosine" in cost:
            yield fact(_COSINE, "1", cost["cosine"])

    def section(self, facts: pl.DataFrame) -> Section:
        """Return the table of shares, a row a net, and for each engine the chart of its shares."""
        labels = [label for label in (*_BESIDE, *self._engines) if label in set(facts["row"])]
        figures = Figure(self.metric, "{value:.2f}", _SHARE), Figure(MEMORY, "{value:.1f}", _SHARE)
        settings = list(dict.fromkeys(facts["setting"]))
        ratios = {net: estimates(facts, metric=self.metric, unit=_SHARE, setting=net) for net in settings}
        spreads = {f"{label} on {net}": ratio for net, own in ratios.items() for label, ratio in own.items()}
        return Section(
            title=f"{self.title}, device: {facts['device'][0]}, threads: {self.threads}",
            facts=facts,
            names={"net": "setting"},
            columns=[
                column("backprop (ms)", self.metric, "{value:.1f}", "s", factor=1e3, row=PLAIN),
                *(Column(label, figures, {"row": label}) for label in labels),
            ],
            legend="Forward and backward pass, zeroed gradients to accumulated ones; time as a multiple of plain eager "
            "backpropagation's, median of interleaved rounds, and in brackets peak memory as a multiple of its. "
            "Below 1 an engine pays.",
            verdicts=[self._verdict(ratios[net]) for net in settings],
            remarks=[*self._borders(facts), *self._cosines(facts), verdict.steadiness(spreads), *self.failures(facts)],
            charts=[self._chart(facts, label) for label in labels],
        )

    @property
    def _engines(self) -> list[str]:
        return [row.label for row in self.rows]

    def _verdict(self, ratios: Mapping[str, Estimate]) -> str:
        quicker = [label for label in self._engines if label in ratios and ratios[label].high < 1]
        if not quicker:
            return "no engine pays"
        said = f"pays: {', '.join(f'{label} ({ratios[label].value:.2f})' for label in quicker)}"
        for other in (label for label in _BESIDE if label in ratios):
            ahead = [label for label in quicker if ratios[label].high < ratios[other].low]
            said += f"; beside {other} ({ratios[other].value:.2f}) {', '.join(ahead) if ahead else 'none'}"
        return said

    def _borders(self, facts: pl.DataFrame) -> Iterator[str]:
        """Yield from how many blocks on each engine pays, in nets that differ in nothing else."""
        for label in self._engines:
            own = estimates(facts, "setting", metric=self.metric, unit=_SHARE, row=label)
            found = []
            for family, nets in _families(self.subjects).items():
                known = [(net.depth, own[str(net)].value) for net in nets if str(net) in own]
                crossed = border(known)
                if crossed is not None:
                    found.append(f"{crossed:.0f} ({family})")
            words = f"from {', '.join(found)} blocks on" if found else "nowhere"
            yield f"{label} takes less time than eager backprop {words}."

    def _cosines(self, facts: pl.DataFrame) -> Iterator[str]:
        for label in self._engines:
            found = [cosine.value for cosine in estimates(facts, "setting", metric=_COSINE, row=label).values()]
            if found:
                yield f"Cosine of {label}'s gradients with exact ones, untrained: {min(found):.3f} to {max(found):.3f}."

    def _chart(self, facts: pl.DataFrame, label: str) -> Chart:
        """Return the chart of a row's share by depth, a line for nets that differ in nothing else."""
        families = {str(net): family for family, nets in _families(self.subjects).items() for net in nets}
        own = facts.filter(pl.col("row") == label).with_columns(
            series=pl.col("setting").replace_strict(families, return_dtype=pl.String)
        )
        return Chart(
            f"{self.title}, {facts['device'][0]}, threads: {self.threads}: {label}",
            points(own, "at", Figure(self.metric, unit=_SHARE)),
            Axis("blocks (count)", "counts"),
            Axis("time, as a multiple of eager backprop's (×)", "log"),
            "solid",
            rules={"the border": 1.0},
        )


def border(shares: Sequence[tuple[int, float]]) -> float | None:
    """Return from how many blocks on the share of backpropagation's time stays below 1, by powers between depths.

    Args:
        shares: depths, ascending, with the shares there.
    """
    below = list(takewhile(lambda point: point[1] < 1, reversed(shares)))
    if not below:
        return None
    depth, share = below[-1]
    if len(below) == len(shares):
        return float(depth)
    before, above = shares[-len(below) - 1]
    return float(before * (depth / before) ** (log(above) / log(above / share)))


def _families(nets: Sequence[DeepNet]) -> dict[str, list[DeepNet]]:
    """Return nets that differ in depth alone, by what they are."""
    found: dict[str, list[DeepNet]] = {}
    for net in sorted(nets, key=lambda net: net.depth):
        found.setdefault(f"{net.family}, batch {net.batch}", []).append(net)
    return found
