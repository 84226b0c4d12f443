"""What a step takes, and what a rank holds, where one model lies on several; pipelines of torch beside it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, distributed, nn

from gradfree import layer_parallel
from gradfree.benchmarks.maps.rank_blocks import Waiting, Working, in_parts
from gradfree.benchmarks.maps.step_time import StepTime
from gradfree.benchmarks.records.case import Row
from gradfree.benchmarks.tables.chart import Axis
from gradfree.benchmarks.tables.column import Column, Figure, column
from gradfree.benchmarks.tables.facts import Fact, fact
from gradfree.benchmarks.timing.allocations import peak_memory
from gradfree.benchmarks.timing.side_by_side import MEMORY, MIB, STEP, Turn, times
from gradfree.benchmarks.timing.timed import Timing, timed

BATCH, WIDTH = 256, 256
ONE, PARTS = "one process", "one process, in parts"
_BACKWARD, _MODELLED, _MICROBATCHES, _RANK_TIMES = "backward", "modelled", "microbatches", "time of a rank"
_RANK_MEMORY = f"{MEMORY} of a rank"
_UNIT = times(ONE)


@dataclass(frozen=True)
class Pipelined(Row):
    """A schedule of ``torch.distributed.pipelining``, by the name that torch has for it."""

    schedule: str

    def stages(self, rank: int, ranks: int) -> Sequence[int]:
        """Return which stages a rank holds."""
        others = {"InterleavedZeroBubble": ranks + rank, "ZBVZeroBubble": 2 * ranks - 1 - rank}
        return (rank, others[self.schedule]) if self.schedule in others else (rank,)


@dataclass(frozen=True)
class OnRanks:
    """A chain of blocks, and through how many ranks its batch goes in how many parts.

    Attributes:
        depth: number of blocks.
        waits: seconds that a block waits for the whole batch, in each of three passes; 0 for blocks that compute.
        ranks: that hold the blocks.
        microbatches: that a batch of 256 is cut into.
    """

    depth: int
    waits: float
    ranks: int
    microbatches: int

    def __str__(self) -> str:
        return f"{self.ranks} ranks, m = {self.microbatches}"

    @property
    def what(self) -> str:
        """The blocks, for people."""
        return f"{self.depth} blocks that {f'wait, {1e3 * self.waits:.0f} ms a pass' if self.waits else 'compute'}"

    def blocks(self, share: int = 1) -> nn.Sequential:
        """Return the blocks, or so small a share of them."""
        made = partial(Waiting, self.waits / BATCH) if self.waits else Working
        return nn.Sequential(*(made() for _ in range(self.depth // share)))

    def fits(self, row: Row) -> bool:
        """Tell whether these ranks can take the row's way with so many microbatches."""
        if isinstance(row, Pipelined):
            return row.schedule == "GPipe" or self.microbatches >= self.ranks
        return (row.iterations or 0) < self.ranks

    def modelled(self, row: Row, model: StepTime) -> float:
        """Return the seconds of a step by the model of its cost."""
        size = {"ranks": self.ranks, "microbatches": self.microbatches}
        if isinstance(row, Pipelined):
            says = {"GPipe": model.gpipe, "1F1B": model.one_f_one_b}.get(row.schedule, model.zero_bubble)
            return says(**size)
        if row.iterations is None:
            return model.rank_by_rank(**size)
        return model.layer_parallel(**size, sweeps=row.iterations)


