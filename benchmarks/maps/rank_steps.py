"""What a step takes, and what a rank holds, where one model lies on several; pipelines of torch beside it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, ClassVar

import torch
from torch import Tensor, distributed, nn

from gradfree import layer_parallel
from gradfree.benchmarks.maps.rank_blocks import Waiting, Working, in_parts
from gradfree.benchmarks.maps.step_time import StepTime
from gradfree.benchmarks.records.case import Case, Row
from gradfree.benchmarks.tables.chart import Axis, Chart, points
from gradfree.benchmarks.tables.column import Column, Figure, column
from gradfree.benchmarks.tables.facts import Fact, fact
from gradfree.benchmarks.tables.frames import pl
from gradfree.benchmarks.tables.section import Section
from gradfree.benchmarks.timing.allocations import peak_memory
from gradfree.benchmarks.timing.side_by_side import MEMORY, MIB, STEP, Timing, Timings, Turn, times

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

    def __call__(self) -> float:
        """Take a step."""
        return self.step()

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


@dataclass(frozen=True, kw_only=True)
class RankStep(Timing[RankPart]):
    """Time of a step on ranks, each a process of one thread, by way: all in one group of processes, over gloo."""

    kind: ClassVar[str] = "ranks"
    topic_field: ClassVar[str] = "chain"
    rounds: ClassVar[int] = 5
    chain: OnRanks

    @property
    def topic(self) -> str:
        """The blocks."""
        return self.chain.what

    @property
    def sides(self) -> str:
        """The ranks."""
        return str(self.chain)

    def run(self) -> dict[str, Any]:
        """Measure on as many processes as there are ranks; return what the first one records of all."""
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

        server = "forkserver" if sys.platform == "linux" else "spawn"
        torch.multiprocessing.get_context(server).set_forkserver_preload([__name__])
        place: dict[str, Any] = {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "run_id": "ranks"}
        group = LaunchConfig(1, 1, self.chain.ranks, max_restarts=0, start_method=server, **place)
        try:
            results: dict[str, Any] = elastic_launch(group, _on_rank)(self)[0]
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            # Of a rank that was killed in words, of others as they have told it.
            told: Any = failure.message
            raise RuntimeError(f"rank {rank}: {told if isinstance(told, str) else told['message']}") from None
        return results

    def on_rank(self) -> dict[str, Any]:
        """Do one rank's share; return what to record."""
        results = super().run()
        return {**results, "messages": _messages(torch.zeros(BATCH, WIDTH))}

    def steps(self) -> Mapping[str, Callable[[], RankPart]]:
        """Return what puts the blocks on ranks, by way; one process takes its steps while the others wait for it."""
        parts = {PARTS: partial(self._alone, self.chain.microbatches)} if self.chain.microbatches > 1 else {}
        return {ONE: self._alone, **parts, **{row.label: partial(self._through, row) for row in self.rows}}

    def turn(self, step: RankPart) -> Turn:
        """Take a step; return the seconds forward, from there until this rank is done, and until all are."""
        distributed.barrier()
        start = time.perf_counter()
        forward = step()
        done = time.perf_counter()
        distributed.barrier()
        return forward, done - start - forward, time.perf_counter() - done

    def costs(self, step: RankPart, turns: Sequence[Turn]) -> dict[str, Any]:
        """Return the time of the backward pass, where it is a phase, and of each rank its own time and peak memory."""
        told: list[Any] = [None] * self.chain.ranks
        distributed.all_gather_object(told, (median(f + b for f, b, _ in turns), step.peak_memory()))
        backward = {"backward": median(b + rest for _, b, rest in turns)} if all(f for f, *_ in turns) else {}
        memory = [size for _, size in told]
        return {"rank_times": [t for t, _ in told], "rank_memory": memory, "peak_memory": max(memory), **backward}

    @property
    def _batch(self) -> Tensor:
        return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(self.seed))

    def _alone(self, microbatches: int = 1) -> RankPart:
        if distributed.get_rank():
            return RankPart(lambda: 0.0, [])
        model = self.chain.blocks()
        return RankPart(partial(in_parts, model, self._batch, microbatches), list(model.parameters()))

    def _through(self, row: Row) -> RankPart:
        torch.manual_seed(self.seed)
        if isinstance(row, Pipelined):
            return self._pipeline(row)
        model = self.chain.blocks()
        layer_parallel(model, row.create_engine(), chains=[""], microbatches=self.chain.microbatches)
        return RankPart(partial(in_parts, model, self._batch), list(model.parameters()))

    def _pipeline(self, row: Pipelined) -> RankPart:
        from torch.distributed.pipelining import PipelineStage
        from torch.distributed.pipelining.schedules import get_schedule_class

        numbers = row.stages(distributed.get_rank(), self.chain.ranks)
        count = self.chain.ranks * len(numbers)
        parts = [self.chain.blocks(count) for _ in numbers]
        stages = [PipelineStage(part, n, count, torch.device("cpu")) for part, n in zip(parts, numbers, strict=True)]
        make: Any = get_schedule_class(row.schedule)
        schedule = make(
            stages if len(stages) > 1 else stages[0],
            n_microbatches=self.chain.microbatches,
            loss_fn=lambda out, _: out.square().mean(),
        )
        x = self._batch
        given, target = (x,) if 0 in numbers else (), {"target": x} if count - 1 in numbers else {}

        def step() -> float:
            schedule.step(*given, **target)
            return 0.0

        return RankPart(step, [p for part in parts for p in part.parameters()])


