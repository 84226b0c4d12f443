"""Accuracy of engines' gradients on a trained net, against the time of a pass."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gradfree.benchmarks.data.bundled import Split
from gradfree.benchmarks.maps.depth_map import DISPLAY_NAMES, PLAIN, Passes, cosine_of
from gradfree.benchmarks.records.case import Row
from gradfree.benchmarks.tables.chart import Axis
from gradfree.benchmarks.tables.column import Figure, column
from gradfree.benchmarks.tables.facts import Fact, fact
from gradfree.benchmarks.timing.side_by_side import MEMORY, PASSES, RATIO, Turn
from gradfree.benchmarks.timing.timed import Timing, timed

_COTANGENTS, _GRADIENT = "cosine of the cotangents", "cosine of the gradient"
_AWAY = "1 − cosine of the cotangents"
_ROUNDING = 1e-6
"""Values of 1 − cosine up to this are rounding errors."""


class ZerosAdded(nn.Module):
    """A block with zeros added to its output; the gradient of the zeros is the cotangent of the output.

    Args:
        block: the block.
        state: the block's output.
    """

    def __init__(self, block: nn.Module, state: Tensor):
        super().__init__()
        self.block, self.zeros = block, nn.Parameter(torch.zeros_like(state))

    def forward(self, x: Tensor) -> Tensor:
        """Return the next state."""
        return self.block(x) + self.zeros


class _RowPasses(Passes):
    """Passes of a trained model with the row's engine."""

    def __init__(self, case: Timing, row: Row | None = None):
        model, batch = _trained(case)
        super().__init__(copy.deepcopy(model), batch, case.item.loss, row)
        self.row = row


_nets: dict[str, tuple[nn.Module, Split]] = {}
"""Trained models and their first batch, by case id."""


def _trained(case: Timing) -> tuple[nn.Module, Split]:
    """Return the case's model, trained once with autograd, and the first batch of its data."""
    if case.id not in _nets:
        task = case.item
        train = task.on(case.device, task.data().train)
        model = task.create_model(case.seed).to(case.device)
        optimizer, schedule = task.create_optimizer(model)
        for batch in task.batches(train, case.seed):
            optimizer.zero_grad()
            task.loss(model(batch.inputs), batch.targets).backward()
            optimizer.step()
            schedule.step()
        _nets[case.id] = model, next(task.batches(train, case.seed))
    return _nets[case.id]


def cotangents(case: Timing, row: Row | None = None) -> Tensor:
    """Return the cotangents of all states of the model's chains as one vector."""
    trained, batch = _trained(case)
    model = copy.deepcopy(trained)
    chains = case.rows[0].create_engine().validate(model).chains.values()
    blocks: dict[str, nn.Module] = {path: block for chain in chains for path, block in chain.blocks.items()}
    states = dict[str, Tensor]()
    hooks = [block.register_forward_hook(partial(_note, states, path)) for path, block in blocks.items()]
    model(batch.inputs)
    for handle in hooks:
        handle.remove()
    wrapped = [ZerosAdded(block, states[path]) for path, block in blocks.items()]
    for path, block in zip(blocks, wrapped, strict=True):
        model.set_submodule(path, block)
    Passes(model, batch, case.item.loss, row)()
    return torch.cat([block.zeros.grad.flatten() for block in wrapped if block.zeros.grad is not None])


def _note(states: dict[str, Tensor], path: str, _block: nn.Module, _args: Any, state: Tensor) -> None:
    states[path] = state.detach()


def _cosines(case: Timing, step: _RowPasses, turns: Sequence[Turn]) -> dict[str, Any]:
    """Return the cosines of a row's gradient and cotangents with the exact ones."""
    found = cosine_of(case, step, turns)
    if step.row is not None:
        own, exact = cotangents(case, step.row), cotangents(case)
        found["cotangents"] = torch.cosine_similarity(own, exact, 0).item()
    return found


def _facts_of(cost: Mapping[str, Any], results: Mapping[str, Any]) -> Iterator[Fact]:
    """Yield the cosines of a row's cotangents and gradient with the exact ones."""
    if "cotangents" in cost:
        yield fact(_COTANGENTS, "1", cost["cotangents"])
        yield fact(_AWAY, "1", max(1 - cost["cotangents"], _ROUNDING))
    if "cosine" in cost:
        yield fact(_GRADIENT, "1", cost["cosine"])


@timed(
    kind="trained step",
    subject="task",
    metric=PASSES,
    rounds=7,
    with_memory=True,
    title="closeness to the exact gradients of a trained net",
    legend="Trained by backpropagation. Time and peak memory of a forward and backward pass on one batch, as multiples "
    "of eager autograd's. Cotangents, gradient: cosine of all states' cotangents, and of the gradient, with the exact "
    "ones.",
    columns=[
        column("time (×)", PASSES, unit=RATIO),
        column("memory (×)", MEMORY, unit=RATIO),
        column("cotangents", _COTANGENTS, "{value:.4f}"),
        column("gradient", _GRADIENT, "{value:.4f}"),
    ],
    display_names=DISPLAY_NAMES,
    costs=_cosines,
    facts=_facts_of,
    against=(Figure(_AWAY), Axis(_AWAY, "log")),
)
def trained_steps(case: Timing) -> Mapping[str, Callable[[], _RowPasses]]:
    """Return, by label, functions that build the passes of the trained model, with autograd and with each engine."""
    return {PLAIN: partial(_RowPasses, case), **{row.label: partial(_RowPasses, case, row) for row in case.rows}}
