"""Where the time of a recurrent layer's forward and backward pass goes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, ClassVar

from matplotlib.axes import Axes
from torch.profiler import record_function
from torch.utils.benchmark import set_torch_threads

from gradfree.benchmarks.records.case import Row
from gradfree.benchmarks.records.records import Record
from gradfree.benchmarks.tables.drawing import Styles, add_legend, draw_stacks
from gradfree.benchmarks.tables.experiment import Part, matching
from gradfree.benchmarks.tables.section import Fact, Plots, Section
from gradfree.benchmarks.timing.ranges import Range, recorded, seconds_inside
from gradfree.benchmarks.timing.recurrent_layers import Layer, LayerCase, Pass
from gradfree.benchmarks.timing.speed import now
from gradfree.torchside.phases import PREFIX

_ROUNDS = 15
_REST = "rest"
_TOTAL = "total"

PHASES = ("forward", "local derivatives", "δ step by step", "scan", "pulls", "parameter gradients")
"""In which an engine spends its time; none is part of another."""

_NAMES = {"forward": "the forward pass", "scan": "the scan", "δ step by step": "computing δ step by step"}
"""What phases are called in a sentence, where it is not the same."""


_STEP = "step::"
"""What the names of ranges that are whole steps begin with."""


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
        with set_torch_threads(self.threads), recorded(self.device) as ranges:
            for _ in range(1 + _ROUNDS):
                for label, step in steps.items():
                    with record_function(_STEP + label):
                        step()
                        now(self.device)  # Waits for the device.
        _, *rounds = _rounds(ranges, len(steps), self.device)
        return {
            "time": median(times["plain"][_TOTAL] for times in rounds),
            "rows": [{"label": label, "phases": _shares(label, rounds)} for label in steps],
        }


def _rounds(ranges: Sequence[Range], steps: int, device: str) -> list[dict[str, defaultdict[str, float]]]:
    """Return for each round the seconds of each phase of each of its ``steps`` steps, by label."""
    found = [_seconds(whole, ranges, device) for whole in ranges if whole.on_host and whole.name.startswith(_STEP)]
    return [dict(found[first : first + steps]) for first in range(0, len(found), steps)]


def _seconds(whole: Range, ranges: Sequence[Range], device: str) -> tuple[str, defaultdict[str, float]]:
    """Return a step's label and the seconds of its phases.

    Raises:
        RuntimeError: the profiler has seen phases, but not how long they took on the GPU.
    """
    times = seconds_inside(whole, [r for r in ranges if r.on_host], PREFIX)
    if device != "cpu":
        seen, times = set(times), seconds_inside(whole, [r for r in ranges if not r.on_host], PREFIX)
        if lost := seen - times.keys():
            raise RuntimeError(f"torch's profiler does not tell how long {sorted(lost)} took on {device}.")
    times[_TOTAL] = 1e-9 * (whole.end - whole.start)
    times[_REST] = 2 * times[_TOTAL] - sum(times.values())
    return whole.name.removeprefix(_STEP), times


def _shares(label: str, rounds: list[dict[str, defaultdict[str, float]]]) -> dict[str, float]:
    """Return the medians of the phases as shares of the plain step's time in the same round."""
    return {
        phase: median(times[label][phase] / times["plain"][_TOTAL] for times in rounds)
        for phase in (_TOTAL, *PHASES, _REST)
    }


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
