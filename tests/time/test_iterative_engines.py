"""``shooting`` and ``newton`` both iterate to a tolerance in both passes, or run sequentially."""

import re
import warnings

import pytest
import torch
from cell_tasks import refusal
from oracles import off_by
from recurrent_tasks import chaotic, everything, remembering
from torch import nn

import gradfree

MANY = {"shooting": {"segments": 4}, "newton": {"max_sweeps": 500}}
both = pytest.mark.parametrize("name", MANY)


def made(name, **options):
    return gradfree.create_engine(name, **{**MANY[name], **options})


@both
@pytest.mark.parametrize("place", [0, 30, 70])
def test_non_finite_numbers_stop_the_sweeps(name, place):
    """The next pass uses sweeps again."""
    gru, x = nn.GRU(3, 4), torch.randn(80, 1, 3)
    bad = x.clone()
    bad[place] = torch.nan
    expected = gru(bad)[0]
    with made(name).attach(gru) as handle, gradfree.engine_figures() as figures:
        out = gru(bad)[0]
        out.sum().backward()
        assert torch.equal(out.isnan(), expected.isnan())
        # Behind the last border of segments of 20 steps, the forward pass has nothing to correct.
        stopped = name == "newton" or place < 60
        assert figures["l0"]["forward sequential"] == stopped
        assert figures["l0"]["sequential"] == 1
        assert figures["l0"]["forward sweeps"] <= 3
        assert not (stopped and handle.state_dict())
        gru(x)[0].sum().backward()
        assert figures["l0"]["forward sequential"] == figures["l0"]["sequential"] == 0


@pytest.mark.parametrize(
    ("name", "options", "make", "message"),
    [
        (
            "shooting",
            {"segments": 8, "burn": 8},
            remembering,
            "l0 has long memory",
        ),
        (
            "newton",
            {"max_sweeps": 12},
            chaotic,
            "l0 does not converge",
        ),
    ],
)
def test_a_layer_that_does_not_converge_runs_sequentially_until_the_next_trial(name, options, make, message):
    """Bitwise as ``backprop``, with one warning."""
    layer, x = make(), torch.randn(400, 1, 3, requires_grad=True)

    with gradfree.create_engine("backprop").attach(layer):
        expected = everything(layer, x)
    with made(name, **options).attach(layer), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tried = []
        for _ in range(60):
            with gradfree.engine_figures() as figures:
                assert all(map(torch.equal, everything(layer, x), expected))
            tried.append("sweeps" in figures["l0"])
            if tried[-1]:
                assert figures["l0"]["sequential"] == figures["l0"]["forward sequential"] == 1
                assert 0 < figures["l0"]["forward sweeps"] <= 12
    assert [n for n, t in enumerate(tried) if t] == [0, 51]
    said = message + r": after \d+ sweeps the forward pass was still off by .* \(tolerance"
    assert [bool(re.match(said, str(w.message))) for w in caught] == [True, False]


@both
def test_bfloat16_converges_to_its_own_resolution(name):
    gru, x = nn.GRU(3, 8).bfloat16(), torch.randn(200, 2, 3, dtype=torch.bfloat16)
    expected = [gru(x)[0], *torch.autograd.grad(gru(x)[0].pow(2).sum(), list(gru.parameters()))]
    with made(name).attach(gru), gradfree.engine_figures() as figures:
        out = gru(x)[0]
        actual = [out, *torch.autograd.grad(out.pow(2).sum(), list(gru.parameters()))]
    assert off_by(actual, expected) < 0.1
    assert figures["l0"]["sequential"] == figures["l0"]["forward sequential"] == 0


@pytest.mark.parametrize(
    ("name", "options", "make", "message"),
    [
        *((name, {"tolerance": 1e-8}, lambda: nn.GRU(2, 3).float(), "finest tolerance is 1e-06") for name in MANY),
        ("shooting", {"corrector": "gate"}, lambda: nn.RNN(2, 3), "no gate"),
        ("newton", {"jacobian": "gate"}, lambda: nn.RNN(2, 3), "no gate"),
        *((name, {}, lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), "no chain") for name in MANY),
    ],
)
def test_impossible_options_are_refused_when_attaching(name, options, make, message):
    assert message in refusal(lambda: gradfree.create_engine(name, **options).attach(make()))


class Noisy(gradfree.ElementwiseCell):
    hidden_size = 3

    def fed(self, x):
        return x

    def advance(self, fed, state):
        return (torch.tanh(state[0] + fed + 0.1 * torch.randn_like(fed)),)


def test_a_cell_that_draws_random_numbers_is_refused():
    layer = gradfree.CellLayer(Noisy())
    with made("newton").attach(layer):
        message = refusal(lambda: layer(torch.randn(40, 2, 3, requires_grad=True))[0].sum().backward())
    assert "gives other states" in message
