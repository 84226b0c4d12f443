"""What a training step takes, and what a rank holds, where one model lies on several; pipelines of torch beside it.

torchrun --nproc-per-node N -m gradfree.testing.runs.rank_costs

16 blocks that wait, for a time that goes with the size of the batch, as they would for a device of their own: a unit
forward, one for the cotangent of the input, one for the gradient of the weights. Steps at one global batch; medians of
interleaved repeats, as shares of one process's, beside what ``StepTime`` says, given
what a microbatch takes one process beyond its share, and what messages between two ranks take. Bytes are those of
blocks that compute, under AdamW: weights, their gradients, the optimizer's state, and what autograd keeps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from statistics import median
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from gradfree.ranks.stage import layer_parallel
from gradfree.testing.runs.rank_timing import Waiting, Working
from gradfree.testing.runs.step_time import StepTime

BLOCKS, BATCH, REPEATS = 16, 256, 5
UNIT = 0.012
"""Seconds that a block waits for a whole batch."""

Step = Callable[[], Any]


def waiting(blocks: int) -> nn.Sequential:
    """Return blocks that wait."""
    return nn.Sequential(*(Waiting(UNIT / BATCH) for _ in range(blocks)))


def in_parts(model: Callable[[Tensor], Tensor], x: Tensor, microbatches: int = 1) -> None:
    """Take forward and backward passes, one for each part of a batch."""
    for part in x.chunk(microbatches):
        model(part).square().mean().backward()


def pipeline(schedule: Any, stages: Sequence[int], microbatches: int, x: Tensor) -> Step:
    """Return what takes a step through this rank's ``stages`` of a pipeline."""
    ranks, cpu = distributed.get_world_size(), torch.device("cpu")
    count = ranks * len(stages)
    parts = [PipelineStage(waiting(BLOCKS // count), stage, count, cpu) for stage in stages]
    loss = {"loss_fn": lambda out, _: out.square().mean()}
    steps = schedule(parts if len(parts) > 1 else parts[0], n_microbatches=microbatches, **loss)
    given = (x,) if 0 in stages else ()
    return lambda: steps.step(*given, **({"target": x} if count - 1 in stages else {}))


def compared(ranks: int, x: Tensor) -> Iterator[tuple[str, Callable[[StepTime], float], Step]]:
    """Yield what is timed: its name, what the model of the cost says of it, and a step."""
    rank = distributed.get_rank()
    for m in (1, ranks, 4 * ranks):
        for k in sorted({0, 1, ranks - 1}):
            model = waiting(BLOCKS)
            layer_parallel(model, "highway_bp", chains=[""], iterations=k, microbatches=m)
            said = partial(StepTime.layer_parallel, ranks=ranks, microbatches=m, sweeps=k)
            yield f"layer_parallel, k = {k}, {m} microbatches", said, partial(in_parts, model, x)
        model = waiting(BLOCKS)
        layer_parallel(model, "backprop", chains=[""], microbatches=m)
        said = partial(StepTime.rank_by_rank, ranks=ranks, microbatches=m)
        yield f"layer_parallel, backprop, {m} microbatches", said, partial(in_parts, model, x)
    pipelines: dict[Any, tuple[Sequence[int], Callable[..., float]]] = {
        ScheduleGPipe: ((rank,), StepTime.gpipe),
        Schedule1F1B: ((rank,), StepTime.one_f_one_b),
        ScheduleInterleavedZeroBubble: ((rank, ranks + rank), StepTime.zero_bubble),
        ScheduleZBVZeroBubble: ((rank, 2 * ranks - 1 - rank), StepTime.zero_bubble),
    }
    for m, (schedule, (stages, says)) in product((1, ranks, 4 * ranks), pipelines.items()):
        if m >= ranks or schedule is ScheduleGPipe:
            name = f"{schedule.__name__.removeprefix('Schedule')}, {m} microbatches"
            yield name, partial(says, ranks=ranks, microbatches=m), pipeline(schedule, stages, m, x)


def messages(x: Tensor, times: int = 50) -> tuple[float, float]:
    """Return the seconds of a short message from the first rank to the second, and of a state beyond that."""
    found = []
    for tensor in (torch.zeros(1), torch.zeros_like(x)):
        start = time.perf_counter()
        for source, to in ((0, 1), (1, 0)) * times:
            if distributed.get_rank() == source:
                distributed.send(tensor, to)
            elif distributed.get_rank() == to:
                distributed.recv(tensor, source)
        found.append((time.perf_counter() - start) / (2 * times))
    return found[0], max(0.0, found[1] - found[0])


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
    """Print all on the first rank."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    x = torch.randn(BATCH, 256, generator=torch.Generator().manual_seed(0))
    runs: dict[str, tuple[Callable[[StepTime], float] | None, Step]] = {}
    for name, m in (("one process", 1), ("one process, in parts", 4 * ranks)):
        runs[name] = None, partial(in_parts, waiting(BLOCKS), x, m) if rank == 0 else lambda: None
    if ranks > 1:
        runs |= {name: (said, step) for name, said, step in compared(ranks, x)}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(REPEATS + 1):
        for name, (_, run) in runs.items():
            times[name].append(took(run))
    latency, transfer = messages(x) if ranks > 1 else (0.0, 0.0)
    took_one, took_parts = (median(its[1:]) for its in list(times.values())[:2])
    overhead = max(0.0, took_parts - took_one) / (3 * (4 * ranks - 1))
    third = took_one / 3 - overhead
    model = StepTime(third, third, third, overhead, latency, transfer)
    working = nn.Sequential(*(Working() for _ in range(BLOCKS)))
    if ranks > 1:
        layer_parallel(working, "highway_bp", chains=[""], iterations=1)
    its: list[Any] = [None] * ranks
    distributed.all_gather_object(its, held(working, x))
    if rank == 0:
        print(f"one process: {1e3 * took_one:.0f} ms; {model}")
        for name, (said, _) in runs.items():
            modelled = "" if said is None else f", {said(model) / took_one:.2f} by the model"
            print(f"{name}: {median(times[name][1:]) / took_one:.2f} of one process{modelled}")
        for what in its[0]:
            print(f"{what}: {max(own[what] for own in its) / 2**20:.2f} MiB on the rank that holds most")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
