"""Measure every number of ``gradfree/devices/costs.py`` on this machine, and print it beside the one in the code.

``python benchmarks/scripts/costs.py``, on an idle machine, in one thread; ``--only NAME`` measures one. A bound is the
size from which the other of two methods is faster, and is as coarse as the sizes that are tried: powers of two. A
number that is off by less than a factor of two chooses the same methods nearly everywhere.

``--packed 240`` also fits the coefficients of ``gradfree/devices/packed_costs.py``, in so many seconds.
"""

from __future__ import annotations

import argparse
import runpy
import statistics
import warnings
from collections.abc import Callable
from copy import deepcopy
from dataclasses import fields
from functools import cache, partial
from math import isqrt, log
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn

import gradfree
from gradfree.algebra.time_scan import scan as linear_scan
from gradfree.benchmarks.timing.crossovers import Bench, Run, both_passes, bound, crossover, fastest, line, powers
from gradfree.devices import costs
from gradfree.devices.costs import UNLIMITED, Costs, best_count, costs_of, free_rows
from gradfree.devices.hardware import description, is_available, runs_cudnn
from gradfree.models import ParaGRU
from gradfree.newton.all_steps import TorchCellSteps
from gradfree.time.forward import Recurrence
from gradfree.torchside.graph import walk


def layer(
    bench: Bench,
    kind: Callable[..., nn.RNNBase],
    shape: tuple[int, int, int],
    dtype: torch.dtype = torch.float32,
    inputs: int = 16,
    autocast: bool = False,
) -> Run:
    """Return both passes of a layer under ``backprop``; its shape is (T, B, H)."""
    length, batch, units = shape
    module = kind(inputs, units, device=bench.device, dtype=dtype)
    gradfree.create_engine("backprop").attach(module)
    context = torch.autocast(bench.device.type, torch.bfloat16) if autocast else None
    return both_passes(module, bench.randn(length, batch, inputs, dtype=dtype), context)


def equal_rows(start: float, row: float) -> float:
    """Return how many rows take as long as the start."""
    return max(start / row, 0.1) if row else 1e6


@cache
def step_of_kernel(bench: Bench, kind: Callable[..., nn.RNNBase], units: int) -> tuple[float, float]:
    """Return the start-up time of a step of torch's kernel, and how many rows take as long."""
    module, length, batches = kind(16, units, device=bench.device), 64, bench.of([1, 4, 16, 64, 256])

    def run(x: Tensor) -> object:
        with torch.no_grad():
            return module(x)

    start, row = line(batches, bench.times(*(partial(run, bench.randn(length, batch, 16)) for batch in batches)))
    return start / length, equal_rows(start, row)


def rows_of(kind: Callable[..., nn.RNNBase], units: int = 64) -> Callable[[Bench], float]:
    """Return what measures the rows that take as long as a step's start."""
    return lambda bench: step_of_kernel(bench, kind, units)[1]


def own_step(bench: Bench, batch: int, units: int, length: int) -> tuple[Callable[..., Any], Tensor, Tensor, Tensor]:
    """Return a step function, its first carry, its inputs and its weight."""
    weight = (0.3 * torch.randn(units, units, device=bench.device) / units**0.5).requires_grad_()

    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(h @ weight + x)
        return h, h

    return step, torch.zeros(batch, units, device=bench.device), bench.randn(length, batch, units), weight


def scanned(engine: Any, step: Callable[..., Any], init: Tensor, xs: Tensor, weight: Tensor) -> object:
    """Run both passes of a scan."""
    _, ys = gradfree.scan(step, init, xs, engine=engine)
    return torch.autograd.grad(ys.sum(), [weight, xs])


def rows_of_any(bench: Bench) -> float:
    """Measure steps of a loop in Python."""
    batches = bench.of([1, 16, 64, 256, 1024])
    runs = [partial(scanned, "backprop", *own_step(bench, batch, 64, 32)) for batch in batches]
    start, row = line(batches, bench.times(*runs))
    return equal_rows(start, row)


def rows_power(bench: Bench) -> float:
    """Compare 64 and 256 units."""
    return log(step_of_kernel(bench, nn.GRU, 64)[1] / step_of_kernel(bench, nn.GRU, 256)[1]) / log(4)


