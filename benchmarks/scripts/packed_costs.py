"""Measure layers on packed sequences and print the coefficients of ``gradfree/devices/packed_costs.py``.

``python benchmarks/scripts/packed_costs.py --seconds 240``, on an idle machine, in one thread. Layers of random sizes
run whole, in runs and as a grid, side by side. With ``--check`` it lists, of 90 layers, those that ``shooting`` makes
slower than torch by more than 5 %.
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
from gradfree.devices.packed_costs import Coefficients, Layout
from gradfree.time.runs import runs_of

_MODULES: tuple[Callable[[int, int], nn.RNNBase], ...] = (nn.LSTM, nn.GRU, nn.RNN)
_LENGTHS: dict[str, Callable[[int, int], Tensor]] = {
    "equal": lambda batch, steps: torch.full((batch,), steps),
    "uniform": lambda batch, steps: torch.randint(max(1, steps // 4), steps + 1, (batch,)),
    "log-normal": lambda batch, steps: (torch.randn(batch).mul(0.6).exp() * steps / 3).round().clamp(1, steps).long(),
    "all different": lambda batch, steps: torch.linspace(1, steps, batch).round().long(),
}
_SEVERAL = ("uniform", "log-normal", "all different")
_LARGEST = 2e9
"""The most multiplications of a layer with its padding: a larger one takes too long."""
_CHECKED, _TOO_SLOW, _LONGEST = 90, 1.05, 5e8
"""How many layers are checked; the largest ratio; the most elements that torch may fill in one backward pass."""


class Sample(NamedTuple):
    """One layer: its kind, whether both passes ran, its sizes, and microseconds by layout."""

    kind: str
    trains: bool
    runs: int
    steps: int
    rows: int
    batch: int
    units: int
    inputs: int
    times: dict[Layout, float]


def lengths(batch: int, steps: int, drawn: str) -> Tensor:
    """Return lengths of sequences, the longest ``steps``."""
    found = _LENGTHS[drawn](batch, steps)
    found[0] = steps
    return found


def times(passes: Mapping[Layout, Callable[[], object]]) -> dict[Layout, float]:
    """Return the median microseconds of each pass, in turns."""
    found = defaultdict(list)
    for run in passes.values():
        run()
    end, rounds = time.perf_counter() + 0.03 * len(passes), 0
    while rounds < 3 or (time.perf_counter() < end and rounds < 50):
        rounds += 1
        for layout, run in passes.items():
            start = time.perf_counter()
            run()
            found[layout].append(time.perf_counter() - start)
    return {layout: 1e6 * statistics.median(each) for layout, each in found.items()}


def in_layout(layout: Layout, run: Callable[[], object]) -> object:
    """Run an attached layer with the given layout in place of the chosen one."""
    with patch("gradfree.time.torch_layer_site.packed_layout", lambda *_, **__: layout):
        return run()


def both_passes(module: nn.RNNBase, packed: PackedSequence, cotangent: Tensor) -> object:
    """Run both passes."""
    return torch.autograd.grad(module(packed)[0].data, [packed.data, *module.parameters()], cotangent)


def evaluate(module: nn.RNNBase, packed: PackedSequence) -> object:
    """Run the forward pass alone."""
    with torch.no_grad():
        return module(packed)


def samples(seconds: float) -> Iterator[Sample]:
    """Yield layers of random sizes for so long."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        module, units = random.choice(_MODULES), random.choice([8, 16, 32, 64, 128, 256, 512])
        inputs, batch = random.choice([16, 64, units]), random.choice([2, 4, 8, 16, 32, 64, 128, 256])
        steps = random.choice([5, 10, 20, 30, 50, 70, 100, 200, 400])
        if steps * batch * units * (units + inputs) > _LARGEST or steps * units**2 * steps * batch > 5e11:
            continue
        packed = pack_padded_sequence(
            torch.randn(steps, batch, inputs), lengths(batch, steps, random.choice(_SEVERAL)), enforce_sorted=False
        )
        packed = packed._replace(data=packed.data.requires_grad_())
        runs = runs_of(packed.batch_sizes)
        if len(runs) == 1:
            continue
        layer = module(inputs, units)
        create_engine("shooting", segments=1).attach(layer)
        size = len(runs), steps, len(packed.data), batch, units, inputs
        name = layer.mode.partition("_")[0]
        train = partial(both_passes, layer, packed, torch.randn(len(packed.data), units))
        ways: tuple[Layout, ...] = ("whole", "runs", "grid")
        yield Sample(name, True, *size, times({way: partial(in_layout, way, train) for way in ways}))
        test = partial(evaluate, layer, packed)
        yield Sample(name, False, *size, times({way: partial(in_layout, way, test) for way in ways[:2]}))


def slower(seconds: float) -> Iterator[str]:
    """Yield a line for each layer that an engine makes slower, then one on all; stop after so many seconds."""
    end = time.perf_counter() + seconds
    ratios: list[float] = []
    grid = list(product((1, 4, 16, 64, 256), (5, 30, 100, 400, 2000), (8, 32, 128, 512), _MODULES[:2], _LENGTHS))
    random.shuffle(grid)
    for batch, steps, units, module, drawn in grid:
        given = lengths(batch, steps, drawn)
        if len(ratios) == _CHECKED or time.perf_counter() > end or steps * given.sum() * units > _LONGEST:
            continue
        packed = pack_padded_sequence(torch.randn(steps, batch, 32), given, enforce_sorted=False)
        packed = packed._replace(data=packed.data.requires_grad_())
        plain, cotangent = module(32, units), torch.randn(len(packed.data), units)
        attached = deepcopy(plain)
        create_engine("shooting").attach(attached)
        layers: dict[Layout, nn.RNNBase] = {"whole": plain, "runs": attached}
        passes = {layout: partial(both_passes, layer, packed, cotangent) for layout, layer in layers.items()}
        ratio = beside(passes)
        # Once more: it may have been a disturbance.
        ratios.append(ratio if ratio <= _TOO_SLOW else min(ratio, beside(passes)))
        if ratios[-1] > _TOO_SLOW:
            yield f"{plain.mode} ({batch}, {steps}, {units}), {drawn}: {ratios[-1]:.2f}"
    yield f"{len(ratios)} layers: at most {max(ratios):.2f} of torch's time, the median {statistics.median(ratios):.2f}"


def beside(passes: Mapping[Layout, Callable[[], object]]) -> float:
    """Return the time with an engine as a multiple of torch's."""
    found = times(passes)
    return found["runs"] / found["whole"]


def sizes(sample: Sample, layout: Layout) -> tuple[int, int, int, int, int]:
    """Return the arguments of :meth:`Coefficients.time`."""
    calls = sample.runs if layout == "runs" else 1
    rows = sample.steps * sample.batch if layout == "grid" else sample.rows
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
