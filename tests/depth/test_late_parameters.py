"""Parameters that enter the blocks after the engine was attached get autograd's gradients, or are refused at once."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import gradfree
from gradfree import ChainError
from gradfree.testing.cases.models import Plain, assert_equal_gradients, gradients

L = 4
ENGINES = {
    **{name: {"iterations": L} for name in ("highway_bp", "fixed_point", "predictive_coding")},
    **{name: {} for name in ("truncated", "dsf", "deeppcr", "dfa", "forward_gradient")},
    "backprop": {"plain": False},
}


class Adapted(nn.Module):
    """A layer with trainable numbers beside it."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.own = layer, nn.Parameter(torch.rand(6, 6))

    def forward(self, x):
        return self.layer(x) + x @ self.own


class Gain(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.rand(6, 6))

    def forward(self, weight):
        return weight * self.gain


LATE = {
    "adapters": lambda block: setattr(block, "linear", Adapted(block.linear)),
    "another layer": lambda block: setattr(block, "linear", nn.Linear(6, 6)),
    "a parametrization": lambda block: parametrize.register_parametrization(block.linear, "weight", Gain()),
}


@pytest.mark.parametrize("late", LATE)
@pytest.mark.parametrize("name", ENGINES)
def test_a_frozen_body_with_its_head_outside_refuses_late_parameters_in_the_forward_pass(name, late):
    body, head, x = (
        nn.Sequential(*[Plain() for _ in range(L)]).requires_grad_(False),
        nn.Linear(6, 3),
        torch.randn(5, 6),
    )
    with gradfree.create_engine(name, **ENGINES[name]).attach(body, batched=False):
        head(body(x)).sum().backward()
        for block in body[1:]:
            LATE[late](block)
        with pytest.raises(ChainError, match=r"^1 uses a tensor of shape .* that needs a gradient .*, or register it"):
            body(x)


@pytest.mark.parametrize("trained", ["the head", "a block", "the input"])
@pytest.mark.parametrize("late", LATE)
def test_where_something_else_is_trained_late_parameters_are_refused_in_the_backward_pass(late, trained):
    model, x = nn.Sequential(nn.Sequential(*[Plain() for _ in range(L)]), nn.Linear(6, 3)), torch.randn(5, 6)
    model[0].requires_grad_(False)
    model[0][3].requires_grad_(trained == "a block")
    x.requires_grad_(trained == "the input")
    chain = {"chains": ["0"]} if trained == "the head" else {}
    with gradfree.create_engine("highway_bp").attach(model if chain else model[0], **chain, batched=False):
        LATE[late](model[0][1])
        loss = model(x).sum()
        with pytest.raises(ChainError, match=r"1 uses a tensor of shape .* that needs a gradient"):
            loss.backward()


def test_a_late_tensor_that_is_no_parameter_gets_autograds_gradient_or_is_refused():
    body, head, x = (
        nn.Sequential(*[Plain() for _ in range(L)]).requires_grad_(False),
        nn.Linear(6, 3),
        torch.randn(5, 6),
    )
    first, second = torch.rand(6, requires_grad=True), torch.rand(6, requires_grad=True)
    with gradfree.create_engine("highway_bp").attach(body, batched=False) as handle:
        vars(body[0].linear)["forward"] = lambda x: x * first
        actual = torch.autograd.grad(head(body(x)).sum(), first)
        vars(body[2].linear)["forward"] = lambda x: x * second
        loss = head(body(x)).sum()
        with pytest.raises(ChainError, match=r"^2 uses a tensor of shape \(6,\) that needs a gradient"):
            loss.backward()
        handle.detach()
        del vars(body[2].linear)["forward"]
        assert_equal_gradients({"": actual[0]}, {"": torch.autograd.grad(head(body(x)).sum(), first)[0]})


@pytest.mark.parametrize("batched", ["auto", True])
def test_blocks_in_a_row_train_late_parameters_as_autograd_does(batched):
    body, head = nn.Sequential(*[Plain() for _ in range(L)]).requires_grad_(False), nn.Linear(6, 3)
    x = torch.randn(5, 6)
    with gradfree.create_engine("highway_bp", iterations=L).attach(body, batched=batched) as handle:
        head(body(x)).sum().backward()
        for block in body:
            LATE["adapters"](block)
        actual = gradients(body, lambda: head(body(x)))
        handle.detach()
        assert_equal_gradients(actual, gradients(body, lambda: head(body(x))))
