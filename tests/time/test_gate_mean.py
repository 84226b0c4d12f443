"""DSF's running mean of the gate: with padding, averaged over ranks."""

import pytest
import torch
from recurrent_tasks import HIDDEN, INPUT
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

import gradfree
from gradfree.models import ParaLSTM
from gradfree.testing.cases.models import assert_equal_gradients, gradients, plain_model


def test_the_mean_gate_ignores_padding_and_empty_or_non_finite_batches():
    module = nn.GRU(INPUT, HIDDEN)
    x = torch.randn(6, 2, INPUT)
    lengths = torch.tensor([6, 2], device="cpu")
    engine = gradfree.create_engine("dsf", feedback="gate")

    def mean_after(*inputs):
        with engine.attach(module) as handle:
            for given in inputs:
                out = module(given)[0]
                (out.data if isinstance(out, nn.utils.rnn.PackedSequence) else out).sum().backward()
            return handle.state_dict()[""]["means: l0.0"]

    whole = mean_after(x[:, :1])
    both = (6 * whole + 2 * mean_after(x[:2, 1:])) / 8
    torch.testing.assert_close(mean_after(pack_padded_sequence(x, lengths)), both)
    for broken in (x * float("nan"), x[:, :0]):
        assert torch.equal(mean_after(x[:, :1], broken), whole)


class Leaky(gradfree.ElementwiseCell):
    hidden_size = HIDDEN

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(INPUT, 2 * HIDDEN)

    def fed(self, x):
        return self.linear(x)

    def advance(self, fed, state):
        leak, new = fed.chunk(2, -1)
        return (torch.lerp(new, state[0], leak.sigmoid()),)


def test_the_mean_gate_of_a_cell_ignores_padding():
    layer, x = gradfree.CellLayer(Leaky()), torch.randn(6, 2, INPUT)
    leak = layer.cell.fed(x).detach()[..., :HIDDEN].sigmoid()
    with gradfree.create_engine("dsf", feedback="gate").attach(layer) as handle:
        layer(pack_padded_sequence(x, torch.tensor([6, 2], device="cpu")))[0].data.sum().backward()
        found = handle.state_dict()[""]["means: .0"]
    torch.testing.assert_close(found, torch.cat([leak[:, 0], leak[:2, 1]]).mean(0))


DEFAULTS = {
    "gate": [lambda: nn.GRU(3, 4), lambda: nn.LSTM(3, 4), lambda: ParaLSTM(3, 4)],
    "linspace": [lambda: nn.RNN(3, 4), lambda: gradfree.CellLayer(nn.GRUCell(3, 4))],
}


@pytest.mark.filterwarnings("ignore:.*hides the gate")
@pytest.mark.parametrize(("feedback", "make"), [(name, make) for name in DEFAULTS for make in DEFAULTS[name]])
def test_the_default_feedback_is_the_gate_where_the_cell_has_one(feedback, make):
    layer, x = make(), torch.randn(6, 2, 3)
    found = []
    for options in ({}, {"feedback": feedback}):
        with gradfree.create_engine("dsf", **options).attach(layer) as handle:
            found.append(torch.autograd.grad(layer(x)[0].square().sum(), [*layer.parameters()]))
            assert bool(handle.state_dict().get("")) == (feedback == "gate")
    assert all(map(torch.equal, *found))


def test_the_default_feedback_of_blocks_is_the_papers():
    model, x = plain_model(4), torch.randn(3, 6)
    found = []
    for options in ({}, {"feedback": "linspace"}):
        with gradfree.create_engine("dsf", **options).attach(model):
            found.append(gradients(model, lambda: model(x)))
    assert_equal_gradients(*found)


@pytest.mark.parametrize("make", [lambda: nn.LSTM(3, 4, 2, bidirectional=True), lambda: ParaLSTM(3, 4)])
def test_a_rank_without_a_mean_joins_the_average_of_the_others(make, monkeypatch):
    """Each rank takes part in one collective of the same shape, even if a chain is unused; else ranks would hang."""
    sent, engine = [], gradfree.create_engine("dsf", feedback="gate")
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    monkeypatch.setattr("torch.distributed.all_reduce", lambda x: sent.append(x.clone()))
    model, x = nn.ModuleDict({"used": make(), "unused": make()}), torch.randn(5, 2, 3)
    with (
        engine.attach(model) as first,
        engine.attach(other := nn.ModuleDict({"used": make(), "unused": make()})) as late,
    ):
        model["used"](x)[0].sum().backward()
        own = first.state_dict()["used"]
        first.average_over_ranks()
        monkeypatch.setattr("torch.distributed.all_reduce", lambda x: sent.append(x.clone()) or x.add_(sent[0]))
        late.average_over_ranks()
        assert [x.shape for x in sent] == [sent[0].shape] * 2
        received = late.state_dict()
        assert received["used"].keys() == own.keys()
        assert all(torch.equal(received["used"][key], mean) for key, mean in own.items())
        other["unused"](x)[0].sum().backward()
        assert all(mean.isfinite().all() for mean in late.state_dict()["unused"].values())
