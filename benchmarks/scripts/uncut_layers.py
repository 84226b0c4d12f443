"""Whether an engine ever makes a recurrent layer slower than torch: one row for each of 60 sizes.

    python benchmarks/scripts/uncut_layers.py [--engines shooting auto] [--threads 1] [--sizes 60] [--out FILE.csv]

Steps of the plain layer and of engines in turns, medians, after what each engine tries at first. A row fails where an
engine takes more than 1.05 of the plain layer's time, and more than 100 µs longer. With ``--engines backprop`` the rows
are what ``own_kernel_is_faster`` is made of. The exit status is the number of rows that fail.
"""

from __future__ import annotations

import argparse
import csv
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import nn

import gradfree

KINDS = {"GRU": nn.GRU, "LSTM": nn.LSTM, "RNN": nn.RNN}
DTYPES = {"float32": torch.float32, "float64": torch.float64}
SIZES = (
    (1, 16, 16),
    (64, 16, 512),
    (16, 64, 64),
    (1, 128, 512),
    (64, 128, 128),
    (8, 512, 32),
    (32, 256, 256),
    (4, 1024, 128),
    (8, 2048, 64),
    (1, 8192, 64),
)
"""(B, T, H); the inputs have as many units."""
ROUNDS, SHORTEST = 5, 0.05
TRIES = {"auto": 60}
"""Steps of an optimizer before an engine is timed, where those are more than three."""


def grid() -> Iterator[tuple[str, str, tuple[int, int, int]]]:
    """Yield the 60 rows."""
    for kind in KINDS:
        for dtype in DTYPES:
            for size in SIZES:
                yield kind, dtype, size


def measure(kind: str, dtype: str, size: tuple[int, int, int], engines: Sequence[str]) -> dict[str, float]:
    """Return the seconds of a step, plain and under each engine."""
    batch, steps, units = size
    torch.manual_seed(0)
    layer = KINDS[kind](units, units).to(DTYPES[dtype])
    x = torch.randn(steps, batch, units, dtype=DTYPES[dtype])
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)

    def step() -> None:
        optimizer.zero_grad()
        layer(x)[0].pow(2).mean().backward()
        optimizer.step()

    step()
    repeats = max(1, round(SHORTEST / timed(step, 1)))
    times: dict[str, list[float]] = {name: [] for name in ("plain", *engines)}
    states: dict[str, Any] = {}
    for _ in range(ROUNDS):
        times["plain"].append(timed(step, repeats))
        for name in engines:
            with gradfree.create_engine(name).attach(layer) as handle:
                handle.load_state_dict(states.get(name, {}))
                for _ in range(1 if name in states else TRIES.get(name, 3)):
                    step()
                times[name].append(timed(step, repeats))
                states[name] = handle.state_dict()
    return {name: median(taken) for name, taken in times.items()}


def timed(step: Callable[[], None], repeats: int) -> float:
    """Return the mean seconds of a step."""
    start = perf_counter()
    for _ in range(repeats):
        step()
    return (perf_counter() - start) / repeats


def main() -> int:
    """Print the rows, and write them if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", default=["shooting", "auto"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--sizes", type=int, default=60, help="only so many rows, spread over the grid")
    parser.add_argument("--out", type=Path, help="a CSV file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    rows, failed = list(grid()), 0
    found: list[dict[str, object]] = []
    for kind, dtype, size in rows[:: max(1, len(rows) // options.sizes)]:
        seconds = measure(kind, dtype, size, options.engines)
        plain = seconds.pop("plain")
        slow = [name for name, taken in seconds.items() if taken > 1.05 * plain and taken > plain + 1e-4]
        failed += bool(slow)
        told = ", ".join(f"{name} {taken / plain:.2f}" for name, taken in seconds.items())
        verdict = f" SLOWER: {', '.join(slow)}" if slow else ""
        print(f"{kind} {dtype} (B, T, H) = {size}: {1e3 * plain:.2f} ms; {told}{verdict}", flush=True)
        found.append({"layer": kind, "dtype": dtype, "B, T, H": size, "plain (s)": plain, **seconds})
    if options.out:
        with options.out.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(found[0]))
            writer.writeheader()
            writer.writerows(found)
    print(f"{failed} of {len(found)} rows are slower than torch's own")
    return failed


if __name__ == "__main__":
    sys.exit(main())
