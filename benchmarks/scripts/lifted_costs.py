"""What it costs that blocks need not hand one state from one to the next and nothing else, beside plain autograd.

python benchmarks/scripts/lifted_costs.py
torchrun --nproc-per-node 2 benchmarks/scripts/lifted_costs.py

The first prints a table: the time of a training step (medians of interleaved repeats) and the peak of memory, as shares
of those of the same model without an engine. The second tells when gradients are there for DDP to reduce.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import mean, median
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from gradfree.benchmarks.timing.allocations import peak_memory
from gradfree.registry import create_engine

LENGTH, WIDTH, BATCH, REPEATS = 12, 256, 512, 9
ENGINES: dict[str, dict[str, Any] | None] = {
    "autograd": None,
    "link by link": {"name": "backprop", "plain": False},
    "k = 1": {"name": "highway_bp", "iterations": 1},
}


class DemandingBlock(nn.Module):
    """x + MLP(LN(x)), and what is asked of it besides."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind = kind
        self.side = nn.Parameter(torch.zeros(WIDTH)) if kind == SIDES else None
        self.branch = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.kept: Tensor | None = None

    def forward(self, x: Tensor, side: Tensor | None = None) -> Any:
        """Return the next state, or a tuple."""
        g: Tensor = self.branch(x if side is None else x + side)
        if self.kind == INSIDE:
            self.kept = g
        return (x + g, g.mean(-1)) if self.kind == TUPLES else x + g


NOTHING, TUPLES, SIDES = "nothing else", "blocks return tuples, the loss uses all", "each block has an input of its own"
BETWEEN, CHECKPOINTS = "something is computed behind each third block", "checkpoints around blocks"
INSIDE = "the loss uses tensors from inside, retain_graph"
KINDS = (NOTHING, TUPLES, SIDES, BETWEEN, CHECKPOINTS, INSIDE)


class DemandingNetwork(nn.Module):
    """Blocks of one kind; its output is the loss."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind, self.stem = kind, nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(DemandingBlock(kind) for _ in range(LENGTH))

    def forward(self, x: Tensor) -> Tensor:
        """Return the loss."""
        h, more = self.stem(x), []
        for n, block in enumerate(self.blocks):
            assert isinstance(block, DemandingBlock)
            given = (h,) if block.side is None else (h, torch.tanh(block.side))
            h = checkpoint(block, *given, use_reentrant=False) if self.kind == CHECKPOINTS else block(*given)
            if self.kind == TUPLES:
                h, beside = h
                more.append(beside)
            elif block.kept is not None:
                more.append(block.kept)
                block.kept = None
            if self.kind == BETWEEN and n % 3 == 2:
                h = h * 1.01
        loss: Tensor = h.square().mean() + sum(t.square().mean() for t in more)
        return loss


@contextmanager
def engine_on(model: nn.Module, engine: str) -> Iterator[None]:
    """Have the engine on the blocks of ``model``, or none."""
    options = ENGINES[engine]
    if options is None:
        yield
    else:
        with create_engine(**options).attach(model, ["blocks"], batched=False):
            yield


def step(model: nn.Module, x: Tensor, engine: str) -> None:
    """Take a forward and a backward pass."""
    model.zero_grad()
    model(x).backward(retain_graph=ENGINES[engine] is not None and getattr(model, "kind", None) == INSIDE)


def seconds(work: Callable[[], None]) -> float:
    """Return how long ``work`` takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def costs(kind: str) -> dict[str, tuple[float, float]]:
    """Return the shares of autograd's time and memory of each engine."""
    torch.manual_seed(0)
    model, x = DemandingNetwork(kind), torch.randn(BATCH, WIDTH)
    times: dict[str, list[float]] = {engine: [] for engine in ENGINES}
    bytes_of = {}
    for _ in range(REPEATS + 1):
        for engine, taken in times.items():
            with engine_on(model, engine):
                step(model, x, engine)
                taken.append(seconds(lambda engine=engine: step(model, x, engine)))  # type: ignore[misc]
    for engine in ENGINES:
        with engine_on(model, engine):
            model.zero_grad()
            bytes_of[engine] = peak_memory(lambda engine=engine: step(model, x, engine), "cpu")  # type: ignore[misc]
    one, least = median(times["autograd"][1:]), bytes_of["autograd"]
    return {e: (median(taken[1:]) / one, bytes_of[e] / least) for e, taken in times.items() if e != "autograd"}


def table() -> None:
    """Print the costs of each kind of block."""
    print("| what blocks do besides | link by link: time | memory | k = 1: time | memory |\n|---|---|---|---|---|")
    for kind in KINDS:
        cells = [f"{share:.2f}" for pair in costs(kind).values() for share in pair]
        print(f"| {kind} | {' | '.join(cells)} |", flush=True)


def overlap() -> None:
    """Print, on the first rank, when in the backward pass gradients are there to be reduced, in shares of it."""
    distributed.init_process_group("gloo")
    x, ready = torch.randn(BATCH, WIDTH), list[float]()

    def reduce(group: Any, bucket: Any) -> Any:
        ready.append(time.perf_counter())
        return allreduce_hook(group, bucket)

    reduce.__annotations__.clear()  # DDP holds them to classes, and they are strings here.
    for engine in ENGINES:
        model = DemandingNetwork(NOTHING)
        with engine_on(model, engine):
            parallel = DistributedDataParallel(model, bucket_cap_mb=1)
            parallel.register_comm_hook(None, reduce)
            shares = []
            for _ in range(REPEATS + 1):
                loss = parallel(x)
                ready.clear()
                start = time.perf_counter()
                loss.backward()
                whole = time.perf_counter() - start
                shares.append([(moment - start) / whole for moment in ready])
        if distributed.get_rank() == 0:
            first, middle = median(s[0] for s in shares[1:]), median(mean(s) for s in shares[1:])
            print(f"{engine}: first bucket after {first:.2f} of the backward pass, all on average after {middle:.2f}")
    distributed.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    overlap() if "RANK" in os.environ else table()
