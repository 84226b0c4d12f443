"""Cells that return an output beside their state, in a ``CellLayer``."""

import pytest
import torch
from cell_tasks import Projecting, Reading
from oracles import off_by
from torch import nn

import gradfree
from gradfree import CellLayer


def test_an_approximate_engine_approximates_the_state_alone():
    """Without links from step to step each step's own gradient is left, whatever K."""
    layer, x = CellLayer(Reading()), torch.randn(20, 2, 3)
    with torch.no_grad():
        layer.cell.network.weight[:, 3:] = 0.0
    grads = []
    for feedback in (0.0, 0.9):
        with gradfree.create_engine("dsf", feedback=feedback).attach(layer):
            out, _ = layer(x)
            grads.append(torch.autograd.grad(out.sum(), layer.cell.network.weight)[0])
    assert torch.equal(*grads)


def test_it_runs_with_resets():
    layer, x = CellLayer(Projecting()), torch.randn(20, 2, 3)
    resets = torch.rand(20, 2) < 0.2
    out, (h, c) = gradfree.run_with_resets(layer, x, None, resets)
    state, outs = (torch.zeros(2, 4), torch.zeros(2, 4)), []
    for step, reset in zip(x, resets, strict=True):
        y, state = layer.cell(step, tuple(part * ~reset[:, None] for part in state))
        outs.append(y)
    assert off_by([out, h, c], [torch.stack(outs), *state]) < 1e-12


class Undeclared(nn.Module):
    hidden_size = 4

    def forward(self, x, state):
        return x, state


class Wrong(nn.Module):
    hidden_size, output_size = 4, 4

    def forward(self, x, state):
        return state


@pytest.mark.parametrize(("cell", "message"), [(Undeclared, "set Undeclared.output_size"), (Wrong, r"\(out, state\)")])
def test_what_a_cell_does_not_say_is_asked_for(cell, message):
    with pytest.raises(ValueError, match=message):
        CellLayer(cell())(torch.randn(5, 2, 3))
