"""Engines compute what the naive dense solver of their one idea computes, in depth and in time."""

import pytest
import torch
from torch import nn

import gradfree
from gradfree.testing import reference

L, WIDTH, BATCH = 7, 3, 2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


def loss_of(states):
    """Every state counts, and not alike."""
    return sum((h * (i + 1)).sin().sum() for i, h in enumerate(states[1:]))


def in_depth(engine):
    """Return the links, the first state, the parameters, K of the residual path, and the engine's gradients."""
    blocks = nn.Sequential(*(Block() for _ in range(L)))
    x = torch.randn(BATCH, WIDTH)
    with engine.attach(blocks):
        states = [x]
        for block in blocks:
            states.append(block(states[-1]))
        loss_of(states).backward()
    own = list(blocks.parameters())
    return list(blocks), x, own, [torch.eye(x.numel())] * L, [p.grad for p in own]


def in_time(engine):
    gru, xs = nn.GRU(2, WIDTH), torch.randn(L, BATCH, 2)
    w_ih, w_hh, b_ih, b_hh = own = list(gru.parameters())
    first = torch.randn(BATCH, WIDTH)

    def link(x, gates=None):
        def step(h):
            r, z, n = (x @ w_ih.T + b_ih).chunk(3, -1)
            r_h, z_h, n_h = (h @ w_hh.T + b_hh).chunk(3, -1)
            z = torch.sigmoid(z + z_h)
            if gates is not None:
                gates.append(z.detach())
            return (1 - z) * torch.tanh(n + torch.sigmoid(r + r_h) * n_h) + z * h

        return step

    with engine.attach(gru):
        loss_of([first, *gru(xs, first[None])[0]]).backward()
    gates = []
    reference.states_of([link(x, gates) for x in xs], first)
    kept = [torch.diag(z.flatten()) for z in gates]
    return [link(x) for x in xs], first, own, kept, [p.grad for p in own]


def zeros(kept):
    return [torch.zeros_like(k) for k in kept]


EVERYWHERE = {
    "backprop": ({"plain": False}, lambda e, f, k: reference.backward(e, f)),
    "fixed_point": ({"iterations": 2}, lambda e, f, k: reference.sweeps(e, f, zeros(k), 2)),
    "truncated": ({"window": 3}, lambda e, f, k: reference.sweeps(e, f, zeros(k), 2)),
    "highway_bp": ({"iterations": 2, "gamma": 0.3}, lambda e, f, k: reference.sweeps(e, f, [0.7 * x for x in k], 2)),
    "dsf": (
        {"feedback": 0.6, "iterations": 1},
        lambda e, f, k: reference.sweeps(e, f, [0.6 * torch.eye(len(x)) for x in k], 1),
    ),
    "predictive_coding": (
        {"iterations": 3, "rate": 0.4},
        lambda e, f, k: reference.sweeps(e, f, zeros(k), 3, rate=0.4),
    ),
    "deeppcr": ({}, lambda e, f, k: reference.backward(e, f)),
}
IN_DEPTH = {
    "highway_bp": (
        {"segments": 3, "iterations": 1},
        lambda e, f, k: reference.segmented(e, f, k, [2, 4, 6], 1),
    ),
}
IN_TIME = {
    "shooting": ({"segments": 3}, lambda e, f, k: reference.segmented(e, f, zeros(k), [2, 4, 6], 2)),
    "newton": ({"max_sweeps": 9}, lambda e, f, k: reference.sweeps(e, f, k, L - 1)),
    "snap": ({}, lambda e, f, k: reference.backward(e, [x.diagonal().diag() for x in f])),
    "eprop": ({}, lambda e, f, k: reference.backward(e, k)),
    "rtrl": ({}, lambda e, f, k: reference.backward(e, f)),
}
CASES = [
    *((in_depth, *case) for case in [*EVERYWHERE.items(), *IN_DEPTH.items()]),
    *((in_time, *case) for case in [*EVERYWHERE.items(), *IN_TIME.items()]),
]


def test_the_dense_solver_computes_in_the_states_own_dtype():
    weight, first = torch.randn(3, 3, dtype=torch.float64, requires_grad=True), torch.randn(2, 3, dtype=torch.float64)
    links = [lambda h: torch.tanh(h @ weight)] * 3
    expected = torch.autograd.grad(links[1](links[0](first)).sum(), weight)
    torch.set_default_dtype(torch.float32)
    states = reference.states_of(links, first)
    e, f = reference.direct_cotangents(lambda states: states[2].sum(), states), reference.jacobians(links, states)
    found = reference.parameter_gradients(links, states, reference.backward(e, f), [weight])
    torch.testing.assert_close(found[0], expected[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("made", "name", "case"), CASES, ids=lambda part: getattr(part, "__name__", None))
def test_engines_compute_what_the_dense_solver_computes(made, name, case):
    options, solve = case
    links, first, parameters, kept, actual = made(gradfree.create_engine(name, **options))
    states = reference.states_of(links, first)
    e, f = reference.direct_cotangents(loss_of, states), reference.jacobians(links, states)
    expected = reference.parameter_gradients(links, states, solve(e, f, kept), parameters)
    for p, q in zip(actual, expected, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-10)
