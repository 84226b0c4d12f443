"""Measure layers on packed sequences and print the coefficients of ``gradfree/devices/packed_costs.py``.

``python benchmarks/scripts/packed_costs.py --seconds 240``, on an idle machine, in one thread. Layers of random sizes
run whole, in runs and as a grid, side by side.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from scipy.optimize import nnls
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from gradfree import create_engine
from gradfree.devices.packed_costs import Coefficients, Layout
from gradfree.time.runs import runs_of

_MODULES: tuple[Callable[[int, int], nn.RNNBase], ...] = (nn.LSTM, nn.GRU, nn.RNN)
_LARGEST = 2e9
"""The most multiplications of a layer with its padding: a larger one takes too long."""


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


def lengths(batch: int, steps: int) -> Tensor:
    """Return lengths of sequences, the longest ``steps``: uniform, log-normal, or all different."""
    choices: tuple[Callable[[], Tensor], ...] = (
        lambda: torch.randint(max(1, steps // 4), steps + 1, (batch,)),
        lambda: (torch.randn(batch).mul(0.6).exp() * steps / 3).round().clamp(1, steps).long(),
        lambda: torch.linspace(1, steps, batch).round().long(),
    )
    found = random.choice(choices)()
    found[0] = steps
    return found


def times(passes: dict[Layout, Callable[[], object]]) -> dict[Layout, float]:
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
        packed = pack_padded_sequence(torch.randn(steps, batch, inputs), lengths(batch, steps), enforce_sorted=False)
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


def main() -> None:
    """Measure, fit and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=240.0, help="how long to measure")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    warnings.simplefilter("ignore")
    found = defaultdict(list)
    for sample in samples(parser.parse_args().seconds):
        found[sample.kind, sample.trains].append(sample)
    for trains, table in ((True, "_TRAINING"), (False, "_EVALUATION")):
        print(table)
        for kind in ("LSTM", "GRU", "RNN"):
            own = found[kind, trains]
            print(f'    "{kind}": {{')
            for layout in own[0].times:
                row, errors = fitted(own, layout)
                low, high = np.quantile(errors, [0.1, 0.9])
                print(f'        "{layout}": Coefficients({", ".join(f"{value:.2g}" for value in row)}),', end="")
                print(f"  # {len(own)} layers, 80 % within {low:.2f} to {high:.2f}")
            print("    },")


if __name__ == "__main__":
    main()
