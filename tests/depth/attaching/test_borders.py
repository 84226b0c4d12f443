"""One node serves several blocks: what is refused, and what is exact, is so at every place of a long chain."""

import pytest
import torch
from torch import nn

import gradfree
from gradfree.errors import ChainError
from gradfree.testing.cases.models import assert_equal_gradients, gradients

LENGTH = 12


class Block(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.kept = None

    def forward(self, x):
        self.kept = torch.tanh(self.linear(x))
        return torch.sigmoid(x + self.kept)


class Narrower(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width - 1)

    def forward(self, x):
        return self.linear(x)


def run(blocks, x):
    states = []
    for block in blocks:
        x = block(x)
        states.append(x)
    return states


def attached(blocks, k=LENGTH):
    return gradfree.create_engine("fixed_point", iterations=k).attach(blocks, [""])


@pytest.mark.parametrize("at", range(LENGTH - 1))
def test_the_gradient_of_a_state_between_the_blocks_is_refused(at):
    blocks, x = nn.ModuleList(Block() for _ in range(LENGTH)), torch.randn(3, 4)
    with attached(blocks):
        states = run(blocks, x)
        with pytest.raises(ChainError, match="inside a chain there is its direct cotangent only"):
            torch.autograd.grad(states[-1].sum() + states[at].sum(), [states[at]])


@pytest.mark.parametrize("at", range(LENGTH))
def test_a_loss_on_a_tensor_from_inside_a_block(at):
    blocks, x = nn.ModuleList(Block() for _ in range(LENGTH)), torch.randn(3, 4, requires_grad=True)

    def grads():
        loss = run(blocks, x)[-1].sum() + blocks[at].kept.sum()
        found = torch.autograd.grad(loss, [x, *blocks.parameters()], retain_graph=True)
        return dict(enumerate(found)), loss

    expected, _ = grads()
    with attached(blocks):
        actual, _ = grads()
        assert_equal_gradients(actual, expected)
        with pytest.raises(ChainError, match=r"no state of the chain|graph is freed already"):
            blocks[at].kept.sum().backward()


@pytest.mark.parametrize("at", range(LENGTH - 1))
def test_a_state_that_is_changed_in_place_behind_its_use_is_refused(at):
    """The graph of the sigmoid before it has it, and that of the linear layer behind it."""
    blocks, x = nn.ModuleList(Block() for _ in range(LENGTH)), torch.randn(3, 4)
    with attached(blocks):
        states = run(blocks, x)
        loss = states[-1].sum()
        with torch.no_grad():
            states[at] += 1
        del states
        with pytest.raises(ChainError, match="modified by an inplace operation"):
            loss.backward()


def test_states_of_ever_other_shapes_and_several_passes_before_one_backward():
    blocks = nn.ModuleList([Block(9), Block(9), *(Narrower(w) for w in (9, 8, 7)), Block(6), Block(6), Narrower(6)])
    xs = [torch.randn(2, 9), torch.randn(5, 9)]

    def loss():
        return sum((state**2).sum() * n for x in xs for n, state in enumerate(run(blocks, x), 1))

    expected = gradients(blocks, loss)
    with attached(blocks):
        assert_equal_gradients(gradients(blocks, loss), expected)
