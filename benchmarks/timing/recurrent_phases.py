"""Where the time of a recurrent layer's forward and backward pass goes."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, ClassVar

import torch
from matplotlib.axes import Axes

from gradfree.benchmarks.records.case import Row
from gradfree.benchmarks.records.records import Record
from gradfree.benchmarks.tables.drawing import Styles, add_legend, draw_stacks
from gradfree.benchmarks.tables.experiment import Part, matching
from gradfree.benchmarks.tables.section import Fact, Plots, Section
from gradfree.benchmarks.timing.recurrent_layers import PLAIN, Layer, LayerCase, Pass
from gradfree.benchmarks.timing.speed import Errors, Turn, Turns, failures, now
from gradfree.time.closed_chain import CellChain
from gradfree.time.closed_forms import LinearisedGRU
from gradfree.time.fused_layer import Layer as RecordedLayer

_REST = "rest"
_TOTAL = "total"

PHASES: dict[str, tuple[type, str]] = {
    "forward": (RecordedLayer, "run"),
    "local derivatives": (CellChain, "__init__"),
    "δ step by step": (LinearisedGRU, "unroll"),
    "scan": (CellChain, "scan"),
    "pulls": (CellChain, "pull"),
    "parameter gradients": (CellChain, "gradients"),
}
"""The methods in which an engine spends its time; none calls another."""

_SHARES = (_TOTAL, *PHASES, _REST)
_NAMES = {"forward": "the forward pass", "scan": "the scan", "δ step by step": "computing δ step by step"}
"""What phases are called in a sentence, where it is not the same."""


class _Clock:
    """Adds up the seconds of each phase."""

    def __init__(self, device: str):
        self.device = device
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def __call__(self, phase: str, work: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``work``, timed as ``phase``."""

        @functools.wraps(work)
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = now(self.device)
            result = work(*args, **kwargs)
            self.seconds[phase] += now(self.device) - begin
            return result

        return timed

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Time all phases."""
        originals = [(phase, owner, name, getattr(owner, name)) for phase, (owner, name) in PHASES.items()]
        for phase, owner, name, original in originals:
            setattr(owner, name, self(phase, original))
        try:
            yield
        finally:
            for _, owner, name, original in originals:
                setattr(owner, name, original)


@dataclass(frozen=True, kw_only=True)
class PhaseTiming(LayerCase[Callable[[], Any]]):
    """Time of each phase of a GRU layer's forward and backward pass, engines and the plain layer in turns."""

    kind: ClassVar[str] = "phases"
    rounds: ClassVar[int] = 15
    sides = "phases of all rows"

    def steps(self) -> Mapping[str, Callable[[], Callable[[], Any]]]:
        """Return what builds the passes, and the plain layer's forward pass by itself."""
        rows = {row.label: partial(Pass, self, row) for row in self.rows}
        return {"forward without graph": lambda: torch.no_grad()(Pass(self).run), PLAIN: partial(Pass, self), **rows}

    def turn(self, step: Callable[[], Any]) -> Turn:
        """Take a step; return the seconds of its phases and of the rest."""
        clock = _Clock(self.device)
        with clock.watching():
            clock(_TOTAL, step)()
        phases = [clock.seconds[phase] for phase in PHASES]
        return (*phases, clock.seconds[_TOTAL] - sum(phases))

    def results(self, steps: Mapping[str, Any], turns: Turns, errors: Errors) -> dict[str, Any]:
        """Return the plain layer's time, and for each row the medians of its phases as shares of that."""
        plain = list(map(sum, turns[PLAIN]))
        shares = {
            label: [[t / time for t in (sum(turn), *turn)] for turn, time in zip(own, plain, strict=True)]
            for label, own in turns.items()
        }
        rows = [
            {"label": label, "phases": dict(zip(_SHARES, map(median, zip(*own, strict=True)), strict=True))}
            for label, own in shares.items()
        ]
        return {"time": median(plain), "rows": [*rows, *failures(errors)]}


