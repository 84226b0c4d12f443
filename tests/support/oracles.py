"""Reference computations, comparisons, and checks that a refusal changed nothing."""

import copy

import torch

WIDTH = 4


def loop(terms, factors, reverse):
    """The recurrence, step by step."""
    y, per_step = torch.zeros_like(terms), factors.dim() == terms.dim()
    carried = torch.zeros_like(terms[0])
    for t in reversed(range(len(terms))) if reverse else range(len(terms)):
        link = min(t + 1, len(terms) - 1) if reverse else t
        carried = terms[t] + (factors[link] if per_step else factors) * carried
        y[t] = carried
    return y


FACTORS = {
    "zero": lambda length: torch.zeros(WIDTH),
    "one": lambda length: torch.ones(WIDTH),
    "linspace": lambda length: torch.linspace(0, 1, WIDTH),
    "number": lambda length: torch.tensor(0.5),
    "of each sequence": lambda length: torch.randn(3, WIDTH),
    "of each step": lambda length: torch.randn(length, 3, WIDTH),
}


class Halving(torch.autograd.Function):
    """Halves its cotangent in place, which autograd allows if nothing else reads it."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, cotangent):
        return cotangent.mul_(0.5)


def assert_close(actual, expected):
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-10, atol=1e-10 * e.abs().max().item())


def off_by(actual, expected):
    """Return the largest difference, relative to the largest entry of the same tensor; NaN if there is one."""
    largest = [max(e.abs().max().item(), 1e-300) for e in expected]
    errors = [(a - e).abs().max().item() / size for a, e, size in zip(actual, expected, largest, strict=True)]
    # Python's max would pass over a NaN.
    return torch.tensor(errors, dtype=torch.float64).max().item()


def snapshot(model):
    """Return the state of a model that a refused attach or pass must not change."""
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    return copy.deepcopy(model.state_dict()), hooks, [p.grad is None for p in model.parameters()]


def assert_unchanged(model, before):
    state, hooks, without_grad = snapshot(model)
    assert all(torch.equal(state[key], value) for key, value in before[0].items())
    assert (hooks, without_grad) == before[1:]