@dataclass(frozen=True)
class RankPart:
    """One rank's part of a model, and a step through it.

    Attributes:
        step: takes the step, and returns the seconds of its forward pass, 0 if that is no phase of its own.
        weights: the parameters that the rank holds.
    """

    step: Callable[[], float]
    weights: Sequence[nn.Parameter]

    def __call__(self) -> Turn:
        """Take a step; return the seconds forward, from there until this rank is done, and until all are."""
        distributed.barrier()
        start = time.perf_counter()
        forward = self.step()
        done = time.perf_counter()
        distributed.barrier()
        return forward, done - start - forward, time.perf_counter() - done

    def peak_memory(self) -> int:
        """Return the bytes that a training step takes at most: weights, states of AdamW, gradients, activations."""
        # A rank that waits for another has none.
        optimizer = torch.optim.AdamW(self.weights) if self.weights else None

        def train() -> None:
            for weight in self.weights:
                weight.grad = None
            self.step()
            if optimizer:
                optimizer.step()

        train()
        states = [state.values() for state in optimizer.state.values()] if optimizer else []
        kept = [*self.weights, *(tensor for values in states for tensor in values)]
        for weight in self.weights:
            weight.grad = None
        return sum(tensor.nbytes for tensor in kept) + peak_memory(train, "cpu")


def _on_ranks(case: Timing) -> dict[str, Any]:
    """Measure on as many processes as there are ranks; return what the first one records of all."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    server = "forkserver" if sys.platform == "linux" else "spawn"
    torch.multiprocessing.get_context(server).set_forkserver_preload([__name__])
    place: dict[str, Any] = {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "run_id": "ranks"}
    group = LaunchConfig(1, 1, case.item.ranks, max_restarts=0, start_method=server, **place)
    try:
        results: dict[str, Any] = elastic_launch(group, _on_rank)(case)[0]
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        # Of a rank that was killed in words, of others as they have told it.
        told: Any = failure.message
        raise RuntimeError(f"rank {rank}: {told if isinstance(told, str) else told['message']}") from None
    return results


def _on_rank(case: Timing) -> dict[str, Any]:
    """Do one rank's share; return what to record."""
    distributed.init_process_group("gloo")
    torch.set_num_threads(1)
    try:
        return {**case.measured(), "messages": _messages(torch.zeros(BATCH, WIDTH))}
    finally:
        distributed.destroy_process_group()


def _messages(state: Tensor, count: int = 50) -> tuple[float, float]:
    """Return the seconds of a short message from the first rank to the second, and of a state beyond that."""
    found = []
    for tensor in (torch.zeros(1), state):
        start = time.perf_counter()
        for source, to in ((0, 1), (1, 0)) * count:
            if distributed.get_rank() == source:
                distributed.send(tensor, to)
            elif distributed.get_rank() == to:
                distributed.recv(tensor, source)
        found.append((time.perf_counter() - start) / (2 * count))
    return found[0], max(0.0, found[1] - found[0])


def _costs(case: Timing, step: RankPart, turns: Sequence[Turn]) -> dict[str, Any]:
    """Return the time of the backward pass, where it is a phase, and of each rank its own time and peak memory."""
    told: list[Any] = [None] * case.item.ranks
    distributed.all_gather_object(told, (median(f + b for f, b, _ in turns), step.peak_memory()))
    backward = {"backward": median(b + rest for _, b, rest in turns)} if all(f for f, *_ in turns) else {}
    memory = [size for _, size in told]
    return {"rank_times": [t for t, _ in told], "rank_memory": memory, "peak_memory": max(memory), **backward}


def _told(cost: Mapping[str, Any], results: Mapping[str, Any]) -> Iterator[Fact]:
    """Yield what a way takes of each rank, memory as that of the rank that holds most, and what the model says."""
    if "rank_times" in cost:
        words = ", ".join(f"{1e3 * t:.0f}" for t in cost["rank_times"])
        yield fact(_RANK_TIMES, "ms", max(cost["rank_times"]), note=words)
        words = ", ".join(f"{size / MIB:.1f}" for size in cost["rank_memory"])
        yield fact(_RANK_MEMORY, "MiB", cost["peak_memory"] / MIB, note=words)
    if "backward" in cost:
        yield fact(_BACKWARD, _UNIT, cost["backward"] / results["rows"][0]["backward"])
    if results["row"] is not None:
        chain: OnRanks = results["item"]
        costs = {row["label"]: row for row in results["rows"]}
        share = chain.modelled(results["row"], _fitted(costs, chain, results["messages"])) / costs[ONE]["time"]
        yield fact(_MODELLED, _UNIT, share)
        yield fact(_MICROBATCHES, "count", chain.microbatches)


