"""What a training step takes, and what a rank holds, where one model lies on several; pipelines of torch beside it.

torchrun --nproc-per-node N -m gradfree.testing.runs.rank_costs

16 blocks that wait, for a time that goes with the size of the batch, as they would for a device of their own: a unit
forward, one for the cotangent of the input, one for the gradient of the weights. Steps at one global batch; medians of
interleaved repeats, as shares of one process's, beside what the model of the cost says. Bytes are those of blocks that
compute, under AdamW: weights, their gradients, the optimizer's state, and what autograd keeps.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from gradfree.ranks.stage import layer_parallel
from gradfree.testing.runs.rank_timing import Waiting, Working

BLOCKS, BATCH, REPEATS = 16, 256, 5
UNIT = 0.006
"""Seconds that a block waits for a whole batch."""


waiting = partial(Waiting, UNIT / BATCH)


def modelled(ranks: int, sweeps: int | None = None, microbatches: int = 1, pull: int = 1) -> float:
    """Return the share of one process's step that the model of the cost says, without links.

    Args:
        ranks: n.
        sweeps: k of ``layer_parallel``: the forward pass goes from rank to rank, the backward pass runs on all at once,
            2 + k · ``pull`` units. ``None``: a pipeline, all n of which work for m of m + n - 1 turns.
        microbatches: m of a pipeline.
        pull: the units of a sweep through a block.
    """
    if sweeps is None:
        return (1 + (ranks - 1) / microbatches) / ranks
    return (1 + (2 + pull * sweeps) / ranks) / 3


def step(model: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """Take a forward and a backward pass."""
    model(x).square().mean().backward()


def pipeline(schedule: Any, microbatches: int, x: Tensor) -> Callable[[], None]:
    """Return what takes a step through this rank's part of a pipeline."""
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    part = nn.Sequential(*(waiting() for _ in range(BLOCKS // ranks)))
    stage = PipelineStage(part, rank, ranks, torch.device("cpu"))
    steps = schedule(stage, n_microbatches=microbatches, loss_fn=lambda out, _: out.square().mean())
    given = (x,) if rank == 0 else ()
    return lambda: steps.step(*given, **({"target": x} if rank == ranks - 1 else {}))


def took(run: Callable[[], Any]) -> float:
    """Return the seconds until all ranks have run it."""
    distributed.barrier()
    start = time.perf_counter()
    run()
    distributed.barrier()
    return time.perf_counter() - start


def held(model: nn.Module, x: Tensor) -> dict[str, int]:
    """Return the bytes that this rank holds of a training step, by what they are."""
    optimizer = torch.optim.AdamW(model.parameters())
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    states = [t for state in optimizer.state.values() for t in state.values()]
    size = sum(p.nbytes for p in model.parameters())
    activations = sum(size for pointer, size in kept.items() if pointer not in weights)
    return {"weights and gradients": 2 * size, "AdamW": sum(t.nbytes for t in states), "activations": activations}


def main() -> None:
    """Print both tables on the first rank."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    x = torch.randn(BATCH, 256, generator=torch.Generator().manual_seed(0))
    one = nn.Sequential(*(waiting() for _ in range(BLOCKS)))
    runs: dict[str, tuple[float, Callable[[], Any]]] = {}
    runs["one process"] = 1.0, partial(step, one, x) if rank == 0 else lambda: None
    for k in range(ranks if ranks > 1 else 0):
        model = nn.Sequential(*(waiting() for _ in range(BLOCKS)))
        layer_parallel(model, "highway_bp", chains=[""], iterations=k)
        runs[f"layer_parallel, k = {k}"] = modelled(ranks, sweeps=k, pull=2), partial(step, model, x)
    for microbatches in (1, ranks, 4 * ranks) if ranks > 1 else ():
        for schedule in (ScheduleGPipe, Schedule1F1B) if microbatches >= ranks else (ScheduleGPipe,):
            name = f"{schedule.__name__.removeprefix('Schedule')}, {microbatches} microbatches"
            runs[name] = modelled(ranks, None, microbatches), pipeline(schedule, microbatches, x)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(REPEATS + 1):
        for name, (_, run) in runs.items():
            times[name].append(took(run))
    working = nn.Sequential(*(Working() for _ in range(BLOCKS)))
    if ranks > 1:
        layer_parallel(working, "highway_bp", chains=[""], iterations=1)
    its: list[Any] = [None] * ranks
    distributed.all_gather_object(its, held(working, x))
    if rank == 0:
        alone = median(times["one process"][1:])
        for name, (share, _) in runs.items():
            print(f"{name}: {median(times[name][1:]) / alone:.2f} of one process, {share:.2f} by the model")
        for what in its[0]:
            print(f"{what}: {max(own[what] for own in its) / 2**20:.2f} MiB on the rank that holds most")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
