"""What a training step costs under each kind of feedback alignment, in units of autograd's.

    python benchmarks/scripts/fa_cost.py [--threads 1] [--rounds 15]

Forward pass, backward pass and SGD step; medians in turns, on a ResNet of 14 layers and a GPT of 4.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

import gradfree

FEEDBACK = (None, "random", "sign", "usf", "brsf", "frsf", "learned")
"""Of ``fa``; ``None`` is autograd."""


def cases() -> dict[str, tuple[nn.Module, Tensor, int]]:
    """Return model, batch and number of classes by name."""
    resnet = gradfree.create_model("preact_resnet", depth=14, in_channels=3, num_classes=10)
    gpt = gradfree.create_model("gpt", vocab_size=65, context=64, layers=4, width=128, heads=4)
    return {
        "ResNet of 14 layers": (resnet, torch.randn(32, 3, 32, 32), 10),
        "GPT of 4 layers": (gpt, torch.randint(65, (16, 64)), 65),
    }


def timed(model: nn.Module, x: Tensor, classes: int, feedback: str | None) -> float:
    """Return the seconds of a step, behind one that is not timed."""
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    engine: Any = None if feedback is None else gradfree.create_engine("fa", feedback=feedback)
    with nullcontext() if engine is None else engine.attach(model):
        for _ in range(2):
            start = perf_counter()
            optimizer.zero_grad()
            out = model(x).flatten(0, -2)
            nn.functional.cross_entropy(out, torch.arange(len(out)) % classes).backward()
            optimizer.step()
            seconds = perf_counter() - start
    return seconds


def main() -> None:
    """Print a row for each model and kind of feedback."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for name, case in cases().items():
        times: dict[str | None, list[float]] = {feedback: [] for feedback in FEEDBACK}
        for _ in range(options.rounds):
            for feedback in FEEDBACK:
                times[feedback].append(timed(*case, feedback))
        plain = median(times[None])
        for feedback in FEEDBACK:
            ratios = sorted(t / base for t, base in zip(times[feedback], times[None], strict=True))
            print(
                f"{name:20} {feedback or 'autograd':9} {1e3 * median(times[feedback]):7.1f} ms "
                f"{median(times[feedback]) / plain:5.2f}  by turns {median(ratios):5.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
