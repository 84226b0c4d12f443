"""The engine ``newton``: recurrent layers by sweeps over all steps at once, in both passes.

Outputs and gradients equal torch's to the tolerance. With a diagonal Jacobian three sweeps are exact in float32.
"""

from dataclasses import replace

import pytest
import torch
from oracles import off_by
from recurrent_tasks import chaotic, everything
from torch import nn

import gradfree
from gradfree.devices.costs import CPU, TABLES
from gradfree.models import ParaGRU, ParaLSTM
from gradfree.newton.all_steps import ElementwiseSteps
from gradfree.time.forward import Recurrence

MANY = 500


def newton(**options):
    return gradfree.create_engine("newton", **{"max_sweeps": MANY, **options})


@pytest.mark.parametrize("make", [ParaGRU, ParaLSTM])
def test_three_sweeps_are_exact_where_the_jacobian_is_diagonal(make):
    """To float32's resolution; a fourth sweep reaches 1e-10, a fifth rounding errors."""
    layer, x = make(3, 8), torch.randn(300, 2, 3)
    state = [torch.randn(2, 8) for _ in range(layer.cell.parts)]
    expected = layer.unroll(x, state)
    steps = ElementwiseSteps(Recurrence(x, [part[None] for part in state], [], None, layer.cell), "diagonal")
    guess, errors = steps.start(), []
    for _ in range(5):
        guess = steps.sweep(guess)
        errors.append(off_by([guess[0], *(part[-1] for part in guess)], expected))
    assert errors[2] < 2e-5
    assert errors[3] < 1e-10
    assert errors[4] < 1e-14


@pytest.mark.parametrize("name", ["newton", "shooting", "backprop"])
def test_separate_units_run_as_their_loop_where_that_is_faster(name):
    """Bitwise: one batch of all steps adds in another order."""
    layer, x = ParaLSTM(64, 64).float(), torch.randn(16, 32, 64, dtype=torch.float32, requires_grad=True)
    expected = everything(layer, x)
    with gradfree.create_engine(name).attach(layer):
        assert off_by(everything(layer, x), expected) == 0.0


@pytest.mark.parametrize("make", [nn.GRU, nn.RNN, ParaGRU, ParaLSTM])
def test_long_sequences_in_chunks_give_the_same_result(make, monkeypatch):
    """Chunks fit a CPU's caches; the last one may be shorter."""
    monkeypatch.setitem(TABLES, "cpu", replace(CPU, chunk_numbers=100))
    layer, x = make(3, 8), torch.randn(61, 2, 3, requires_grad=True)
    expected = everything(layer, x)
    with newton().attach(layer), gradfree.engine_figures() as figures:
        assert off_by(everything(layer, x), expected) < 1e-11
    assert all(chain["forward sequential"] == 0 for chain in figures.values())


def test_as_many_sweeps_as_steps_are_exact():
    """Even if nothing converges before: each sweep makes one more step exact."""
    rnn, x, h0 = chaotic(), torch.randn(40, 2, 3, requires_grad=True), torch.randn(1, 2, 8, requires_grad=True)
    expected = everything(rnn, x, h0)
    with newton(max_sweeps=40).attach(rnn), gradfree.engine_figures() as figures:
        assert off_by(everything(rnn, x, h0), expected) < 1e-10
    assert figures["l0"]["sequential"] == figures["l0"]["forward sequential"] == 0
    assert figures["l0"]["forward sweeps"] > 20


class Selfish(gradfree.ElementwiseCell):
    """A gated unit with feedback on itself: single steps converge later than the others."""

    hidden_size = 4

    def __init__(self):
        super().__init__()
        self.linear, self.weight = nn.Linear(3, 8), nn.Parameter(1.5 * torch.randn(4))

    def fed(self, x):
        return self.linear(x)

    def advance(self, fed, state):
        new, gate = fed.chunk(2, -1)
        z = torch.sigmoid(gate + self.weight * state[0])
        return (torch.lerp(torch.tanh(new + self.weight * state[0]), state[0], z),)


@pytest.mark.parametrize("tolerance", [1e-6, 1e-12])
def test_a_step_that_converges_late_is_waited_for(tolerance):
    errors = []
    for seed in range(30):
        torch.manual_seed(seed)
        layer, x = gradfree.CellLayer(Selfish()), 3 * torch.randn(400, 1, 3)
        expected, _ = layer(x)
        with newton(tolerance=tolerance).attach(layer):
            errors.append(off_by([layer(x)[0]], [expected]))
    assert max(errors) < 5 * tolerance


class Liar(gradfree.ElementwiseCell):
    """Claims to be elementwise, but mixes units of the state."""

    hidden_size = 4

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4) / 4)

    def fed(self, x):
        return x

    def advance(self, fed, state):
        return (torch.tanh(state[0] @ self.weight + fed),)


def test_a_cell_that_wrongly_claims_to_be_elementwise_has_exact_gradients():
    layer, x = gradfree.CellLayer(Liar()), torch.randn(30, 2, 4, requires_grad=True)
    expected = everything(layer, x)
    with newton().attach(layer), gradfree.engine_figures() as figures:
        assert off_by(everything(layer, x), expected) < 1e-10
    assert figures[""]["sweeps"] > 1
