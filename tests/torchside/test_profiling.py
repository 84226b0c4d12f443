"""What torch.profiler shows of an engine's phases: all of them, without changing a bit of the gradients."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gradfree
from gradfree.testing.cases.models import layered_model, plain_model


class OwnCell(nn.GRUCell):
    """Of a class that no closed form is known of."""


def recurrent(module):
    return lambda: nn.ModuleDict({"rnn": module()})


GATED = {"forward", "local derivatives", "scan", "pulls", "parameter gradients"}
SEEN = {
    "GRU, highway_bp": (recurrent(lambda: nn.GRU(6, 6)), "highway_bp", {"iterations": 1}, GATED),
    "LSTM, backprop": (
        recurrent(lambda: nn.LSTM(6, 6)),
        "backprop",
        {},
        {"forward", "local derivatives", "δ step by step", "parameter gradients"},
    ),
    "own cell, backprop": (
        recurrent(lambda: gradfree.CellLayer(OwnCell(6, 6))),
        "backprop",
        {},
        {"local derivatives", "δ step by step", "parameter gradients"},
    ),
    "blocks, fixed_point": (plain_model, "fixed_point", {"iterations": 1}, {"scan", "pulls", "parameter gradients"}),
    "blocks, backprop": (plain_model, "backprop", {"plain": False}, {"backpropagation"}),
    "layers, foton": (layered_model, "foton", {"orthogonalize_every": 1}, {"feedback", "retraction"}),
}


def step(model, engine):
    """Take one step; return the gradients and the new weights."""
    torch.manual_seed(2)
    x = torch.randn(4, 6)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with engine.attach(model):
        out = model["rnn"](x.unsqueeze(1))[0] if isinstance(model, nn.ModuleDict) else model(x)
        F.mse_loss(out, torch.zeros_like(out)).backward()
        optimizer.step()
    return [*(p.grad.clone() for p in model.parameters() if p.grad is not None), *model.parameters()]


@pytest.mark.parametrize("case", SEEN)
def test_the_profiler_sees_each_phase_of_the_engine_and_changes_nothing(case):
    make, name, options, phases = SEEN[case]
    engine, results = gradfree.create_engine(name, **options), []
    for watched in (False, True):
        torch.manual_seed(1)
        model = make()
        with torch.profiler.profile() if watched else torch.no_grad() as profile, torch.enable_grad():
            results.append(step(model, engine))
    ranges = {event.name for event in profile.events() if event.name.startswith("gradfree::")} if watched else set()
    assert {name.removeprefix("gradfree::") for name in ranges} == phases
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
