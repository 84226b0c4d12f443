"""What a backward pass takes whose blocks lie on ranks, as a share of one process's.

torchrun --nproc-per-node 2 -m gradfree.testing.runs.rank_timing [--waiting]

64 blocks of real work, one thread a rank; with ``--waiting`` blocks that wait instead, as they would for a device of
their own. Prints a row for each k, and what a rank holds. Medians of interleaved repeats.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, distributed, nn

from gradfree.ranks.stage import layer_parallel

LENGTH, BATCH, REPEATS = 64, 256, 7


class Working(nn.Module):
    """x + MLP(LN(x)), 256 wide, 512 inside."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Sequential(nn.LayerNorm(256), nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256))

    def forward(self, x: Tensor) -> Tensor:
        """Return the next state."""
        return x + self.branch(x)


class Wait(torch.autograd.Function):
    """Takes so many seconds forward, so many backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        """Wait."""
        ctx.seconds = backward
        time.sleep(forward)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None, None]:
        """Wait."""
        time.sleep(ctx.seconds)
        return cotangent, None, None


class Waiting(nn.Module):
    """x + a branch that waits: so many seconds a sample forward, for the cotangent of x, and for its weight's gradient.

    For that only where it is asked for, as in torch's layers.
    """

    def __init__(self, seconds: float):
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        """Return the next state."""
        seconds = self.seconds * len(x)
        return x + Wait.apply(self.weight, 0.0, seconds) * Wait.apply(x, seconds, seconds)


def backward_time(model: Callable[[Tensor], Tensor], x: Tensor) -> float:
    """Return the seconds of one backward pass, from when all ranks begin it."""
    loss = model(x).square().mean()
    distributed.barrier()
    start = time.perf_counter()
    loss.backward()
    distributed.barrier()
    return time.perf_counter() - start


def main() -> None:
    """Print the table on the first rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--waiting", action="store_true")
    # 2 ms a batch.
    block = partial(Waiting, 0.002 / BATCH) if parser.parse_args().waiting else Working
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    rank, count = distributed.get_rank(), distributed.get_world_size()
    x = torch.randn(BATCH, 256, generator=torch.Generator().manual_seed(0))

    def made() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(block() for _ in range(LENGTH)))

    one, rows = made(), {}
    for k in range(count):
        rows[k] = made()
        layer_parallel(rows[k], "highway_bp", chains=[""], iterations=k)
    times: dict[int | None, list[float]] = {k: [] for k in (None, *rows)}
    for _ in range(REPEATS):
        # One process alone: the others wait for it.
        times[None].append(backward_time(one if rank == 0 else nn.Parameter, x))
        for k, model in rows.items():
            times[k].append(backward_time(model, x))
    held = sum(p.numel() for p in rows[0].parameters()) / sum(p.numel() for p in one.parameters())
    if rank == 0:
        alone = median(times[None][1:])
        print(f"one process {1e3 * alone:.0f} ms; a rank holds {held:.2f} of the weights")
        for k in rows:
            print(f"{count} ranks, k = {k}: {median(times[k][1:]) / alone:.2f} of it")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
