"""Equal blocks have the same gradients in a batch and one by one, with few and with enough iterations."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from unusual_nets import SAMPLES, WIDTH, Residual

import gradfree

LENGTH = 5
ENGINES = {
    "highway_bp, 0": ("highway_bp", {"iterations": 0}),
    "highway_bp, 1": ("highway_bp", {"iterations": 1}),
    "highway_bp, 2, gamma 0.3": ("highway_bp", {"iterations": 2, "gamma": 0.3}),
    "highway_bp, 4": ("highway_bp", {"iterations": 4}),
    "fixed_point, 1": ("fixed_point", {"iterations": 1}),
    "truncated, 2": ("truncated", {"window": 2}),
    "dsf, 1": ("dsf", {"feedback": 0.7, "iterations": 1}),
}


class Normed(Residual):
    """A block with buffers."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.norm.running_mean.uniform_(-1, 1)
        self.norm.running_var.uniform_(0.5, 2)

    def forward(self, x):
        return x + torch.tanh(self.linear(self.norm(x)))


def usual(net):
    """Change nothing."""


def shared(net):
    net[3].linear.weight = net[1].linear.weight


def frozen(net):
    net.requires_grad_(False)
    for block in net:
        block.linear.weight.requires_grad_(True)


def gradients(net):
    """Return the gradients of two passes, with two backward passes each."""
    torch.manual_seed(1)
    found = []
    for size in (SAMPLES, SAMPLES + 1):
        net.zero_grad()
        x = torch.randn(size, WIDTH, requires_grad=True)
        loss = net(x).pow(2).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        found += [x.grad, *(None if p.grad is None else p.grad.clone() for p in net.parameters())]
    return found


@pytest.mark.parametrize("change", [usual, shared, frozen], ids=lambda change: change.__name__)
@pytest.mark.parametrize("engine", ENGINES)
def test_gradients_in_a_batch_are_those_one_by_one(engine, change):
    net = nn.Sequential(*(Normed() for _ in range(LENGTH))).eval()
    change(net)
    name, options = ENGINES[engine]
    found = []
    for batched in (True, False):
        with gradfree.create_engine(name, **options).attach(net, [""], batched=batched):
            found.append(gradients(net))
    assert_close(found[0], found[1], rtol=1e-10, atol=1e-12)
