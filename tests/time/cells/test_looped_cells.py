"""A cell that a model calls in a loop is refused; the layers that the message suggests compute the same."""

import re

import pytest
import torch
from cell_tasks import CELLS, INPUT, refusal
from oracles import assert_close
from torch import nn

import gradfree


class Tagger(nn.Module):
    def __init__(self, cell):
        super().__init__()
        self.cell, self.head = cell, nn.Linear(4, 2)

    def forward(self, x):
        state, outputs = None, []
        for fed in x:
            state = self.cell(fed, state)
            outputs.append(state[0] if isinstance(state, tuple) else state)
        return self.head(torch.stack(outputs))


@pytest.mark.parametrize("engine", ["backprop", "auto", "fixed_point", "shooting"])
@pytest.mark.parametrize("chains", [None, ["cell"]])
@pytest.mark.parametrize("cell", ["gru cell", "para_gru"])
def test_a_cell_called_in_a_loop_is_refused_with_its_path_and_a_remedy(engine, chains, cell):
    message = refusal(lambda: gradfree.create_engine(engine).attach(Tagger(CELLS[cell][0]()), chains))
    assert "'cell'" in message
    assert "gradfree.CellLayer(cell)" in message
    assert ("nn.GRU" in message) == (cell == "gru cell")


@pytest.mark.parametrize("options", [{}, {"bias": False}])
def test_layers_that_the_message_suggests_equal_the_loop(options):
    model, x = Tagger(nn.GRUCell(INPUT, 4, **options)), torch.randn(5, 2, INPUT)
    cell, expected = model.cell, model(x)
    message = refusal(lambda: gradfree.create_engine("shooting").attach(model, ["cell"]))
    layer = nn.GRU(cell.input_size, cell.hidden_size, **options)
    exec(re.search(r"layer\.load_state_dict\(.*\)\)?", message)[0].rstrip("."), {"layer": layer, "cell": cell})
    for made in (layer, gradfree.CellLayer(cell)):
        assert_close(model.head(made(x)[0]), expected)


def test_cells_beside_chains_are_left_to_autograd():
    model = nn.ModuleDict({"rnn": nn.GRU(3, 4), "cell": nn.GRUCell(3, 4)})
    assert list(gradfree.create_engine("shooting").validate(model).chains) == ["rnn"]
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)))
    model = nn.ModuleDict({"blocks": blocks, "cell": nn.GRUCell(3, 4)})
    assert gradfree.create_engine("backprop").validate(model).ok
    assert list(gradfree.create_engine("highway_bp").validate(model).chains) == ["blocks"]
