"""What online rules refuse: streams that cannot go on, and states without units."""

import pytest
import torch
from cell_tasks import CELLS, HIDDEN, INPUT
from torch import nn

import gradfree
from gradfree.algorithms import RTRL, HighwayBP, SnAp


def test_streams_that_cannot_be_are_refused():
    both = nn.GRU(3, 4, bidirectional=True)
    with pytest.raises(gradfree.ChainError, match="is bidirectional: a stream has no end to begin from"):
        RTRL(stream=True).attach(both)
    with pytest.raises(gradfree.ChainError, match="can carry a stream through torch's layers only"):
        SnAp(stream=True).attach(gradfree.CellLayer(nn.GRUCell(3, 4)))


@pytest.mark.parametrize("make", [lambda: nn.GRU(3, 4), lambda: gradfree.CellLayer(nn.GRUCell(3, 4))])
def test_a_stream_of_packed_sequences_or_of_pieces_is_refused(make):
    layer, x = make(), torch.randn(6, 2, 3)
    packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 3]))
    in_the_middle = torch.zeros(6, 2, dtype=torch.bool).index_fill(0, torch.tensor([3]), True)
    with RTRL(stream=True).attach(layer):
        with pytest.raises(gradfree.ChainError, match="chunks of equal length"):
            layer(packed)[0].data.sum().backward()
        with pytest.raises(gradfree.ChainError, match=r"not of pieces|not by run_with_resets"):
            gradfree.run_with_resets(layer, x, None, in_the_middle)[0].sum().backward()


class Residual(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.layer = make()

    def forward(self, x):
        return x + self.layer(x)[0]


@pytest.mark.parametrize("make", [lambda: nn.GRU(4, 4), lambda: gradfree.CellLayer(nn.GRUCell(4, 4))])
def test_a_stream_inside_a_block_that_runs_backward_several_times_is_refused(make):
    model, x = nn.Sequential(*(Residual(make) for _ in range(3))), torch.randn(5, 2, 4)
    layers = [f"{n}.layer" for n in range(3)]
    with RTRL(stream=True).attach(model, layers), gradfree.create_engine("backprop", plain=False).attach(model, [""]):
        model(x).sum().backward()
    with (
        RTRL(stream=True).attach(model, layers),
        HighwayBP(iterations=2).attach(model, [""]),
        pytest.raises(gradfree.ChainError, match="part of a block that another engine runs backward several times"),
    ):
        model(x).sum().backward()


class Grid(nn.Module):
    hidden_size = 2

    def __init__(self):
        super().__init__()
        self.read = nn.Linear(INPUT, 4)

    def forward(self, x, state):
        return torch.tanh(state + self.read(x).unflatten(1, (2, 2)))


@pytest.mark.parametrize(
    ("make", "state"), [(CELLS["two parts"][0], [(HIDDEN,), (2,)]), (Grid, [(2, 2)])], ids=["two widths", "a grid"]
)
def test_snap_refuses_a_state_that_has_no_units(make, state):
    layer, parts = gradfree.CellLayer(make()), [torch.zeros(3, *shape) for shape in state]
    with SnAp().attach(layer), pytest.raises(gradfree.ChainError, match=r"one shape \(samples, units\), not \(3, "):
        layer(torch.randn(6, 3, INPUT), tuple(parts) if len(parts) > 1 else parts[0])[0].sum().backward()


def test_snap_refuses_an_output_beside_the_state():
    with pytest.raises(gradfree.ChainError, match=r"an output beside its state \(output_size\)"):
        SnAp().attach(gradfree.CellLayer(CELLS["projecting"][0]()))
