"""Where the time of a recurrent layer's forward and backward pass goes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
from torch._C._autograd import DeviceType
from torch.autograd import profiler
from torch.profiler import record_function

from gradfree.benchmarks.tables.column import column
from gradfree.benchmarks.tables.facts import Fact, fact
from gradfree.benchmarks.timing.allocations import profiled
from gradfree.benchmarks.timing.recurrent_layers import PLAIN, LayerPass
from gradfree.benchmarks.timing.side_by_side import Turn, now, time_of, times
from gradfree.benchmarks.timing.timed import Timing, timed
from gradfree.torchside.phases import PREFIX

PHASES = ("forward", "local derivatives", "δ step by step", "scan", "pulls", "parameter gradients")
"""In which an engine spends its time; none is part of another."""
_SHARES = ("total", *PHASES, "rest")
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
def ranges(device: str) -> Iterator[list[Range]]:
    """Record the ranges inside the block, and nothing else.

    torch.profiler also records torch's own operations, which takes longer than many of them do: in a loop over a GRU's
    steps the profiler is what is measured.

    Args:
        device: where the time is to be measured, "cpu" or "cuda".

    Yields:
        A list that is filled when the block ends, in the order of the ranges' starts.
    """
    found = list[Range]()
    with profiled(profiler.profile(use_device=None if device == "cpu" else device)) as events:
        yield found
    for e in sorted(events, key=lambda event: event.start_ns()):
        end = e.start_ns() + e.duration_ns()
        found.append(Range(e.name(), e.start_ns(), end, e.device_type() == DeviceType.CPU))


def seconds_inside(outer: Range, found: Sequence[Range], prefix: str) -> defaultdict[str, float]:
    """Return the seconds of the ranges that begin in ``outer`` and whose names begin with ``prefix``, by the rest.

    Args:
        outer: a range.
        found: all on the host, or all on the GPU, in the order of their starts. One inside another of its name is
            part of that.
        prefix: of the names.
    """
    seconds: defaultdict[str, float] = defaultdict(float)
    ends: defaultdict[str, int] = defaultdict(int)
    for name, start, end, _ in found:
        if name.startswith(prefix) and outer.start <= start < outer.end and start >= ends[name]:
            seconds[name.removeprefix(prefix)] += 1e-9 * (end - start)
            ends[name] = end
    return seconds


class Profiled:
    """A step that tells the seconds of its phases, and of the rest."""

    def __init__(self, step: Callable[[], Any], device: str):
        self.step, self.device = step, device

    def __call__(self) -> Turn:
        """Take the step."""
        with ranges(self.device) as found, record_function(_STEP):
            self.step()
            now(self.device)  # Waits for the device.
        (whole,) = (r for r in found if r.on_host and r.name == _STEP)
        seconds = seconds_inside(whole, [r for r in found if r.on_host], PREFIX)
        if self.device != "cpu":
            seen, seconds = set(seconds), seconds_inside(whole, [r for r in found if not r.on_host], PREFIX)
            if lost := seen - seconds.keys():
                raise RuntimeError(f"torch's profiler does not tell how long {sorted(lost)} took on {self.device}.")
        phases = [seconds[phase] for phase in PHASES]
        return (*phases, 1e-9 * (whole.end - whole.start) - sum(phases))


def _shares(cost: Mapping[str, Any], results: Mapping[str, Any]) -> Iterator[Fact]:
    """Yield a row's phases as shares of the plain layer's time; what has none of them is all rest."""
    shares = cost.get("phases", {})
    known = any(shares.get(phase) for phase in PHASES)
    whole = 1.0 if "time" not in cost else next(row["time"] for row in results["rows"] if row["label"] == PLAIN)
    if cost["label"] != PLAIN:
        for phase, share in shares.items():
            if (phase == _SHARES[0] and "time" not in cost) or (phase != _SHARES[0] and known and share):
                yield fact(time_of(phase), times(PLAIN), share / whole)


def _medians(case: Timing, step: Profiled, turns: Sequence[Turn]) -> dict[str, Any]:
    """Return the seconds of all phases."""
    taken = zip(*((sum(turn), *turn) for turn in turns), strict=True)
    return {"phases": dict(zip(_SHARES, map(median, taken), strict=True))}


@timed(
    kind="phases",
    subject="layer",
    metric=time_of(_SHARES[0]),
    rounds=15,
    runs=1,
    title="where the time goes",
    legend="Shares of the plain module's forward and backward pass. Forward without graph: the plain module's. Local "
    "derivatives: of all steps at once, recomputed gates included. Parameter gradients: the products for weights and "
    "input. Rest: autograd, copies, the direct cotangents.",
    names={"layer": "setting", "engine": "row"},
    columns=[column(phase, time_of(phase)) for phase in _SHARES],
    sides=lambda layer: "phases of all rows",
    costs=_medians,
    facts=_shares,
)
def phases(case: Timing) -> Mapping[str, Callable[[], Profiled]]:
    """Return what builds the passes, and the plain layer's forward pass by itself."""
    forward = {"forward without graph": lambda: Profiled(torch.no_grad()(LayerPass(case).run), case.device)}
    return {
        PLAIN: lambda: Profiled(LayerPass(case), case.device),
        **forward,
        **{row.label: partial(_profiled, case, row) for row in case.rows},
    }


def _profiled(case: Timing, row: Any) -> Profiled:
    return Profiled(LayerPass(case, row), case.device)