def _on_rank(case: RankStep) -> dict[str, Any]:
    distributed.init_process_group("gloo")
    torch.set_num_threads(1)
    try:
        return case.on_rank()
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


@dataclass(frozen=True)
class RankSteps(Timings[OnRanks]):
    """Ways to spread one chain of blocks over ranks."""

    def timing(self, device: str) -> Iterator[Case]:
        """Yield one case for each number of ranks and microbatches, with the ways that can be taken."""
        for chain in self.subjects:
            rows = tuple(row for row in self.rows if chain.fits(row))
            yield self.case(chain, rows=rows, threads=self.threads, device=device, seed=0)

    timed = RankStep

    def where(self, case: Case) -> dict[str, Any]:
        """Return the numbers of ranks and microbatches."""
        return {"task": case.topic, "setting": str(case.about), "at": float(case.about.ranks)}

    def told(self, case: Case, record: Any) -> Iterator[Fact]:
        """Yield what a record tells of each way, and what the model of the cost says of it."""
        assert isinstance(case, RankStep)
        yield from super().told(case, record)
        results, rows = record["results"], {row.label: row for row in case.rows}
        if not results:
            return
        costs = {cost["label"]: cost for cost in results["rows"]}
        model = _fitted(costs, case.chain, results["messages"])
        for label in (label for label in costs if label in rows):
            share = case.chain.modelled(rows[label], model) / costs[ONE]["time"]
            yield fact(_MODELLED, _UNIT, share, row=label)
            yield fact(_MICROBATCHES, "count", case.chain.microbatches, row=label)

    def cost(self, cost: Mapping[str, Any], results: Mapping[str, Any]) -> Iterator[Fact]:
        """Yield what a way takes; memory as that of the rank that holds most."""
        yield from super().cost(cost, results)
        if "rank_times" in cost:
            words = ", ".join(f"{1e3 * t:.0f}" for t in cost["rank_times"])
            yield fact(_RANK_TIMES, "ms", max(cost["rank_times"]), note=words)
            words = ", ".join(f"{size / MIB:.1f}" for size in cost["rank_memory"])
            yield fact(_RANK_MEMORY, "MiB", cost["peak_memory"] / MIB, note=words)
        if "backward" in cost:
            yield fact(_BACKWARD, _UNIT, cost["backward"] / results["rows"][0]["backward"])

    def section(self, facts: pl.DataFrame) -> Section:
        """Return the table, a row for each way through each number of ranks, and the charts."""
        what, device = self.subjects[0].what, facts["device"][0]
        ratio = Figure(STEP, unit=_UNIT)
        columns = [
            column("step (ms)", STEP, "{value:.0f}", "s", factor=1e3),
            Column("step (×)", (ratio, Figure(_MODELLED))),
            column("backward (×)", _BACKWARD),
            column("each rank (ms)", _RANK_TIMES, "{note}"),
        ]
        if not self.subjects[0].waits:
            columns.append(column("peak memory of each rank (MiB)", _RANK_MEMORY, "{note}"))
        return Section(
            title=f"one model on several ranks: {what}, device: {device}",
            facts=facts,
            names={"ranks and microbatches": "setting", "way": "row"},
            columns=columns,
            setup=f"Batches of {BATCH} samples, {WIDTH} units; every rank a process of one thread, over gloo.",
            legend=f"Forward and backward pass, until all ranks are done; medians of {RankStep.rounds} interleaved "
            "rounds. ×: as a multiple of one process's in the same round, in brackets by the model of the cost. Each "
            "rank: the time until it is done with its own part, and what it holds at most in a step with AdamW: "
            "weights, gradients, states of AdamW, activations. Ranks that compute and are more than there are cores "
            "share these; their times tell nothing of ranks with a device each.",
            remarks=list(self.failures(facts)),
            charts=list(self._charts(facts, what, device)),
        )

    def _charts(self, facts: pl.DataFrame, what: str, device: str) -> Iterator[Chart]:
        """Draw steps against ranks, and against microbatches where there are several numbers of them."""
        steps = Figure(STEP, unit=_UNIT)
        side = Axis("time of a step, as a multiple of one process's (×)", "log")
        ours = facts.filter(~pl.col("row").is_in([ONE, PARTS]))
        for title, own in (
            ("a batch as a whole", [chain for chain in self.subjects if chain.microbatches == 1]),
            ("as many parts as ranks", [chain for chain in self.subjects if chain.microbatches == chain.ranks]),
        ):
            found = points(ours.filter(pl.col("setting").is_in(list(map(str, own)))), "at", steps, "row")
            yield Chart(f"{what}, {device}: {title}", found, Axis("ranks (count)", "counts"), side, True)
        for ranks in dict.fromkeys(chain.ranks for chain in self.subjects):
            found = points(ours.filter(pl.col("at") == ranks), Figure(_MICROBATCHES), steps, "row")
            counts = Axis("microbatches m (count)", "counts")
            yield Chart(f"{what}, {device}: {ranks} ranks", found, counts, side, True)


def _fitted(costs: Mapping[str, Any], chain: OnRanks, messages: Sequence[float]) -> StepTime:
    """Return the model of the cost, given what one process takes for the batch, whole and in parts."""
    whole, parts = costs[ONE]["time"], costs.get(PARTS, costs[ONE])["time"]
    overhead = max(0.0, parts - whole) / (3 * max(1, chain.microbatches - 1))
    third = whole / 3 - overhead
    return StepTime(third, third, third, overhead, *messages)
