"""Memory of chains: a namespace for each owner, and running means."""

import copy

import pytest
import torch
from torch import nn

import gradfree
from gradfree.chains.memory import Memory, running_mean


def test_owners_have_separate_namespaces():
    """Also if two owners use the same name."""
    memory = Memory()
    one, other = torch.zeros(1), torch.ones(1)
    memory.of("one")["x"], memory.of("other")["x"] = one, other
    state = memory.state_dict()
    assert state == {"one: x": one, "other: x": other}
    again = Memory()
    held = again.of("other")
    again.load_state_dict(state)
    assert held == {"x": other}
    assert again.state_dict() == state
    with pytest.raises(ValueError, match="'mean of x' is no name of a chain's state"):
        again.load_state_dict({"one: x": other, "mean of x": one})
    assert again.state_dict() == state
    again.load_state_dict({})
    assert held == again.state_dict() == {}


def test_a_handle_loads_the_state_of_all_chains_or_of_none():
    model = nn.ModuleList([nn.GRU(3, 3), nn.GRU(3, 3)])
    with gradfree.create_engine("dsf", feedback="gate").attach(model) as handle:

        def step():
            x = torch.randn(5, 2, 3)
            (model[0](x)[0] + model[1](x)[0]).sum().backward()
            return copy.deepcopy(handle.state_dict())

        before, now = step(), step()
        with pytest.raises(ValueError, match="'mean of x' is no name"):
            handle.load_state_dict(before | {"1": {"mean of x": torch.zeros(3)}})
        assert str(handle.state_dict()) == str(now) != str(before)


def test_a_running_mean_moves_by_the_momentum_towards_each_new_value():
    """The first mean is the first value; then it moves by the momentum, 0.1, towards each value."""
    memory = Memory()
    assert running_mean(memory, "gate", torch.tensor([2.0, 4.0]), 0.1).tolist() == [2.0, 4.0]
    torch.testing.assert_close(running_mean(memory, "gate", torch.tensor([12.0, 4.0]), 0.1), torch.tensor([3.0, 4.0]))
    torch.testing.assert_close(
        running_mean(memory, "gate", torch.tensor([torch.inf, 14.0]), 0.1), torch.tensor([3.0, 5.0])
    )
