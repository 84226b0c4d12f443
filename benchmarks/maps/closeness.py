"""How close engines come to the exact gradients of a trained net, and in which time."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gradfree.benchmarks.data.bundled import Split
from gradfree.benchmarks.maps.depth_map import CALLED, PLAIN, Passes, cosine_of
from gradfree.benchmarks.records.case import Row
from gradfree.benchmarks.tables.chart import Axis
from gradfree.benchmarks.tables.column import Figure, column
from gradfree.benchmarks.tables.facts import Fact, fact
from gradfree.benchmarks.timing.side_by_side import MEMORY, PASSES, RATIO, Turn
from gradfree.benchmarks.timing.timed import Timing, timed

_COTANGENTS, _GRADIENT = "cosine of the cotangents", "cosine of the gradient"
_AWAY = "1 − cosine of the cotangents"
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


class _OfRow(Passes):
    """Passes that know their engine, so that cotangents can be taken by it."""

    def __init__(self, case: Timing, row: Row | None = None):
        model, batch = _trained(case)
        super().__init__(copy.deepcopy(model), batch, case.item.loss, row)
        self.row = row


_nets: dict[str, tuple[nn.Module, Split]] = {}


def _trained(case: Timing) -> tuple[nn.Module, Split]:
    """Return the case's net as autograd trains it, once, and the first batch of its data."""
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
    """Return those of all states of the model's chains as one vector."""
    trained, batch = _trained(case)
    model = copy.deepcopy(trained)
    chains = case.rows[0].create_engine().validate(model).chains.values()
    blocks: dict[str, nn.Module] = {path: block for chain in chains for path, block in chain.blocks.items()}
    states = dict[str, Tensor]()
    hooks = [block.register_forward_hook(partial(_note, states, path)) for path, block in blocks.items()]
    model(batch.inputs)
    for handle in hooks:
        handle.remove()
    probed = [Probed(block, states[path]) for path, block in blocks.items()]
    for path, block in zip(blocks, probed, strict=True):
        model.set_submodule(path, block)
    Passes(model, batch, case.item.loss, row)()
    return torch.cat([block.zeros.grad.flatten() for block in probed if block.zeros.grad is not None])


def _note(states: dict[str, Tensor], path: str, _block: nn.Module, _args: Any, state: Tensor) -> None:
    states[path] = state.detach()


def _close(case: Timing, step: _OfRow, turns: Sequence[Turn]) -> dict[str, Any]:
    """Return how close gradients and the cotangents of all states are to the exact ones."""
    found = cosine_of(case, step, turns)
    if step.row is not None:
        own, exact = cotangents(case, step.row), cotangents(case)
        found["cotangents"] = torch.cosine_similarity(own, exact, 0).item()
    return found


def _facts_of(cost: Mapping[str, Any], results: Mapping[str, Any]) -> Iterator[Fact]:
    """Yield how close a row comes."""
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
    weighed=True,
    title="closeness to the exact gradients of a trained net",
    legend="Trained by backpropagation; forward and backward pass on one batch beside plain eager autograd's, and peak "
    "memory. Cotangents, gradient: cosine of those of all states, and of all parameters, with the exact ones.",
    columns=[
        column("time (×)", PASSES, unit=RATIO),
        column("memory (×)", MEMORY, unit=RATIO),
        column("cotangents", _COTANGENTS, "{value:.4f}"),
        column("gradient", _GRADIENT, "{value:.4f}"),
    ],
    called=CALLED,
    costs=_close,
    facts=_facts_of,
    against=(Figure(_AWAY), Axis(_AWAY, "log")),
)
def trained_steps(case: Timing) -> Mapping[str, Callable[[], _OfRow]]:
    """Return what builds the passes of a model that autograd has trained, on the first batch of its training data."""
    return {PLAIN: partial(_OfRow, case), **{row.label: partial(_OfRow, case, row) for row in case.rows}}
