"""Blocks of one class that are not equal, among equal ones: gradients are autograd's, or an error is raised."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from unusual_nets import LENGTH, SAMPLES, WIDTH, Residual

import gradfree
from gradfree import ChainError


class Normed(Residual):
    """A block with buffers, attributes and modes that its copy must have, too."""

    def __init__(self):
        super().__init__()
        self.norm, self.dropout = nn.BatchNorm1d(WIDTH, momentum=0.5), nn.Dropout(0.5)
        self.norm.running_mean.uniform_(-1, 1)
        self.norm.running_var.uniform_(0.5, 2)
        self.gain = 1.0

    def forward(self, x):
        return x + self.gain * self.dropout(torch.tanh(self.linear(self.norm(x))))


def a_block_with_another_attribute(net):
    net[2].gain = 0.3


def a_layer_with_another_attribute(net):
    net[1].norm.eps = 0.5


def a_block_in_another_mode(net):
    net[1].train()


def buffers_of_their_own(net):
    net[3].norm.running_var.fill_(9.0)


def a_layer_in_place(net):
    for block in net:
        block.dropout = nn.ReLU(inplace=True)


def a_hook_inside_one_block(net):
    net[1].linear.register_forward_hook(lambda layer, given, out: out * 0.5)


def a_hook_on_one_block(net):
    net[1].register_forward_hook(lambda block, given, out: out * 0.5)


def a_hook_before_one_block(net):
    net[2].register_forward_pre_hook(lambda block, given: (given[0] * 0.5,))


def a_forward_of_its_own(net):
    net[2].forward = lambda x: x + 0.5 * torch.tanh(net[2].linear(x))


def a_frozen_block(net):
    net[1].requires_grad_(False)


def a_weight_of_two_blocks(net):
    net[3].linear.weight = net[0].linear.weight


def a_block_in_two_places(net):
    net[3] = net[0]


def a_block_without_a_bias(net):
    torch.manual_seed(2)
    net[2].linear = nn.Linear(WIDTH, WIDTH, bias=False)


def a_layer_replaced(net):
    torch.manual_seed(2)
    net[2].linear = nn.Linear(WIDTH, WIDTH)


def dropout_in_training(net):
    net.train()


def nothing(net):
    """Change nothing."""


CHANGES = {
    change.__name__.replace("_", " "): change
    for change in (
        nothing,
        a_block_with_another_attribute,
        a_layer_with_another_attribute,
        a_block_in_another_mode,
        buffers_of_their_own,
        a_layer_in_place,
        a_hook_inside_one_block,
        a_hook_on_one_block,
        a_hook_before_one_block,
        a_forward_of_its_own,
        a_frozen_block,
        a_weight_of_two_blocks,
        a_block_in_two_places,
        a_block_without_a_bias,
        a_layer_replaced,
        dropout_in_training,
    )
}


# With batched="auto" these must not be refused.
NOT_REFUSED = (
    *(nothing, a_block_in_another_mode, a_hook_inside_one_block, a_hook_on_one_block, a_hook_before_one_block),
    *(a_forward_of_its_own, a_frozen_block, a_weight_of_two_blocks, dropout_in_training),
)


def row(changes):
    """Return an ``nn.Sequential`` of blocks that are equal except for the changes; the same in every call."""
    torch.manual_seed(0)
    net = nn.Sequential(*(Normed() for _ in range(LENGTH))).eval()
    for change in changes:
        change(net)
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
@pytest.mark.parametrize("change", CHANGES)
def test_blocks_that_look_equal_and_are_not_are_exact_or_refused(change, when, batched):
    """Changed before the engine is attached, or after two passes."""
    expected = gradients(row([CHANGES[change]]))
    net = row([CHANGES[change]] if when == "before" else [])
    try:
        handle = gradfree.create_engine("highway_bp", iterations=LENGTH - 1).attach(net, [""], batched=batched)
    except ChainError:
        return
    with handle:
        for _ in range(2):
            gradients(net)
        if when == "later":
            CHANGES[change](net)
            net.zero_grad()
        else:
            # The two passes have changed the running statistics: restore them.
            net.load_state_dict(row([CHANGES[change]]).state_dict())
        actual = gradients(net)
    if isinstance(actual, ChainError) and (batched is True or CHANGES[change] not in NOT_REFUSED):
        return
    assert not isinstance(actual, RuntimeError), actual
    assert_close(actual, expected, rtol=1e-10, atol=1e-12)
