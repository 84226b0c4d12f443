"""What watching the gradient saves: a small GPT on Python's own help texts by Highway-BP at k = 0, watched and not.

``python .ci/watched.py OUT.jsonl``: a line of JSON for each run of 400 steps; three seeds, backpropagation beside.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import gradfree
from gradfree.benchmarks.data.bundled import pydoc

STEPS, LENGTH, BATCH, RATE, EVERY = 400, 48, 16, 3e-3, 50
ROWS = ("backprop", "highway_bp k=0", "highway_bp k=0, watched")


def batches(tokens: Tensor, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield tokens and the next of each, (16, 48), from places drawn at random."""
    drawn = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(tokens) - LENGTH - 1, (BATCH,), generator=drawn)
        found = torch.stack([tokens[start : start + LENGTH + 1] for start in starts])
        yield found[:, :-1], found[:, 1:]


def run(row: str, seed: int, train: Tensor, held_out: Tensor) -> dict[str, Any]:
    """Train, and return the loss on held-out text, what was seen of the gradient, and the time."""
    torch.manual_seed(seed)
    model = gradfree.create_model("gpt", vocab_size=127, context=LENGTH, layers=4, width=48, heads=4)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), RATE)
    watch = gradfree.GradientWatch(every=EVERY) if row.endswith("watched") else None
    if row != "backprop":
        optimizer = gradfree.EngineOptimizer(optimizer, model, "highway_bp", iterations=0, watch=watch)

    def loss_on(x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(model(x).flatten(0, 1), y.flatten())

    start = perf_counter()
    for _, batch in zip(range(STEPS), batches(train, seed), strict=False):
        optimizer.zero_grad()
        loss_on(*batch).backward()
        optimizer.step()
    seconds = perf_counter() - start
    with torch.no_grad():
        losses = [loss_on(*batch).item() for _, batch in zip(range(20), batches(held_out, 999), strict=False)]
    seen = watch and {"cosines": watch.cosines, "exact": watch.exact}
    return {"row": row, "seed": seed, "held_out": sum(losses) / len(losses), "seconds": seconds, "watch": seen}


if __name__ == "__main__":
    torch.set_num_threads(1)
    data = pydoc()
    texts = [split[0].flatten().long() for split in (data.train, data.validation)]
    for seed in range(3):
        for row in ROWS:
            with Path(sys.argv[1]).open("a", encoding="utf-8") as file:
                print(json.dumps(run(row, seed, *texts)), file=file, flush=True)
