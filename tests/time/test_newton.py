"""The engine ``newton``: recurrent layers by sweeps over all steps at once, both passes.

Outputs and gradients are torch's own to the tolerance, whatever the layout and the loss; cells whose Jacobian is
diagonal take three sweeps. What does not settle runs sequentially, which is said once.
"""

import warnings

import pytest
import torch
from oracles import off_by
from pairwise import pairwise
from recurrent_tasks import CELLS, LAYOUTS, Task
from torch import nn
from torch.utils.checkpoint import checkpoint

import gradfree
from gradfree import ChainError
from gradfree.models import ParaGRU, ParaLSTM
from gradfree.newton.all_steps import AllSteps
from gradfree.testing.cases.models import OwnCell
from gradfree.time.forward import Recurrence

MANY = 500
PARA = {"para_gru": ParaGRU, "para_lstm": ParaLSTM}


def newton(**options):
    return gradfree.create_engine("newton", **{"max_sweeps": MANY, **options})


def remembering(width=8, bias=8.0):
    """A GRU that keeps nearly all of its state in every step, and changes it by a chaotic map."""
    gru = nn.GRU(3, width)
    with torch.no_grad():
        gru.bias_ih_l0[width : 2 * width] = bias
    return gru


def chaotic(width=8):
    """An RNN whose states tell next to nothing of those that begin elsewhere."""
    rnn = nn.RNN(3, width)
    with torch.no_grad():
        rnn.weight_hh_l0.copy_(torch.randn(width, width, generator=torch.Generator("cpu").manual_seed(1)) * 2)
    return rnn