def fewest_units(bench: Bench) -> float:
    """Compare 16 and 64 units."""
    more = step_of_kernel(bench, nn.GRU, 16)[1] / step_of_kernel(bench, nn.GRU, 64)[1]
    return min(64.0, 64 / more ** (1 / max(rows_power(bench), 0.1)))


def persistent_units(bench: Bench) -> float:
    """Find the widest layer whose rows cost about as little as those of 64 units."""
    if not runs_cudnn(bench.device):
        return 0
    enough = step_of_kernel(bench, nn.GRU, 64)[1] / 2
    return max(units for units in (64, 128, 192, 256, 384) if step_of_kernel(bench, nn.GRU, units)[1] >= enough)


def newton_sweep(bench: Bench, length: int) -> Run:
    """Return a sweep over all steps of a GRU."""
    module, x = nn.GRU(16, 64, device=bench.device), torch.randn(length, 1, 16, device=bench.device)
    weights = [weight.detach() for weight in module.parameters()]
    steps = TorchCellSteps(Recurrence(x, [x.new_zeros(1, 1, 64)], weights, "GRU"), "diagonal")
    return partial(steps.sweep, steps.start())


@cache
def newton_line(bench: Bench) -> tuple[float, float]:
    """Return start-up time and time for a step of a Newton sweep, in start-up times of the kernel's steps."""
    lengths, (start, _) = bench.of([256, 1024, 4096]), step_of_kernel(bench, nn.GRU, 64)
    at_once, each = line(lengths, bench.times(*(newton_sweep(bench, length) for length in lengths)))
    return at_once / start, each / start


def sweeps_in(run: Run) -> float:
    """Return the number of sweeps of both passes."""
    with gradfree.engine_figures() as figures:
        run()
    return sum(float(value) for own in figures.values() for name, value in own.items() if name.endswith("sweeps"))


@cache
def loop_line(bench: Bench) -> tuple[float, float]:
    """Return start-up time of a sweep over a loop, and time for each number of its Jacobians, in steps of the loop."""
    numbers, taken = [], []
    sizes = [(512, 2), (512, 8)] if bench.small else [(512, 2), (512, 8), (4096, 2), (4096, 8)]
    for length, units in sizes:
        given = own_step(bench, 1, units, length)
        run = partial(scanned, gradfree.create_engine("newton", max_sweeps=length), *given)
        sweep, loop = bench.times(run, partial(scanned, "backprop", *given))
        numbers.append(length * units**2)
        taken.append(sweep / max(1.0, sweeps_in(run)) / (loop / length))
    return line(numbers, taken)


def fewest(module: Callable[[], nn.Module]) -> Callable[[Bench], float]:
    """Return what counts the sweeps of a layer's forward pass: the fewest of untrained ones."""

    def measure(bench: Bench) -> float:
        found = []
        for _ in range(2 if bench.small else 8):
            made = module().to(bench.device)
            with gradfree.create_engine("newton", max_sweeps=64).attach(made), gradfree.engine_figures() as figures:
                made(bench.randn(256, 1, 16))[0].sum().backward()
            found += [
                float(value) for own in figures.values() for name, value in own.items() if name == "forward sweeps"
            ]
        return min(found)

    return measure


class Block(nn.Sequential):
    """A block with a skip connection."""

    def forward(self, x: Tensor) -> Tensor:
        """Return x + g(x)."""
        return x + super().forward(x)


def blocks(bench: Bench, count: int, width: int, batched: bool) -> Run:
    """Return both passes of equal blocks, as a row or one by one."""
    model = nn.Sequential(*(Block(nn.Linear(width, width), nn.Tanh()) for _ in range(count))).to(bench.device)
    gradfree.create_engine("highway_bp", iterations=0).attach(nn.Sequential(model), ["0"], batched=batched)
    x = bench.randn(16, width)
    return lambda: torch.autograd.grad(model(x).sum(), [*model.parameters()])


