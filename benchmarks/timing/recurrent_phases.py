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

from matplotlib.axes import Axes
from torch.utils.benchmark import set_torch_threads

from gradfree.benchmarks.records.case import Row
from gradfree.benchmarks.records.records import Record
from gradfree.benchmarks.tables.drawing import Styles, add_legend, draw_stacks
from gradfree.benchmarks.tables.experiment import Experiment, matching
from gradfree.benchmarks.tables.printed import Fact, Plots, PrintedSection
from gradfree.benchmarks.timing.recurrent_layers import Layer, LayerCase, Pass
from gradfree.benchmarks.timing.speed import now
from gradfree.time.closed_chain import CellChain
from gradfree.time.closed_forms import LinearisedGRU
from gradfree.time.fused_layer import Layer as RecordedLayer

_ROUNDS = 15
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
class PhaseTiming(LayerCase):
    """Time of each phase of a GRU layer's forward and backward pass, engines and the plain layer in turns."""

    kind: ClassVar[str] = "phases"

    @property
    def subject(self) -> str:
        """All rows."""
        return f"phases of all rows, {self.threads} threads"

    def run(self) -> dict[str, Any]:
        """Measure; return for each row the medians of its phases as shares of the plain layer's time, and that time."""
        plain = Pass(self)
        steps: dict[str, Callable[[], object]] = {"forward without graph": plain.forward_alone, "plain": plain}
        steps |= {row.label: Pass(self, row) for row in self.rows}
        clock = _Clock(self.device)
        with set_torch_threads(self.threads), clock.watching():
            _round(clock, steps)
            rounds = [_round(clock, steps) for _ in range(_ROUNDS)]
        return {
            "time": median(times["plain"][_TOTAL] for times in rounds),
            "rows": [{"label": label, "phases": _shares(label, rounds)} for label in steps],
        }


def _round(clock: _Clock, steps: Mapping[str, Callable[[], object]]) -> dict[str, defaultdict[str, float]]:
    """Return the seconds of each phase of each step."""
    times = {}
    for label, step in steps.items():
        clock.seconds = defaultdict(float)
        clock(_TOTAL, step)()
        times[label] = clock.seconds
        times[label][_REST] = 2 * clock.seconds[_TOTAL] - sum(clock.seconds.values())
    return times


def _shares(label: str, rounds: list[dict[str, defaultdict[str, float]]]) -> dict[str, float]:
    """Return the medians of the phases as shares of the plain step's time in the same round."""
    return {
        phase: median(times[label][phase] / times["plain"][_TOTAL] for times in rounds)
        for phase in (_TOTAL, *PHASES, _REST)
    }


@dataclass(frozen=True)
class PhaseTimings(Experiment):
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

    def printed(self, records: Mapping[str, Record], device: str) -> PrintedSection | None:
        """Return the figures of the layers that were timed on ``device``."""
        results = {case.layer: r["results"]["rows"] for case in self.timing(device) for r in matching(records, case)}
        return PhaseSection(results, device, self.threads) if results else None


@dataclass(frozen=True)
class PhaseSection(PrintedSection):
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
