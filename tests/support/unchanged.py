"""What a refusal must leave as it was."""

import copy

import torch


def snapshot(model):
    """Return everything of a model that a refused attach or pass might have changed."""
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    return copy.deepcopy(model.state_dict()), hooks, [p.grad is None for p in model.parameters()]


def assert_unchanged(model, before):
    state, hooks, without_grad = snapshot(model)
    assert all(torch.equal(state[key], value) for key, value in before[0].items())
    assert (hooks, without_grad) == before[1:]
