"""Measure layers on packed sequences and print the coefficients of ``gradfree/devices/packed_costs.py``.

``python benchmarks/scripts/packed_costs.py --seconds 240``, on an idle machine, in one thread. Layers of random sizes
run whole, in runs and as a grid, side by side. Lengths are new in each pass: oneDNN prepares a kernel for each new
shape. With ``--check`` it lists, of 180 passes, those that ``shooting`` makes slower than torch's by more than 5 %.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from functools import partial
from itertools import product
from typing import NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from scipy.optimize import nnls
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from gradfree import create_engine
from gradfree.devices import packed_costs
from gradfree.devices.packed_costs import Coefficients, Layout, in_calls
from gradfree.time.runs import runs_of

_MODULES: tuple[Callable[[int, int], nn.RNNBase], ...] = (nn.LSTM, nn.GRU, nn.RNN)
_LENGTHS: dict[str, Callable[[int, int], Tensor]] = {
    "equal": lambda batch, steps: torch.full((batch,), steps),
    "uniform": lambda batch, steps: torch.randint(max(1, steps // 4), steps + 1, (batch,)),
    "log-normal": lambda batch, steps: (torch.randn(batch).mul(0.6).exp() * steps / 3).round().clamp(1, steps).long(),
    "all different": lambda batch, steps: torch.randperm(max(steps, batch))[:batch] % steps + 1,
}
_LAYOUTS: tuple[Layout, ...] = ("whole", "runs", "grid")
_SEVERAL = ("uniform", "log-normal", "all different")
_LARGEST = 2e9
"""The most multiplications of a layer with its padding: a larger one takes too long."""
_CHECKED, _TOO_SLOW, _LONGEST = 180, 1.05, 5e8
"""How many passes are checked; the largest ratio; the most elements that torch may fill in one backward pass."""


class Sample(NamedTuple):
    """One layer: its kind, whether both passes ran, its mean sizes, and microseconds by layout.

    ``calls`` and ``padded`` are the numbers of calls in runs, and of their rows with padding.
    """

    kind: str
    trains: bool
    calls: float
    padded: float
    steps: int
    rows: float
    batch: int
    units: int
    inputs: int
    times: dict[Layout, float]


class Batch(NamedTuple):
    """Packed sequences, and the cotangent of a layer's output."""

    packed: PackedSequence
    cotangent: Tensor

    @classmethod
    def draw(cls, batch: int, steps: int, drawn: str, inputs: int, units: int) -> Batch:
        """Return sequences with new lengths, the longest ``steps``."""
        found = _LENGTHS[drawn](batch, steps)
        found[0] = steps
        packed = pack_padded_sequence(torch.randn(steps, batch, inputs), found, enforce_sorted=False)
        packed = packed._replace(data=packed.data.requires_grad_())
        return cls(packed, torch.randn(len(packed.data), units))


Pass = Callable[[Batch], object]


def times(passes: Mapping[Layout, Pass], draw: Callable[[], Batch]) -> dict[Layout, float]:
    """Return the median microseconds of each pass, in turns on the same sequences, which are new in each round."""
    found: dict[Layout, list[float]] = defaultdict(list)
    seconds = 0.0
    while len(found["whole"]) < 4 or (seconds < 0.03 * len(passes) and len(found["whole"]) < 50):
        batch = draw()
        for layout, run in passes.items():
            start = time.perf_counter()
            run(batch)
            found[layout].append(time.perf_counter() - start)
            seconds += found[layout][-1]
    # The first round warms up.
    return {layout: 1e6 * statistics.median(each[1:]) for layout, each in found.items()}


def in_layout(layout: Layout, run: Pass, batch: Batch) -> object:
    """Run an attached layer with the given layout in place of the chosen one."""
    with patch("gradfree.time.torch_layer_site.packed_layout", lambda *_, **__: layout):
        return run(batch)


def both_passes(module: nn.RNNBase, batch: Batch) -> object:
    """Run both passes."""
    data = batch.packed.data
    return torch.autograd.grad(module(batch.packed)[0].data, [data, *module.parameters()], batch.cotangent)


def evaluate(module: nn.RNNBase, batch: Batch) -> object:
    """Run the forward pass alone."""
    with torch.no_grad():
        return module(batch.packed)