@cache
def batch_costs(bench: Bench) -> tuple[float, float]:
    """Return what a batch of equal modules saves for each node, and costs for each number."""
    count, rows, saved = 16, [], []
    for width in bench.of([8, 32, 128, 256, 512]):
        one, batch = bench.times(*(blocks(bench, count, width, batched) for batched in (False, True)))
        block = Block(nn.Linear(width, width), nn.Tanh())
        nodes = len(walk([block(torch.ones(16, width))]).nodes)
        rows.append((nodes, -(width * (width + 1) + nodes * 16 * width)))
        saved.append((one - batch) / count)
    found, *_ = np.linalg.lstsq(np.array(rows, dtype=float), np.array(saved), rcond=None)
    return float(found[0]), float(found[1])


def in_segments(bench: Bench, shape: tuple[int, int, int], segments: int) -> Run:
    """Return both passes of a GRU in segments; its shape is (T, B, H)."""
    length, batch, units = shape
    module = nn.GRU(16, units, device=bench.device)
    gradfree.create_engine("shooting", segments=segments).attach(module)
    return both_passes(module, bench.randn(length, batch, 16))


def min_gain(bench: Bench) -> float:
    """Compare expected with measured speed-ups of segments."""
    found = []
    for batch in bench.of([1, 2, 4, 8]):
        free, length = free_rows(torch.empty(batch, 64, device=bench.device), "GRU", fused=True), 2048
        count = best_count(length, batch, free, 32)
        expected = length * (1 + batch / free) / ((length // count + 32) * (1 + count * batch / free))
        uncut, cut = (in_segments(bench, (length, batch, 64), segments) for segments in (1, count))
        found.append(expected / bench.ratio(uncut, cut))
    return statistics.median(found)


def remainder_cost(bench: Bench) -> float:
    """Compare lengths with and without remaining steps."""
    found = []
    for count in bench.of([8, 16, 32]):
        steps = 2048 // count
        with_rest, without = (in_segments(bench, (2048 + rest, 1, 64), count) for rest in (count - 1, 0))
        found.append(bench.ratio(with_rest, without) / ((steps + 32 + count - 1) / (steps + 32)))
    return statistics.median(found)


def shortest_evaluated(bench: Bench) -> float:
    """Find the steps of which asking an engine takes a twentieth."""
    plain = nn.GRU(16, 64, device=bench.device).eval()
    asking, x = deepcopy(plain), torch.randn(33, 1, 16, device=bench.device)
    gradfree.create_engine("shooting").attach(asking)

    def run(module: nn.Module) -> None:
        # An engine is asked again for another length.
        with torch.no_grad():
            module(x[1:])
            module(x)

    with patch("gradfree.time.torch_layer_site.SHORTEST_EVALUATED", 0):
        without, asked = bench.times(partial(run, plain), partial(run, asking))
    return 20 * max(0.0, asked - without) / 2 / (without / 65)


def cut_scan(bench: Bench) -> float:
    """Compare a loop with one in the fastest of some numbers of segments."""

    def ratio(length: int) -> float:
        given = own_step(bench, 2, 8, length)
        cuts = [gradfree.create_engine("shooting", segments=count) for count in (2, 4, 8)]
        loop, *cut = bench.times(*(partial(scanned, engine, *given) for engine in ("backprop", *cuts)))
        return loop / min(cut)

    return crossover(bench.of([32, 64, 128, 256, 512]), ratio)


def linear_recurrence(bench: Bench, numbers: int) -> Run:
    """Return a linear recurrence over 256 steps."""
    terms, factors = torch.rand(2, 256, numbers, device=bench.device)
    return partial(linear_scan, terms, factors)


MEASURES: dict[str, Callable[[Bench], float]] = {
    "rows": rows_of(nn.GRU),
    "rows_of_any": rows_of_any,
    "rows_power": rows_power,
    "fewest_units": fewest_units,
    "rows_of_onednn": lambda bench: rows_of(nn.LSTM)(bench) if bench.device.type == "cpu" else 0.0,
    "rows_of_persistent": lambda bench: rows_of(nn.GRU)(bench) if runs_cudnn(bench.device) else 0.0,
    "persistent_units": persistent_units,
    "sweep_row": lambda bench: newton_line(bench)[1] * step_of_kernel(bench, nn.GRU, 64)[1],
    "sweep_start": lambda bench: newton_line(bench)[0],
    "loop_sweep_start": lambda bench: loop_line(bench)[0],
    "loop_sweep_numbers": lambda bench: 1 / (loop_line(bench)[1] or 1e-9),
    "node": lambda bench: batch_costs(bench)[0],
    "number": lambda bench: batch_costs(bench)[1],
    "separate_walks": bound("separate_walks", powers(2, 8), lambda bench, n: blocks(bench, n, 16, batched=False)),
    "kept_gates": bound(
        "kept_gates",
        [16 * units**2 for units in (32, 64, 128, 256, 512)],
        lambda bench, n: layer(bench, nn.GRU, (64, 8, isqrt(n // 16)), inputs=isqrt(n // 16)),
    ),
    "closed_rnn": bound("closed_rnn", powers(10, 17), lambda bench, n: layer(bench, nn.RNN, (64, n // 128, 128))),
    "closed_lstm": bound(
        "closed_lstm", powers(6, 12), lambda bench, n: layer(bench, nn.LSTM, (64, n // 32, 32), torch.float64)
    ),
    "closed_gru_autocast": bound(
        "closed_gru_autocast", powers(8, 14), lambda bench, n: layer(bench, nn.GRU, (64, n // 64, 64), autocast=True)
    ),
    "closed_gru_unaligned": bound(
        "closed_gru_unaligned", powers(9, 14), lambda bench, n: layer(bench, nn.GRU, (64, 64, n // 64 + 1))
    ),
    "closed_gru_unaligned_rows": bound(
        "closed_gru_unaligned_rows", powers(2, 7), lambda bench, n: layer(bench, nn.GRU, (16, n, 1025))
    ),
    "closed_gru_half_rows": bound(
        "closed_gru_half_rows", powers(0, 5), lambda bench, n: layer(bench, nn.GRU, (64, n, 64), torch.float16)
    ),
    "scan_numbers": bound("scan_numbers", powers(10, 17), linear_recurrence),
    "chunk_numbers": fastest("chunk_numbers", powers(12, 20), partial(newton_sweep, length=8192)),
    "cached_numbers": fastest("cached_numbers", powers(13, 20), partial(in_segments, shape=(4096, 1, 64), segments=64)),
    "MIN_GAIN": min_gain,
    "REMAINDER_COST": remainder_cost,
    "FEWEST_SWEEPS": fewest(lambda: nn.GRU(16, 16)),
    "FEWEST_EXACT_SWEEPS": fewest(lambda: ParaGRU(16, 16)),
    "SHORTEST": bound("SHORTEST", powers(1, 6), lambda bench, n: layer(bench, nn.GRU, (n, 4, 32))),
    "SHORTEST_EVALUATED": shortest_evaluated,
    "SHORTEST_SCAN": cut_scan,
}
"""What measures each number; a test compares the names with those in the code."""


def in_code(name: str, device: torch.device) -> float:
    """Return the number that stands in the code."""
    return getattr(costs_of(device) if name in {field.name for field in fields(Costs)} else costs, name)


def shown(number: float) -> str:
    """Return a number in three digits."""
    return "no bound" if number >= UNLIMITED else f"{number:.3g}"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="cpu, cuda, ...")
    parser.add_argument("--seconds", type=float, default=0.3, help="for each pass that is compared")
    parser.add_argument("--small", action="store_true", help="try two sizes of each only, to see that it runs")
    parser.add_argument("--only", choices=MEASURES, nargs="+", default=[*MEASURES], metavar="NAME")
    parser.add_argument("--packed", type=float, default=0.0, help="seconds for packed sequences, on a CPU")
    options = parser.parse_args()
    if not is_available(options.device):
        parser.error(f"there is no device {options.device!r} here.")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    bench = Bench(torch.device(options.device), options.seconds, options.small)
    print(f"{description(bench.device)}, torch {torch.__version__}\n{'':28}{'in the code':>12}{'here':>12}")
    for name in options.only:
        try:
            found = shown(MEASURES[name](bench))
        except (gradfree.ChainError, RuntimeError) as error:
            found = f"{type(error).__name__}: {error}".splitlines()[0]
        print(f"{name:28}{shown(in_code(name, bench.device)):>12}{found:>12}", flush=True)
    if options.packed:
        runpy.run_path(str(Path(__file__).with_name("packed_costs.py")))["print_tables"](options.packed)


if __name__ == "__main__":
    main()