def everything(module, x, *states):
    """Return outputs, final state and gradients of a loss on both."""
    out, final = module(x, *states)
    finals = final if isinstance(final, tuple) else (final,)
    loss = (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum() + sum(part.pow(2).sum() for part in finals)
    return [out, *finals, *torch.autograd.grad(loss, [x, *states, *module.parameters()])]


@pairwise(
    cell=CELLS,
    layout=LAYOUTS,
    length=[1, 2, 7, 33, 128],
    tolerance=[1e-4, 1e-8, 1e-12],
    jacobian=["gate", "diagonal", "dense"],
)
def test_outputs_and_gradients_are_torchs_to_the_tolerance(cell, layout, length, tolerance, jacobian):
    task = Task(cell, length, **LAYOUTS[layout])
    jacobian = "diagonal" if cell.startswith("rnn") and jacobian == "gate" else jacobian
    expected = [*task.run(), *task.gradients()]
    with newton(tolerance=tolerance, jacobian=jacobian).attach(task.module), gradfree.engine_figures() as figures:
        for _ in range(2):
            assert off_by([*task.run(), *task.gradients()], expected) <= 10 * tolerance
    assert all(figure == 0 for chain in figures.values() for name, figure in chain.items() if "sequential" in name)
    assert all({"sweeps", "mismatch", "sequential"} <= chain.keys() for chain in figures.values())


@pytest.mark.parametrize("h0", [False, True])
@pytest.mark.parametrize("name", PARA)
def test_three_sweeps_are_exact_where_the_jacobian_is_diagonal(name, h0):
    """To what float32 resolves, of sequences of any length; a fourth leaves 1e-10, a fifth rounding."""
    layer, x = PARA[name](3, 8), torch.randn(300, 2, 3)
    parts = layer.cell.parts
    state = [torch.randn(2, 8) if h0 else torch.zeros(2, 8) for _ in range(parts)]
    expected = layer.unroll(x, state)
    steps = AllSteps.of(Recurrence(x, state, [], None, layer.cell), "diagonal")
    guess, errors = steps.start(), []
    for _ in range(5):
        guess = steps.sweep(guess)
        errors.append(off_by([guess[0], *(part[-1] for part in guess)], expected))
    assert errors[2] < 2e-5
    assert errors[3] < 1e-10
    assert errors[4] < 1e-14


@pytest.mark.parametrize("clip", [0.5, None])
@pytest.mark.parametrize("length", [1, 2, 33, 200])
@pytest.mark.parametrize("name", PARA)
def test_parallel_cells_have_their_loops_gradients(name, length, clip):
    layer, x = PARA[name](3, 8, clip=clip), torch.randn(length, 2, 3, requires_grad=True)
    state = tuple(torch.randn(1, 2, 8, requires_grad=True) for _ in range(layer.cell.parts))

    def found():
        out, final = layer(x, state if len(state) > 1 else state[0])
        finals = final if isinstance(final, tuple) else (final,)
        loss = out.pow(2).sum() + sum(part.pow(3).sum() for part in finals)
        return [out, *finals, *torch.autograd.grad(loss, [x, *state, *layer.parameters()])]

    expected = found()
    with newton(max_sweeps=9).attach(layer), gradfree.engine_figures() as figures:
        assert off_by(found(), expected) < 1e-11
    assert figures[""]["sweeps"] == figures[""]["sequential"] == figures[""]["forward sequential"] == 0
    assert figures[""]["mismatch"] < 1e-14
    assert figures[""]["forward sweeps"] <= (5 if clip else 8)


@pytest.mark.parametrize("jacobian", ["diagonal", "dense"])
@pytest.mark.parametrize("cell", [nn.GRUCell, nn.LSTMCell, nn.RNNCell, lambda width, _: OwnCell(width)])
def test_cells_in_a_loop(cell, jacobian):
    layer = gradfree.CellLayer(cell(3, 6))
    x = torch.randn(50, 2, 3, requires_grad=True)
    state = None if hasattr(layer.cell, "hidden_size") else torch.zeros(2, 3)

    def found():
        out, _ = layer(x, state)
        return [out, *torch.autograd.grad(out.pow(2).sum(), [x, *layer.parameters()])]

    expected = found()
    for tolerance in (1e-3, 1e-12):
        engine = newton(tolerance=tolerance, jacobian=jacobian)
        with engine.attach(layer), gradfree.engine_figures() as figures:
            assert off_by(found(), expected) <= 10 * tolerance
        assert figures[""]["forward sequential"] == figures[""]["sequential"] == 0


@pytest.mark.parametrize("make", [nn.GRU, nn.RNN, ParaGRU, ParaLSTM])
def test_long_sequences_are_stepped_in_pieces(make, monkeypatch):
    """As many elements at once as a CPU's caches hold: the same numbers, whatever is left over."""
    monkeypatch.setattr("gradfree.newton.all_steps._PIECE", 100)
    layer, x = make(3, 8), torch.randn(61, 2, 3, requires_grad=True)
    expected = everything(layer, x)
    with newton().attach(layer), gradfree.engine_figures() as figures:
        assert off_by(everything(layer, x), expected) < 1e-11
    assert all(chain["forward sequential"] == 0 for chain in figures.values())


def test_dense_jacobians_take_fewer_sweeps_and_none_backward():
    gru, x, needed = remembering(bias=2.0), torch.randn(300, 2, 3), {}
    for jacobian in ("gate", "diagonal", "dense"):
        with newton(jacobian=jacobian).attach(gru), gradfree.engine_figures() as figures:
            gru(x)[0].sum().backward()
        needed[jacobian] = figures["l0"]
    for slow in ("gate", "diagonal"):
        assert needed["dense"]["forward sweeps"] < needed[slow]["forward sweeps"]
        assert needed[slow]["sweeps"] > 3
    assert needed["dense"]["sweeps"] == 0


@pytest.mark.parametrize("cell", ["gru", "lstm"])
@pytest.mark.parametrize("of", ["h0", "final"])
def test_losses_on_the_final_state_and_gradients_of_the_first_alone(cell, of):
    task = Task(cell, 40, h0=True)
    expected = task.gradients_of(of)
    with newton().attach(task.module):
        actual = task.gradients_of(of)
    # What has nearly vanished on its way to h0 is as exact as the largest cotangent, that of the final state.
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=0, atol=1e-11 * max(e.abs().max().item(), 1.0))


def test_a_layer_that_does_not_settle_runs_sequentially():
    """To the last bit as ``backprop`` does, said once for each pass; sweeps are tried again later."""
    rnn, x = chaotic(), torch.randn(400, 1, 3, requires_grad=True)
    with gradfree.create_engine("backprop").attach(rnn):
        expected = everything(rnn, x)
    with newton(max_sweeps=12).attach(rnn), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        tried = []
        for _ in range(60):
            with gradfree.engine_figures() as figures:
                assert all(map(torch.equal, everything(rnn, x), expected))
            tried.append("sweeps" in figures["l0"])
            if tried[-1]:
                assert figures["l0"]["sequential"] == figures["l0"]["forward sequential"] == 1
                assert figures["l0"]["forward sweeps"] == 12
    assert [n for n, t in enumerate(tried) if t] == [0, 51]
    assert ["the forward pass" in str(w.message) for w in said] == [True, False]
    assert all(str(w.message).startswith("l0 does not settle") for w in said)


