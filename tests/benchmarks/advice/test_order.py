"""The engine that the sizes favor is tried first."""

import pytest
import torch
from torch import nn
from user_module import Model

from gradfree import CellLayer, list_engines
from gradfree.benchmarks.advice.order import rows_to_try


class Tagger(nn.Module):
    """A GRU behind a convolution."""

    def __init__(self):
        super().__init__()
        self.conv, self.rnn = nn.Conv1d(3, 4, 5), nn.GRU(4, 4, 2, batch_first=True)


def labels(model, *inputs, engines=None):
    _, rows = rows_to_try(model, None, engines or list_engines(), inputs)
    return [row.label for row in rows]


@pytest.mark.parametrize(
    ("model", "inputs", "first"),
    [
        (Tagger(), torch.zeros(2, 3, 8000), ["shooting", "backprop (default)"]),
        (Tagger(), torch.zeros(2, 3, 100), ["backprop (default)", "newton", "shooting"]),
        (nn.ModuleDict({"rnn": CellLayer(nn.RNNCell(1, 2))}), torch.zeros(2, 8000, 1), ["newton", "backprop"]),
        (Model(64, 3), torch.zeros(2, 4), ["highway_bp k=0"]),
        (nn.Sequential(Tagger(), Model(64, 3)), torch.zeros(2, 3, 8000), ["shooting", "highway_bp k=0", "backprop"]),
    ],
    ids=["long sequences", "short sequences", "narrow cells", "many blocks", "both"],
)
def test_the_sizes_decide_what_comes_first(model, inputs, first):
    found = labels(model, inputs)
    assert [label.partition(" (")[0] for label in found[: len(first)]] == [one.partition(" (")[0] for one in first]


@pytest.mark.parametrize(
    ("cell", "tried"),
    [(nn.GRUCell(1, 8), True), (nn.GRUCell(1, 9), False), (nn.LSTMCell(1, 4), True), (nn.LSTMCell(1, 5), False)],
)
def test_newton_is_left_out_for_cells_with_more_than_eight_numbers_a_row(cell, tried):
    found = labels(nn.ModuleDict({"rnn": CellLayer(cell)}), torch.zeros(2, 8000, 1))
    assert any(label.startswith("newton") for label in found) == tried
    assert any(label.startswith("shooting") for label in found)


def test_settings_that_the_model_does_not_allow_are_left_out():
    cell = nn.RNN(3, 4)
    assert "dsf feedback=gate" not in labels(nn.ModuleDict({"rnn": cell}), torch.zeros(5, 1, 3), engines=["dsf"])