@dataclass(frozen=True)
class PhaseTimings(Part):
    """Where the time of single GRU layers goes.

    Attributes:
        layers: what is run.
        rows: the engines.
        threads: for torch to use.
    """

    layers: tuple[Layer, ...]
    rows: tuple[Row, ...]
    threads: int

    def timing(self, device: str) -> Iterator[PhaseTiming]:
        """Yield one case a layer."""
        for layer in self.layers:
            yield PhaseTiming(layer=layer, rows=self.rows, threads=self.threads, device=device, seed=0)

    def section(self, records: Mapping[str, Record], device: str) -> Section | None:
        """Return the figures of the layers that were timed on ``device``."""
        results = {case.layer: r["results"]["rows"] for case in self.timing(device) for r in matching(records, case)}
        return PhaseSection(results, device, self.threads) if results else None


@dataclass(frozen=True)
class PhaseSection(Section):
    """Phases as shares of the plain layer's time."""

    results: Mapping[Layer, list[dict[str, Any]]]
    device: str
    threads: int

    labels = 2
    legend = (
        "Shares of the plain module's forward and backward pass in the same round, medians. Forward without graph: the "
        "plain module's. Local derivatives: of all steps at once, recomputed gates included. Parameter gradients: the "
        "products for weights and input. Rest: autograd, copies, the direct cotangents."
    )

    @property
    def title(self) -> str:
        """Say what was compared."""
        return f"where the time goes, device: {self.device}, threads: {self.threads}"

    def cells(self) -> Iterator[list[str]]:
        """Yield the table's head and one row a layer and engine."""
        phases = [_TOTAL, *PHASES, _REST]
        yield ["layer", "engine", *phases]
        for layer, results in self.results.items():
            for r in results:
                if r["label"] != "plain":
                    # What has no phases is all rest.
                    known = any(r["phases"][phase] for phase in PHASES)
                    yield [str(layer), r["label"], *(_figure(r["phases"], phase, known) for phase in phases)]

    def remarks(self) -> Iterator[str]:
        """Yield which phase of each row takes the largest share."""
        found: dict[str, defaultdict[str, list[str]]] = {phase: defaultdict(list) for phase in PHASES}
        for layer, results in self.results.items():
            for r in results[2:]:
                found[max(PHASES, key=r["phases"].__getitem__)][r["label"]].append(str(layer))
        shares = [
            f"{_NAMES.get(phase, phase)} for {', '.join(self._where(label, layers) for label, layers in rows.items())}"
            for phase, rows in found.items()
            if rows
        ]
        yield f"The largest share is {'; '.join(shares)}."

    def _where(self, label: str, layers: list[str]) -> str:
        return label if len(layers) == len(self.results) else f"{label} on {' and '.join(layers)}"

    def plots(self) -> Plots:
        """Return what draws the phases of the first and of the last engine."""
        _, _, *labels = (r["label"] for r in next(iter(self.results.values())))
        return {
            f"{label}, {self.device}, {self.threads} threads: where the time goes": partial(self._draw, label=label)
            for label in (labels[0], labels[-1])
        }

    def _draw(self, axes: Axes, styles: Styles, label: str) -> None:
        """Draw stacked bars."""
        shares = [next(r["phases"] for r in results if r["label"] == label) for results in self.results.values()]
        draw_stacks(axes, list(map(str, self.results)), {p: [share[p] for share in shares] for p in (*PHASES, _REST)})
        axes.set_ylabel("layer (sequences, steps, units)")
        axes.set_xlabel("time, as a multiple of nn.GRU's own (×)")
        add_legend(axes)

    def facts(self) -> Iterator[Fact]:
        """Yield all numbers."""
        for layer, results in self.results.items():
            for r in results:
                for phase, share in r["phases"].items():
                    yield Fact(r["label"], str(layer), f"time of {phase}", "× plain", share)


def _figure(phases: Mapping[str, float], phase: str, known: bool) -> str:
    return f"{phases[phase]:.2f}" if phase == _TOTAL or (known and phases[phase]) else "–"
