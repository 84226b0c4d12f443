"""What ``run_with_resets`` gains over a loop with one call a step and masked states.

    python benchmarks/scripts/resets.py [--threads 1] [--rounds 7]

Forward and backward pass, medians in turns: the loop, ``run_with_resets`` without an engine and under ``shooting``.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

import gradfree

CASES: tuple[tuple[Any, int, int, int, int], ...] = (
    (nn.LSTM, 128, 8, 64, 50),
    (nn.LSTM, 1024, 4, 128, 100),
    (nn.GRU, 2048, 1, 64, 200),
    (nn.GRU, 128, 8, 64, 50),
    (nn.RNN, 1024, 4, 128, 100),
)
"""Layer, steps, sequences, units, and steps from one reset to the next on average."""


def by_steps(layer: Any, x: Tensor, state: Any, resets: Tensor) -> tuple[Tensor, Any]:
    """Run one call a step."""
    outs = []
    for step, reset in zip(x, resets, strict=True):
        kept = (~reset)[None, :, None]
        state = tuple(part * kept for part in state) if isinstance(state, tuple) else state * kept
        out, state = layer(step[None], state)
        outs.append(out)
    return torch.cat(outs), state


def main() -> None:
    """Print a row for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    for kind, steps, batch, units, every in CASES:
        torch.manual_seed(0)
        layer = kind(32, units)
        x, resets = torch.randn(steps, batch, 32), torch.rand(steps, batch) < 1 / every
        zeros = torch.zeros(1, batch, units)
        state = (zeros, zeros) if kind is nn.LSTM else zeros

        def timed(run: Callable[..., Any], layer: Any = layer, args: Any = (x, state, resets)) -> float:
            layer.zero_grad()
            start = perf_counter()
            run(layer, *args)[0].pow(2).mean().backward()
            return perf_counter() - start

        times: dict[str, list[float]] = {"loop": [], "one call": [], "one call, shooting": []}
        timed(gradfree.run_with_resets)
        for _ in range(options.rounds):
            times["loop"].append(timed(by_steps))
            times["one call"].append(timed(gradfree.run_with_resets))
            with gradfree.create_engine("shooting").attach(layer):
                for _ in range(2):
                    timed(gradfree.run_with_resets)
                times["one call, shooting"].append(timed(gradfree.run_with_resets))
        seconds = {name: median(taken) for name, taken in times.items()}
        gains = ", ".join(f"{name} {1e3 * s:.1f} ms ({seconds['loop'] / s:.1f}x)" for name, s in seconds.items())
        print(f"{kind.__name__} (T, B, H) = {steps, batch, units}, a reset every {every} steps: {gains}", flush=True)


if __name__ == "__main__":
    main()