def _fitted(costs: Mapping[str, Any], chain: OnRanks, messages: Sequence[float]) -> StepTime:
    """Return the model of the cost, given what one process takes for the batch, whole and in parts."""
    whole, parts = costs[ONE]["time"], costs.get(PARTS, costs[ONE])["time"]
    overhead = max(0.0, parts - whole) / (3 * max(1, chain.microbatches - 1))
    third = whole / 3 - overhead
    return StepTime(third, third, third, overhead, *messages)


@timed(
    kind="ranks",
    subject="chain",
    rounds=5,
    runs=1,
    title="one model on several ranks",
    legend=f"Forward and backward pass, until all ranks are done; batches of {BATCH} samples, {WIDTH} units; every "
    "rank a process of one thread, over gloo; in brackets by the model of the cost. Each rank: the time until it is "
    "done with its own part, and what it holds at most in a step with AdamW: weights, gradients, states of AdamW, "
    "activations. Ranks that compute and are more than there are cores share these; their times tell nothing of ranks "
    "with a device each.",
    names={"ranks and microbatches": "setting", "way": "row"},
    columns=[
        column("step (ms)", STEP, "{value:.0f}", "s", factor=1e3),
        Column("step (×)", (Figure(STEP, unit=_UNIT), Figure(_MODELLED))),
        column("backward (×)", _BACKWARD),
        column("each rank (ms)", _RANK_TIMES, "{note}"),
        column("peak memory of each rank (MiB)", _RANK_MEMORY, "{note}"),
    ],
    place=lambda chain: {"task": chain.what, "setting": str(chain), "at": float(chain.ranks)},
    topic=lambda chain: chain.what,
    sides=str,
    fits=lambda row, chain: chain.fits(row),
    costs=_costs,
    facts=_told,
    against=(Figure(_MICROBATCHES), Axis("microbatches m (count)", "counts")),
    launch=_on_ranks,
)
def rank_steps(case: Timing) -> Mapping[str, Callable[[], RankPart]]:
    """Return what puts the blocks on ranks, by way; one process takes its steps while the others wait for it."""
    parts = {PARTS: partial(_alone, case, case.item.microbatches)} if case.item.microbatches > 1 else {}
    return {ONE: partial(_alone, case), **parts, **{row.label: partial(_through, case, row) for row in case.rows}}


def _batch(case: Timing) -> Tensor:
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(case.seed))


def _alone(case: Timing, microbatches: int = 1) -> RankPart:
    if distributed.get_rank():
        return RankPart(lambda: 0.0, [])
    model = case.item.blocks()
    return RankPart(partial(in_parts, model, _batch(case), microbatches), list(model.parameters()))


def _through(case: Timing, row: Row) -> RankPart:
    torch.manual_seed(case.seed)
    if isinstance(row, Pipelined):
        return _pipeline(case, row)
    model = case.item.blocks()
    layer_parallel(model, row.create_engine(), chains=[""], microbatches=case.item.microbatches)
    return RankPart(partial(in_parts, model, _batch(case)), list(model.parameters()))


def _pipeline(case: Timing, row: Pipelined) -> RankPart:
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import get_schedule_class

    chain: OnRanks = case.item
    numbers = row.stages(distributed.get_rank(), chain.ranks)
    count = chain.ranks * len(numbers)
    parts = [chain.blocks(count) for _ in numbers]
    stages = [PipelineStage(part, n, count, torch.device("cpu")) for part, n in zip(parts, numbers, strict=True)]
    make: Any = get_schedule_class(row.schedule)
    schedule = make(
        stages if len(stages) > 1 else stages[0],
        n_microbatches=chain.microbatches,
        loss_fn=lambda out, _: out.square().mean(),
    )
    x = _batch(case)
    given, target = (x,) if 0 in numbers else (), {"target": x} if count - 1 in numbers else {}

    def step() -> float:
        schedule.step(*given, **target)
        return 0.0

    return RankPart(step, [p for part in parts for p in part.parameters()])
