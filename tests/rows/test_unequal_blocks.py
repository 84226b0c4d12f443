"""Blocks of one class that are not equal, among equal ones: gradients are autograd's, or an error is raised."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import gradfree
from gradfree import ChainError
from gradfree.testing.cases.models import Plain
from gradfree.torchside.graph import walk

LENGTH, WIDTH, SAMPLES = 4, 6, 3


class Normed(Plain):
    """A block with buffers, attributes and modes that its copy must have, too."""

    def __init__(self):
        super().__init__()
        self.norm, self.dropout = nn.BatchNorm1d(WIDTH, momentum=0.5), nn.Dropout(0.5)
        self.norm.running_mean.uniform_(-1, 1)
        self.norm.running_var.uniform_(0.5, 2)
        self.gain, self.cut, self.act = 1.0, False, torch.tanh

    def forward(self, x):
        given = x.detach() if self.cut else x
        return x + self.gain * self.dropout(self.act(self.linear(self.norm(given))))


def of_all(name, value):
    """Return a change that sets an attribute of all blocks."""
    return lambda net: [setattr(block, name, value) for block in net]


# With batched="auto" these must not be refused.
NOT_REFUSED = {
    "nothing": lambda net: None,
    "a block in another mode": lambda net: net[1].train(),
    "a hook inside one block": lambda net: net[1].linear.register_forward_hook(lambda layer, given, out: out * 0.5),
    "a hook on one block": lambda net: net[1].register_forward_hook(lambda block, given, out: out * 0.5),
    "a hook before one block": lambda net: net[2].register_forward_pre_hook(lambda block, given: (given[0] * 0.5,)),
    "a forward of its own": lambda net: setattr(net[2], "forward", lambda x: x + torch.tanh(net[2].linear(x)) / 2),
    "a frozen block": lambda net: net[1].requires_grad_(False),
    "a weight of two blocks": lambda net: setattr(net[3].linear, "weight", net[0].linear.weight),
    "dropout in training": lambda net: net.train(),
    "all cut, with the same outputs": of_all("cut", True),
    "a layer more in each": of_all("act", nn.ReLU()),
    "another block": lambda net: net.__setitem__(2, Normed().eval()),
    "a block more": lambda net: net.append(Normed().eval()),
    "another layer": lambda net: setattr(net[2], "linear", nn.Linear(WIDTH, WIDTH).eval()),
}
CHANGES = {
    **NOT_REFUSED,
    "a block with another attribute": lambda net: setattr(net[2], "gain", 0.3),
    "a layer with another attribute": lambda net: setattr(net[1].norm, "eps", 0.5),
    "buffers of its own": lambda net: net[3].norm.running_var.fill_(9.0),
    "a layer in place": of_all("dropout", nn.ReLU(inplace=True)),
    "a block in two places": lambda net: net.__setitem__(3, net[0]),
    "a block without a bias": lambda net: setattr(net[2], "linear", nn.Linear(WIDTH, WIDTH, bias=False)),
}


def change(name, net):
    """Make the change ``name``, with the same random numbers in every call."""
    torch.manual_seed(2)
    CHANGES[name](net)


def row(*changes):
    """Return an ``nn.Sequential`` of blocks that are equal except for the changes; the same in every call."""
    torch.manual_seed(0)
    net = nn.Sequential(*(Normed() for _ in range(LENGTH))).eval()
    for name in changes:
        change(name, net)
    return net


def gradients(net):
    """Return the gradients of a pass, or the error; with the same dropout masks and inputs in every call."""
    torch.manual_seed(1)
    x = torch.randn(SAMPLES, WIDTH, requires_grad=True)
    net.zero_grad()
    try:
        net(x).pow(2).sum().backward()
    except RuntimeError as error:
        return error
    return {name: p.grad for name, p in [("blocks.x", x), *net.named_parameters()]}


@pytest.mark.parametrize("batched", ["auto", True])
@pytest.mark.parametrize("when", ["before", "later"])
@pytest.mark.parametrize("name", CHANGES)
def test_blocks_that_look_equal_and_are_not_are_exact_or_refused(name, when, batched):
    """Changed before the engine is attached, or after two passes."""
    expected = gradients(row(name))
    net = row(name) if when == "before" else row()
    try:
        handle = gradfree.create_engine("highway_bp", iterations=LENGTH).attach(net, [""], batched=batched)
    except ChainError:
        return
    with handle:
        for _ in range(2):
            gradients(net)
        if when == "later":
            change(name, net)
            net.zero_grad()
        else:
            # The two passes have changed the running statistics: restore them.
            net.load_state_dict(row(name).state_dict())
        actual = gradients(net)
        if name == "nothing" and batched == "auto":
            net.train()(torch.randn(SAMPLES, WIDTH))
            assert len(walk([net.eval()(torch.randn(SAMPLES, WIDTH))]).nodes) < LENGTH, "no row"
    if isinstance(actual, ChainError) and (batched is True or name not in NOT_REFUSED):
        return
    assert not isinstance(actual, RuntimeError), actual
    assert_close(actual, expected, rtol=1e-10, atol=1e-12)