def test_as_many_sweeps_as_steps_are_exact():
    """Also where nothing settles before: each sweep carries one step more."""
    rnn, x, h0 = chaotic(), torch.randn(40, 2, 3, requires_grad=True), torch.randn(1, 2, 8, requires_grad=True)
    expected = everything(rnn, x, h0)
    with newton(max_sweeps=40).attach(rnn), gradfree.engine_figures() as figures:
        assert off_by(everything(rnn, x, h0), expected) < 1e-10
    assert figures["l0"]["sequential"] == figures["l0"]["forward sequential"] == 0
    assert figures["l0"]["forward sweeps"] > 20


@pytest.mark.parametrize("place", [0, 30, 70])
def test_numbers_that_are_not_finite_end_the_sweeps(place):
    """And tell nothing of the next pass, which is solved in sweeps."""
    gru, x = nn.GRU(3, 4), torch.randn(80, 1, 3)
    bad = x.clone()
    bad[place] = torch.nan
    expected = gru(bad)[0]
    with newton().attach(gru) as handle, gradfree.engine_figures() as figures:
        out = gru(bad)[0]
        out.sum().backward()
        assert torch.equal(out.isnan(), expected.isnan())
        assert figures["l0"]["forward sequential"] == figures["l0"]["sequential"] == 1
        assert figures["l0"]["forward sweeps"] == figures["l0"]["sweeps"] == 1
        assert not handle.state_dict()
        gru(x)[0].sum().backward()
        assert figures["l0"]["forward sequential"] == figures["l0"]["sequential"] == 0


def test_jacobians_that_overflow_are_no_bad_input():
    """They are remembered, as any other layer is that does not settle."""
    rnn, x = chaotic().float(), torch.randn(400, 1, 3)
    rnn = rnn.to(torch.float32)
    with torch.no_grad():
        rnn.weight_hh_l0 *= 4
    x = x.float()
    expected = rnn(x)[0]
    with newton(jacobian="dense").attach(rnn):
        out = rnn(x)[0]
        with pytest.warns(UserWarning, match="does not settle"):
            out.sum().backward()
    assert torch.equal(out, expected)


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])
def test_precisions_that_resolve_less(dtype, error):
    gru, x = nn.GRU(3, 8).to(dtype), torch.randn(200, 2, 3, dtype=dtype)
    expected = [gru(x)[0], *torch.autograd.grad(gru(x)[0].pow(2).sum(), list(gru.parameters()))]
    with newton().attach(gru), gradfree.engine_figures() as figures:
        out = gru(x)[0]
        actual = [out, *torch.autograd.grad(out.pow(2).sum(), list(gru.parameters()))]
    assert off_by(actual, expected) < error
    assert figures["l0"]["sequential"] == figures["l0"]["forward sequential"] == 0


@pytest.mark.parametrize("make", [nn.GRU, nn.LSTM, ParaGRU, lambda *a: gradfree.CellLayer(OwnCell(3))])
def test_under_autocast(make):
    """Torch's own layers run forward as torch runs them, whatever the precision; the backward pass is swept."""
    layer, x = make(3, 8).float(), torch.randn(200, 2, 3, dtype=torch.float32)
    found = []
    for engine in (newton(), gradfree.create_engine("backprop")):
        with engine.attach(layer), torch.autocast("cpu", torch.bfloat16), gradfree.engine_figures() as figures:
            out = layer(x)[0]
            found.append([out, *torch.autograd.grad(out.float().pow(2).sum(), list(layer.parameters()))])
        assert engine.outputs_within(torch.float32) == 0.0 or all("sweeps" in chain for chain in figures.values())
    assert [t.dtype for t in found[0]] == [t.dtype for t in found[1]]
    assert off_by(*found) < 0.05


def test_dropout_between_layers_draws_the_same_masks():
    gru, x = nn.GRU(3, 8, num_layers=3, dropout=0.5), torch.randn(60, 2, 3, requires_grad=True)
    found = []
    for engine in (newton(), gradfree.create_engine("backprop")):
        torch.manual_seed(5)
        with engine.attach(gru):
            found.append(everything(gru, x))
    assert off_by(*found) < 1e-11


