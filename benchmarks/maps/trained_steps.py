"""What the passes of a trained net cost, and how close engines come to its cotangents."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from gradfree.benchmarks.data.bundled import Split
from gradfree.benchmarks.maps.deep_steps import PLAIN, Passes, PassTiming
from gradfree.benchmarks.records.case import Row
from gradfree.benchmarks.tasks.task import Task
from gradfree.benchmarks.timing.speed import Errors, Turns


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
