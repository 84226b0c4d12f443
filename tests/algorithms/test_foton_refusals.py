"""Layers, losses and changes between the passes that FOTON refuses."""

import pytest
import torch
from layered_nets import dense
from torch import nn

from gradfree import ChainError
from gradfree.algorithms import FOTON


def test_keeping_f_requires_outputs_of_samples_by_classes():
    net = dense(6, 5, 4)
    with FOTON(refresh_feedback_every=2).attach(net):
        out = net(torch.randn(3, 7, 6))
        with pytest.raises(ChainError, match=r"takes outputs \(samples, classes\), but 1 returns \(3, 7, 4\)"):
            out.sum().backward()


def test_a_loss_on_a_state_inside_the_chain_is_refused():
    net, x, seen = dense(8, 8, 6, 4, bend=nn.Tanh), torch.randn(3, 8), []
    net[1].register_forward_hook(lambda layer, args, out: seen.append(out))
    with FOTON().attach(net):
        loss = net(x).sum() + seen[0].sum()
        with pytest.raises(ChainError, match="the loss uses the output of 1, which lies inside the chain"):
            loss.backward()
    assert all(p.grad is None for p in net.parameters())


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("what", ["a weight", "the input"])
def test_a_change_between_the_passes_is_refused(what, streaming):
    net, x = dense(8, 8, 6, 4, bend=nn.Tanh), torch.randn(3, 8)
    with FOTON(streaming=streaming).attach(net):
        out = net(x).sum()
        with torch.no_grad():
            (net[2].weight if what == "a weight" else x).mul_(2)
        with pytest.raises(ChainError, match="was changed in place between the forward and the backward pass"):
            out.backward()


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (nn.BatchNorm1d(6), "1 is a BatchNorm1d, which this engine cannot split"),
        (nn.PReLU(), "1 is a PReLU, which this engine cannot split"),
        (nn.GRU(6, 6), "1 is a GRU, which this engine cannot split"),
        (nn.MaxPool1d(2, dilation=2), "1 is a MaxPool1d, which this engine cannot split"),
    ],
)
def test_unknown_layers_are_refused(layer, message):
    net = nn.Sequential(nn.Linear(6, 6), layer, nn.Linear(6, 4))
    report = FOTON().validate(net, [""])
    assert len(report.problems) == 1
    assert report.problems[0].startswith(message)
