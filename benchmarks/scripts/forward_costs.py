"""What a forward-only pipeline's steps take, and what a rank holds of them; 1F1B of torch's beside it.

torchrun --nproc-per-node N benchmarks/scripts/forward_costs.py

8 layers that wait, for a time that goes with the size of the batch, as they would for a device of their own: a unit
forward, one for the cotangent of the input, one for the gradient of the weights. Several steps in a row, medians of
interleaved repeats, as shares of one process's with backpropagation, beside what the model of the cost says. MiB are
of 33 layers that compute, weights not counted: the most that steps have allocated at a time, on the rank that has most.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from statistics import median
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from gradfree.benchmarks.maps.rank_blocks import in_parts
from gradfree.benchmarks.maps.step_time import StepTime, forward_only_share
from gradfree.benchmarks.timing.allocations import allocations
from gradfree.layers.roles import register_layer
from gradfree.pipelines.forward_pipeline import forward_pipeline

LAYERS, BATCH, CLASSES, STEPS, REPEATS = 8, 256, 10, 3, 2
MICROBATCHES = (1, 4, 16)
UNIT = 0.064 / BATCH
"""Seconds that a layer waits for a sample."""


class _Carried(torch.autograd.Function):
    """x -> x, a unit a sample; as much for its cotangent."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Wait."""
        time.sleep(UNIT * len(x))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        """Wait."""
        time.sleep(UNIT * len(cotangent))
        return cotangent


class _Weighed(torch.autograd.Function):
    """(x, weight) -> zero, at once; a unit a sample for the weight's gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        """Do nothing."""
        return torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[None, Tensor]:
        """Wait."""
        time.sleep(UNIT * len(cotangent))
        return None, cotangent.new_zeros(1)


class WaitingLayer(nn.Module):
    """The identity, with a weight that does nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x``."""
        return _Carried.apply(x) + _Weighed.apply(x.detach(), self.weight)


def _adjoint(_: nn.Module, cotangent: Tensor, weight: Tensor) -> Tensor:
    return _Carried.apply(cotangent)


register_layer(WaitingLayer, "weights", linear=_adjoint, adjoint=_adjoint)


def squares(out: Tensor, targets: Tensor) -> Tensor:
    """Return a loss, a mean over the samples."""
    return (out - targets).square().mean()


def forward_only(model: nn.Module, microbatches: int, x: Tensor) -> Callable[[], None]:
    """Return what takes a step through this rank's part of a forward-only pipeline."""
    pipeline = forward_pipeline(model, squares, chains=[""], microbatches=microbatches, temperature=1.0)

    def step() -> None:
        pipeline.step(x, torch.zeros(len(x), CLASSES))
        model.zero_grad()

    return step


def one_forward_one_backward(model: nn.Sequential, microbatches: int, x: Tensor) -> Callable[[], None]:
    """Return what takes a step through this rank's part of 1F1B, of GPipe with fewer microbatches than ranks."""
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    run = len(model) // ranks
    part = model[rank * run : (rank + 1) * run if rank < ranks - 1 else None]
    stage = PipelineStage(part, rank, ranks, torch.device("cpu"))
    schedule = Schedule1F1B if microbatches >= ranks else ScheduleGPipe
    steps = schedule(stage, n_microbatches=microbatches, loss_fn=squares)
    given = (x,) if rank == 0 else ()
    target: dict[str, Any] = {"target": torch.zeros(len(x), CLASSES)} if rank == ranks - 1 else {}

    def step() -> None:
        steps.step(*given, **target)
        part.zero_grad()

    return step


def several(step: Callable[[], object]) -> None:
    """Take some steps."""
    for _ in range(STEPS):
        step()


def took(run: Callable[[], Any]) -> float:
    """Return the seconds until all ranks have run it."""
    distributed.barrier()
    start = time.perf_counter()
    run()
    distributed.barrier()
    return time.perf_counter() - start


def peak(step: Callable[[], object]) -> int:
    """Return the bytes that steps have allocated at the worst moment, above the best one."""
    step()
    levels = list(accumulate(allocations(partial(several, step)), initial=0))
    return max(levels) - min(levels)


def largest(number: int) -> int:
    """Return the largest of what the ranks have."""
    its: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(its, number)
    return max(its)


def main() -> None:
    """Print both tables on the first rank."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    x = torch.randn(BATCH, CLASSES, generator=torch.Generator().manual_seed(0))

    def waiting() -> nn.Sequential:
        return nn.Sequential(*(WaitingLayer() for _ in range(LAYERS)))

    def working() -> nn.Sequential:
        layers = [layer for _ in range(2 * LAYERS) for layer in (nn.Linear(256, 256, bias=False), nn.Tanh())]
        return nn.Sequential(*layers, nn.Linear(256, CLASSES, bias=False))

    one = waiting()
    runs: dict[str, tuple[float, Callable[[], object]]] = {}
    runs["one process"] = 1.0, partial(in_parts, one, x) if rank == 0 else lambda: None
    for m in MICROBATCHES:
        runs[f"forward only, {m} microbatches"] = forward_only_share(ranks, m), forward_only(waiting(), m, x)
        runs[f"1F1B, {m} microbatches"] = StepTime().one_f_one_b(ranks, m), one_forward_one_backward(waiting(), m, x)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(REPEATS + 1):
        for name, (_, run) in runs.items():
            times[name].append(took(partial(several, run)))
    wide = torch.randn(1024, 256, generator=torch.Generator().manual_seed(0))
    bytes_of = {"one process": largest(peak(partial(in_parts, working(), wide)))}
    for m in MICROBATCHES:
        for kind, make in (("forward only", forward_only), ("1F1B", one_forward_one_backward)):
            bytes_of[f"{kind}, {m} microbatches"] = largest(peak(make(working(), m, wide)))
    if rank == 0:
        alone = median(times["one process"][1:])
        for name, (share_of_it, _) in runs.items():
            print(
                f"{name}: {median(times[name][1:]) / alone:.2f} of one process, {share_of_it:.2f} by the model; "
                f"at most {bytes_of[name] / 2**20:.1f} MiB on a rank"
            )
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