def test_checkpoints_run_the_same_way_again():
    layer, x = ParaLSTM(3, 8), torch.randn(60, 2, 3, requires_grad=True)
    expected = everything(layer, x)
    with newton().attach(layer):
        assert off_by(everything(lambda_of(layer), x), expected) < 1e-11


def lambda_of(layer):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return checkpoint(self.layer, x, use_reentrant=False)

    return Checkpointed()


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"jacobian": "whole"}, ValueError),
        ({"jacobian": None}, ValueError),
        ({"max_sweeps": 0}, ValueError),
        ({"max_sweeps": 2.0}, TypeError),
        ({"tolerance": 0}, ValueError),
        ({"tolerance": 1e-16}, ValueError),
        ({"tolerance": float("nan")}, ValueError),
        ({"tolerance": "small"}, TypeError),
        ({"memory_limit": 0}, ValueError),
    ],
)
def test_bad_options_are_refused(options, error):
    with pytest.raises(error, match=f"Newton: {next(iter(options))} must be"):
        newton(**options)


def test_what_cannot_be_kept_is_refused_when_attaching():
    with pytest.raises(ChainError, match=r"weights of torch.float32, which resolves 1e-06 at best"):
        newton(tolerance=1e-8).attach(nn.GRU(2, 3).float())
    with pytest.raises(ChainError, match="no gate that carries its state"):
        newton(jacobian="gate").attach(nn.RNN(2, 3))
    with pytest.raises(ChainError, match="no chain"):
        newton().attach(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))


@pytest.mark.parametrize("layer", [lambda: nn.LSTM(3, 30), lambda: gradfree.CellLayer(OwnCell(60))])
def test_jacobians_that_are_too_large_are_refused_with_their_size(layer):
    layer = layer()
    engine = newton(jacobian="dense", memory_limit=0.001)
    given = (torch.randn(100, 2, 60), torch.zeros(2, 60)) if hasattr(layer, "cell") else (torch.randn(100, 2, 3),)
    with engine.attach(layer), pytest.raises(ChainError, match=r"would need 0.0159 GiB .* 60 x 60"):
        layer(*given)


class Noisy(OwnCell):
    def forward(self, x, h):
        return super().forward(x, h) + 0.1 * torch.randn_like(h)


class Mixing(OwnCell):
    def forward(self, x, h):
        return super().forward(x, h - h.mean(0)) + 0.1 * x.mean(0)


@pytest.mark.parametrize("cell", [Noisy, Mixing])
def test_a_cell_that_is_no_function_of_its_row_is_refused(cell):
    layer = gradfree.CellLayer(cell(3))
    with newton().attach(layer), pytest.raises(ChainError, match="gives other states"):
        layer(torch.randn(40, 2, 3), torch.zeros(2, 3))
    assert all(p.grad is None for p in layer.parameters())


class Liar(gradfree.ElementwiseCell):
    """Says that its units see each other through the input alone, and mixes them."""

    hidden_size = 4

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4) / 4)

    def fed(self, x):
        return x

    def advance(self, fed, state):
        return (torch.tanh(state[0] @ self.weight + fed),)


def test_a_cell_that_claims_to_be_elementwise_and_is_not_still_has_right_gradients():
    layer, x = gradfree.CellLayer(Liar()), torch.randn(30, 2, 4, requires_grad=True)
    expected = everything(layer, x)
    with newton().attach(layer), gradfree.engine_figures() as figures:
        assert off_by(everything(layer, x), expected) < 1e-10
    assert figures[""]["sweeps"] > 1


@pytest.mark.parametrize(("make", "tried"), [(lambda: nn.GRU(3, 64), False), (lambda: ParaGRU(3, 64), True)])
def test_by_itself_it_sweeps_where_that_can_win(make, tried, device):
    if device != "cpu":
        pytest.skip("on a GPU more rows are for free")
    layer, x = make(), torch.randn(512, 2, 3)
    expected = layer(x)[0]
    with gradfree.create_engine("newton").attach(layer), gradfree.engine_figures() as figures:
        out = layer(x)[0]
        out.sum().backward()
    assert ["sweeps" in chain for chain in figures.values()] == [tried]
    assert tried or torch.equal(out, expected)
