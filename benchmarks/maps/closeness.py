"""How close engines come to the exact gradients of a trained net, and in which time."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from gradfree.benchmarks.data.bundled import Split
from gradfree.benchmarks.maps.depth_map import PLAIN, Passes, PassTiming
from gradfree.benchmarks.records.case import Row
from gradfree.benchmarks.tables import verdict
from gradfree.benchmarks.tables.chart import Axis, Chart, points
from gradfree.benchmarks.tables.column import Figure, column
from gradfree.benchmarks.tables.facts import Fact, estimates, fact
from gradfree.benchmarks.tables.frames import pl
from gradfree.benchmarks.tables.section import Section
from gradfree.benchmarks.tasks.task import Task
from gradfree.benchmarks.timing.side_by_side import MEMORY, Errors, Timings, Turns, times

_COTANGENTS, _GRADIENT = "cosine of the cotangents", "cosine of the gradient"
_AWAY = "1 − cosine of the cotangents"
_SHARE = times(PLAIN)
_ROUNDING = 1e-6
"""Above which 1 − cosine is no rounding."""


class Probed(nn.Module):
    """A block with zeros added to its output: their gradient is the cotangent of the state.

    Args:
        block: the block.
        state: what it returns.
    """

    def __init__(self, block: nn.Module, state: Tensor):
        super().__init__()
        self.block, self.zeros = block, nn.Parameter(torch.zeros_like(state))

    def forward(self, x: Tensor) -> Tensor:
        """Return the next state."""
        return self.block(x) + self.zeros


@dataclass(frozen=True, kw_only=True)
class TrainedStep(PassTiming):
    """Passes of a model that plain backpropagation has trained, on the first batch of its training data.

    Attributes:
        task: what it is trained on.
    """

    kind: ClassVar[str] = "trained step"
    task: Task

    def steps(self) -> Mapping[str, Callable[[], Passes]]:
        """Return what builds the passes."""
        return {PLAIN: self._passes, **{row.label: partial(self._passes, row) for row in self.rows}}

    def results(self, steps: Mapping[str, Any], turns: Turns, errors: Errors) -> dict[str, Any]:
        """Return also how close the cotangents of all states are to the exact ones."""
        found, rows = super().results(steps, turns, errors), {row.label: row for row in self.rows}
        exact = self._cotangents()
        for cost in found["rows"]:
            if cost["label"] in rows and "error" not in cost:
                own = self._cotangents(rows[cost["label"]])
                cost["cotangents"] = torch.cosine_similarity(own, exact, 0).item()
        return found

    @cached_property
    def _trained(self) -> tuple[nn.Module, Split]:
        task = self.task
        train = task.on(self.device, task.data().train)
        model = task.create_model(self.seed).to(self.device)
        optimizer, schedule = task.create_optimizer(model)
        for batch in task.batches(train, self.seed):
            optimizer.zero_grad()
            task.loss(model(batch.inputs), batch.targets).backward()
            optimizer.step()
            schedule.step()
        return model, next(task.batches(train, self.seed))

    def _passes(self, row: Row | None = None) -> Passes:
        model, batch = self._trained
        return Passes(copy.deepcopy(model), batch, self.task.loss, row)

    def _cotangents(self, row: Row | None = None) -> Tensor:
        """Return those of all states of the model's chains as one vector."""
        model, batch = copy.deepcopy(self._trained[0]), self._trained[1]
        chains = self.rows[0].create_engine().validate(model).chains.values()
        blocks: dict[str, nn.Module] = {path: block for chain in chains for path, block in chain.blocks.items()}
        states = dict[str, Tensor]()
        noted = [block.register_forward_hook(partial(_note, states, path)) for path, block in blocks.items()]
        model(batch.inputs)
        for handle in noted:
            handle.remove()
        probed = [Probed(block, states[path]) for path, block in blocks.items()]
        for path, block in zip(blocks, probed, strict=True):
            model.set_submodule(path, block)
        Passes(model, batch, self.task.loss, row)()
        return torch.cat([block.zeros.grad.flatten() for block in probed if block.zeros.grad is not None])


def _note(states: dict[str, Tensor], path: str, _block: nn.Module, _args: Any, state: Tensor) -> None:
    states[path] = state.detach()


@dataclass(frozen=True)
class Closeness(Timings[Task]):
    """An engine over single links and over segments, on one trained net."""

    metric: ClassVar[str] = "time of forward and backward"

    timed = TrainedStep

    def cost(self, cost: Mapping[str, Any], results: Mapping[str, Any]) -> Iterator[Fact]:
        """Yield what a row takes, and how close it comes."""
        yield from super().cost(cost, results)
        if "cotangents" in cost:
            yield fact(_COTANGENTS, "1", cost["cotangents"])
            yield fact(_AWAY, "1", max(1 - cost["cotangents"], _ROUNDING))
        if "cosine" in cost:
            yield fact(_GRADIENT, "1", cost["cosine"])

    def section(self, facts: pl.DataFrame) -> Section:
        """Return the table, a row an engine, and the chart of closeness against time."""
        (task,) = self.subjects
        share = estimates(facts, metric=self.metric, unit=_SHARE)
        return Section(
            title=f"{task.name}: {task.architecture}, {task.steps} steps of training, device: {facts['device'][0]}, "
            f"threads: {self.threads}",
            facts=facts,
            columns=[
                column("time (×)", self.metric, unit=_SHARE),
                column("memory (×)", MEMORY, unit=_SHARE),
                column("cotangents", _COTANGENTS, "{value:.4f}"),
                column("gradient", _GRADIENT, "{value:.4f}"),
            ],
            legend=f"Trained by backpropagation, {task.batch_size} a batch. ×: forward and backward pass on one batch "
            "as a multiple of plain eager backpropagation's, median of interleaved rounds, and peak memory. "
            "Cotangents, gradient: cosine of those of all states, and of all parameters, with the exact ones.",
            remarks=[self._at_equal_time(facts), verdict.steadiness(share), *self.failures(facts)],
            charts=[
                Chart(
                    f"{task.name}, {facts['device'][0]}: closeness against time",
                    points(facts, Figure(self.metric, unit=_SHARE), Figure(_AWAY)),
                    Axis("time, as a multiple of eager backprop's (×)"),
                    Axis(_AWAY, "log"),
                    True,
                )
            ],
        )

    def _at_equal_time(self, facts: pl.DataFrame) -> str:
        """Say beside which rows over single links no segments are at least as close in no more time, by the medians."""
        time = estimates(facts, metric=self.metric, unit=_SHARE)
        close = {label: cosine.value for label, cosine in estimates(facts, metric=_COTANGENTS).items()}
        single = [row.label for row in self.rows if row.label in close and "segments" not in row.options]
        others = [label for label in close if label not in single]
        ahead = [
            label
            for label in single
            if not any(close[o] >= close[label] and time[o].value <= time[label].value for o in others)
        ]
        if len(ahead) == len(single):
            return "In the time of single links no segments are as close."
        words = "but for " + ", ".join(ahead) if ahead else "at every k"
        return f"In the time of single links some segments are at least as close, {words}."