def samples(seconds: float) -> Iterator[Sample]:
    """Yield layers of random sizes for so long."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        module, units = random.choice(_MODULES), random.choice([8, 16, 32, 64, 128, 256, 512])
        inputs, batch = random.choice([16, 64, units]), random.choice([2, 4, 8, 16, 32, 64, 128, 256])
        steps = random.choice([20, 30, 50, 70, 100, 200, 400])
        if steps * batch * units * (units + inputs) > _LARGEST or steps * units**2 * steps * batch > 5e11:
            continue
        draw = partial(Batch.draw, batch, steps, random.choice(_SEVERAL), inputs, units)
        drawn = [draw().packed.batch_sizes for _ in range(10)]
        rows = statistics.mean(int(each.sum()) for each in drawn)
        layer = module(inputs, units)
        create_engine("shooting", segments=1).attach(layer)
        kind = layer.mode.partition("_")[0]
        # The grid has no forward pass for evaluation, and is always slower than an LSTM's runs.
        trained = _LAYOUTS[:2] if kind == "LSTM" else _LAYOUTS
        for trains, run, ways in ((True, both_passes, trained), (False, evaluate, _LAYOUTS[:2])):
            passes: dict[Layout, Pass] = {way: partial(in_layout, way, partial(run, layer)) for way in ways}
            calls = [in_calls(layer.mode, runs_of(sizes), torch.empty(batch, units), inputs, trains) for sizes in drawn]
            padded = statistics.mean(
                sum(sum(run.steps for run in call) * call[0].rows for call in each) for each in calls
            )
            count = statistics.mean(map(len, calls))
            yield Sample(kind, trains, count, padded, steps, rows, batch, units, inputs, times(passes, draw))


def slower(seconds: float) -> Iterator[str]:
    """Yield a line for each layer that an engine makes slower, then one on all; stop after so many seconds."""
    end = time.perf_counter() + seconds
    ratios: list[float] = []
    grid = list(product((1, 4, 16, 64, 256), (5, 30, 100, 400, 2000), (8, 32, 128, 512), _MODULES[:2], _LENGTHS))
    random.shuffle(grid)
    for batch, steps, units, module, drawn in grid:
        draw = partial(Batch.draw, batch, steps, drawn, 32, units)
        rows = len(draw().packed.data)
        if len(ratios) == _CHECKED or time.perf_counter() > end or steps * rows * units > _LONGEST:
            continue
        plain = module(32, units)
        attached = deepcopy(plain)
        create_engine("shooting").attach(attached)
        for name, run in (("training", both_passes), ("evaluation", evaluate)):
            passes: dict[Layout, Pass] = {"whole": partial(run, plain), "runs": partial(run, attached)}
            ratio = beside(passes, draw)
            # Once more: it may have been a disturbance.
            ratios.append(ratio if ratio <= _TOO_SLOW else min(ratio, beside(passes, draw)))
            if ratios[-1] > _TOO_SLOW:
                yield f"{plain.mode} ({batch}, {steps}, {units}), {drawn}, {name}: {ratios[-1]:.2f}"
    yield f"{len(ratios)} passes: at most {max(ratios):.2f} of torch's time, the median {statistics.median(ratios):.2f}"


def beside(passes: Mapping[Layout, Pass], draw: Callable[[], Batch]) -> float:
    """Return the time with an engine as a multiple of torch's."""
    found = times(passes, draw)
    return found["runs"] / found["whole"]


def sizes(sample: Sample, layout: Layout) -> tuple[float, int, float, int, int]:
    """Return the arguments of :meth:`Coefficients.time`."""
    calls = sample.calls if layout == "runs" else 1
    rows = {"whole": sample.rows, "runs": sample.padded}.get(layout, sample.steps * sample.batch)
    return calls, sample.steps, rows, sample.units, sample.inputs


def features(sample: Sample, layout: Layout) -> list[float]:
    """Return what each coefficient is multiplied with."""
    one = np.eye(len(Coefficients._fields))[: 7 if layout == "whole" and sample.trains else 6]
    return [Coefficients(*each).time(*sizes(sample, layout)) for each in one]


def fitted(own: list[Sample], layout: Layout) -> tuple[Coefficients, np.ndarray]:
    """Return the coefficients of a layout, and the predicted over the measured times."""
    inputs = np.array([features(sample, layout) for sample in own])
    measured = np.array([sample.times[layout] for sample in own])
    found, _ = nnls(inputs / measured[:, None], np.ones(len(own)))
    return Coefficients(*map(float, found)), inputs @ found / measured


def print_tables(seconds: float) -> None:
    """Measure for so long, fit, and print the tables, each row before the one in the code."""
    found = defaultdict(list)
    for sample in samples(seconds):
        found[sample.kind, sample.trains].append(sample)
    for trains, name in ((True, "_TRAINING"), (False, "_EVALUATION")):
        print(name)
        for kind, known in getattr(packed_costs, name).items():
            print(f'    "{kind}": {{')
            for layout in known if (own := found[kind, trains]) else ():
                row, errors = fitted(own, layout)
                low, high = np.quantile(errors, [0.1, 0.9])
                print(f'        "{layout}": {coefficients(row)},', end="")
                print(f"  # {len(own)} layers, 80 % within {low:.2f} to {high:.2f}")
                print(f"        # in the code: {coefficients(known[layout])}")
            print("    },")


def coefficients(row: Coefficients) -> str:
    """Return a row in code."""
    return f"Coefficients({', '.join(f'{value:.2g}' for value in row)})"


def main() -> None:
    """Measure, fit and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=240.0, help="how long to measure")
    parser.add_argument("--check", action="store_true", help="compare layers with an engine with torch's")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    warnings.simplefilter("ignore")
    options = parser.parse_args()
    if options.check:
        for line in slower(options.seconds):
            print(line, flush=True)
        return
    print_tables(options.seconds)


if __name__ == "__main__":
    main()
