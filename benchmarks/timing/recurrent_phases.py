"""Where the time of a recurrent layer's forward and backward pass goes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, ClassVar, NamedTuple

import torch
from torch._C._autograd import DeviceType
from torch.autograd import profiler
from torch.profiler import record_function

from gradfree.benchmarks.tables.column import column
from gradfree.benchmarks.tables.facts import Fact, estimates, fact
from gradfree.benchmarks.tables.frames import pl
from gradfree.benchmarks.tables.section import Section
from gradfree.benchmarks.timing.allocations import profiled
from gradfree.benchmarks.timing.recurrent_layers import PLAIN, LayerCase, LayerPass, RecurrentLayer
from gradfree.benchmarks.timing.side_by_side import Errors, Timings, Turn, Turns, failures, now, time_of, times
from gradfree.torchside.phases import PREFIX

_REST = "rest"
_TOTAL = "total"

PHASES = ("forward", "local derivatives", "δ step by step", "scan", "pulls", "parameter gradients")
"""In which an engine spends its time; none is part of another."""

_SHARES = (_TOTAL, *PHASES, _REST)
_NAMES = {"forward": "the forward pass", "scan": "the scan", "δ step by step": "computing δ step by step"}
"""What phases are called in a sentence, where it is not the same."""
_STEP = "step"
"""The name of the range that is a whole step."""


class Range(NamedTuple):
    """One run of a marked piece of code.

    Attributes:
        name: its mark.
        start: in nanoseconds since some moment.
        end: likewise.
        on_host: whether it is the time that Python took, and not the time that a GPU took for what was launched in it.
    """

    name: str
    start: int
    end: int
    on_host: bool


@contextmanager
def recorded(device: str) -> Iterator[list[Range]]:
    """Record the ranges inside the block, and nothing else.

    torch.profiler also records torch's own operations, which takes longer than many of them do: in a loop over a GRU's
    steps the profiler is what is measured.

    Args:
        device: where the time is to be measured.

    Yields:
        A list that is filled when the block ends, in the order of the ranges' starts.
    """
    found = list[Range]()
    with profiled(profiler.profile(use_device=None if device == "cpu" else device)) as events:
        yield found
    found += sorted(
        (
            Range(e.name(), e.start_ns(), e.start_ns() + e.duration_ns(), e.device_type() == DeviceType.CPU)
            for e in events
        ),
        key=lambda r: r.start,
    )


def seconds_inside(outer: Range, ranges: Sequence[Range], prefix: str) -> defaultdict[str, float]:
    """Return the seconds of the ranges that begin in ``outer`` and whose names begin with ``prefix``, by the rest.

    Args:
        outer: a range.
        ranges: all on the host, or all on the GPU, in the order of their starts. One inside another of its name is
            part of that.
        prefix: of the names.
    """
    seconds: defaultdict[str, float] = defaultdict(float)
    ends: defaultdict[str, int] = defaultdict(int)
    for name, start, end, _ in ranges:
        if name.startswith(prefix) and outer.start <= start < outer.end and start >= ends[name]:
            seconds[name.removeprefix(prefix)] += 1e-9 * (end - start)
            ends[name] = end
    return seconds


@dataclass(frozen=True, kw_only=True)
class PhaseTiming(LayerCase[Callable[[], Any]]):
    """Time of each phase of a GRU layer's forward and backward pass, engines and the plain layer in turns."""

    kind: ClassVar[str] = "phases"
    rounds: ClassVar[int] = 15
    sides = "phases of all rows"

    def steps(self) -> Mapping[str, Callable[[], Callable[[], Any]]]:
        """Return what builds the passes, and the plain layer's forward pass by itself."""
        rows = {row.label: partial(LayerPass, self, row) for row in self.rows}
        return {
            "forward without graph": lambda: torch.no_grad()(LayerPass(self).run),
            PLAIN: partial(LayerPass, self),
            **rows,
        }

    def turn(self, step: Callable[[], Any]) -> Turn:
        """Take a step; the profiler tells how long."""
        with record_function(_STEP):
            step()
            now(self.device)  # Waits for the device.
        return ()

    def measured(self) -> tuple[dict[str, Callable[[], Any]], Turns, Errors]:
        """Return the steps with the seconds of their phases and of the rest."""
        with recorded(self.device) as ranges:
            steps, turns, errors = super().measured()
        wholes = [r for r in ranges if r.on_host and r.name == _STEP]
        # Those before have warmed up, or failed.
        taken = [_turn(whole, ranges, self.device) for whole in wholes[-self.rounds * len(steps) :]]
        return steps, {label: taken[n :: len(steps)] for n, label in enumerate(turns)}, errors

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


def _turn(whole: Range, ranges: Sequence[Range], device: str) -> Turn:
    """Return the seconds of each phase of a step, and of the rest."""
    seconds = seconds_inside(whole, [r for r in ranges if r.on_host], PREFIX)
    if device != "cpu":
        seen, seconds = set(seconds), seconds_inside(whole, [r for r in ranges if not r.on_host], PREFIX)
        if lost := seen - seconds.keys():
            raise RuntimeError(f"torch's profiler does not tell how long {sorted(lost)} took on {device}.")
    phases = [seconds[phase] for phase in PHASES]
    return (*phases, 1e-9 * (whole.end - whole.start) - sum(phases))


@dataclass(frozen=True)
class PhaseTimings(Timings[RecurrentLayer]):
    """Where the time of single GRU layers goes."""

    timed = PhaseTiming

    def cost(self, cost: Mapping[str, Any], results: Mapping[str, Any]) -> Iterator[Fact]:
        """Yield a row's phases as shares of the plain layer's time; what has none of them is all rest."""
        yield from super().cost(cost, results)
        shares = cost.get("phases", {})
        known = any(shares.get(phase) for phase in PHASES)
        if cost["label"] != PLAIN:
            for phase, share in shares.items():
                if phase == _TOTAL or (known and share):
                    yield fact(time_of(phase), times(PLAIN), share)

    def section(self, facts: pl.DataFrame) -> Section:
        """Return the table of the phases, a row a layer and engine."""
        device = facts["device"][0]
        return Section(
            title=f"where the time goes, device: {device}, threads: {self.threads}",
            facts=facts,
            names={"layer": "setting", "engine": "row"},
            columns=[column(phase, time_of(phase)) for phase in _SHARES],
            legend="Shares of the plain module's forward and backward pass in the same round, medians. Forward without "
            "graph: the plain module's. Local derivatives: of all steps at once, recomputed gates included. Parameter "
            "gradients: the products for weights and input. Rest: autograd, copies, the direct cotangents.",
            remarks=[*self._largest(facts), *self.failures(facts)],
        )

    def _largest(self, facts: pl.DataFrame) -> Iterator[str]:
        """Yield which phase of each row takes the largest share."""
        layers = list(dict.fromkeys(facts["setting"]))
        found: dict[str, dict[str, list[str]]] = {phase: {} for phase in PHASES}
        for layer in layers:
            known = {phase: estimates(facts, metric=time_of(phase), setting=layer) for phase in PHASES}
            for label in (row.label for row in self.rows):
                shares = {phase: own[label].value for phase, own in known.items() if label in own}
                if shares:
                    found[max(shares, key=shares.__getitem__)].setdefault(label, []).append(layer)
        told = [
            f"{_NAMES.get(phase, phase)} for "
            + ", ".join(row if own == layers else f"{row} on {' and '.join(own)}" for row, own in rows.items())
            for phase, rows in found.items()
            if rows
        ]
        if told:
            yield f"The largest share is {'; '.join(told)}."
