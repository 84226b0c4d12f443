"""Forward methods of an engine: used for the layers they allow, with exact gradients in all cases."""

from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

import gradfree
from gradfree.algorithms import Backprop
from gradfree.testing.cases.models import OwnCell, RecurrentModel, assert_equal_gradients, gradients
from gradfree.time.forward import Forward, Trajectory


class FromTheStart(Forward):
    """Runs a GRU or any cell in a loop over its steps, and counts its runs."""

    def __init__(self):
        self.runs = 0

    def allows(self, recurrence):
        return recurrence.cell is not None or (recurrence.mode == "GRU" and recurrence.directions == 1)

    def run(self, recurrence):
        self.runs += 1
        first = recurrence.first if recurrence.cell else [part[0] for part in recurrence.first]
        h, states = first[0], []
        for x in recurrence.x:
            h = recurrence.cell(x, h) if recurrence.cell else torch.gru_cell(x, h, *recurrence.weights)
            states.append(h)
        return Trajectory(torch.stack(states), [h if recurrence.cell else h[None]])


@dataclass(frozen=True, kw_only=True)
class Ours(Backprop):
    """Backpropagation after the engine's own forward pass."""

    method: Forward = field(default_factory=FromTheStart)

    @property
    def forwards(self):
        return (self.method,)


@pytest.mark.parametrize(
    ("make", "width", "runs"),
    [
        (lambda: nn.GRU(6, 4, num_layers=2, batch_first=True), 4, 2),
        (lambda: nn.GRU(6, 32, batch_first=True), 32, 1),
        (lambda: gradfree.CellLayer(OwnCell(6), batch_first=True), 6, 1),
        (lambda: gradfree.CellLayer(nn.GRUCell(6, 4), batch_first=True), 4, 1),
        (lambda: nn.GRU(6, 4, batch_first=True, bidirectional=True), 8, 0),
        (lambda: nn.LSTM(6, 4, batch_first=True), 4, 0),
    ],
    ids=["GRU of two layers", "wide GRU", "any cell", "GRUCell", "GRU in both directions", "LSTM"],
)
def test_an_engines_forward_method_runs_the_layers_it_allows(make, width, runs):
    model, x, engine = RecurrentModel(make(), width), torch.randn(3, 7, 6), Ours()
    out, expected = model(x).detach(), gradients(model, lambda: model(x))
    with engine.attach(model):
        torch.testing.assert_close(model(x).detach(), out, rtol=1e-12, atol=1e-12)
        assert engine.method.runs == runs
        assert_equal_gradients(gradients(model, lambda: model(x)), expected)
