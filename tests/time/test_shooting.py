"""The engine ``shooting``: recurrent layers in segments, in both passes.

Outputs and gradients equal torch's to the tolerance. A layer with long memory runs sequentially, with one warning.
"""

import copy

import pytest
import torch
from oracles import off_by
from recurrent_tasks import everything, remembering
from torch import nn

import gradfree
from gradfree.benchmarks.timing.allocations import peak_memory
from gradfree.convergence.outcome import relative

pytestmark = pytest.mark.filterwarnings("ignore:.*has long memory")


def shooting(**options):
    return gradfree.create_engine("shooting", **options)


@pytest.mark.parametrize("corrector", [None, "gate"])
@pytest.mark.parametrize(("length", "segments"), [(30, 2), (31, 5), (33, 33)])
def test_as_many_sweeps_as_borders_are_exact(length, segments, corrector):
    """Even if the layer has long memory and nothing converges before."""
    gru, x, h0 = remembering(), torch.randn(length, 2, 3, requires_grad=True), torch.randn(1, 2, 8, requires_grad=True)
    expected = everything(gru, x, h0)
    engine = shooting(segments=segments, max_sweeps=segments - 1, burn=0, corrector=corrector)
    with engine.attach(gru), gradfree.engine_figures() as figures:
        assert off_by(everything(gru, x, h0), expected) < 1e-10
    assert figures["l0"]["sequential"] == figures["l0"]["forward sequential"] == 0
    assert segments < 5 or corrector or figures["l0"]["sweeps"] > segments / 3


@pytest.mark.parametrize(("length", "layers"), [(2000, 1), (2003, 2)])
def test_both_directions_with_the_batch_first_are_exact(length, layers):
    """Inputs and gates are stored sequence after sequence, the concatenated outputs step after step.

    Segments cover all of 2,000 steps, and leave one of 2,003.
    """
    gru, x = nn.GRU(3, 8, layers, batch_first=True, bidirectional=True), torch.randn(2, length, 3, requires_grad=True)
    expected = everything(gru, x)
    with shooting().attach(gru), gradfree.engine_figures() as figures:
        assert off_by(everything(gru, x), expected) < 1e-9
    assert all(figures[path]["sequential"] == 0 for path in ("l0", "l0_reverse"))


@pytest.mark.parametrize("mode", ["training", "evaluation"])
def test_an_infinite_number_in_one_sequence_leaves_the_others_right(mode):
    """Relative to it every jump would be zero."""
    rnn, x = nn.RNN(1, 4, nonlinearity="relu"), torch.rand(1000, 2, 1)
    with torch.no_grad():
        rnn.weight_hh_l0.copy_(0.98 * torch.eye(4))
    x[-1, 0] = torch.inf
    expected = rnn(x)[0][:, 1]
    with shooting().attach(rnn), torch.set_grad_enabled(mode == "training"):
        assert off_by([rnn(x)[0][:, 1]], [expected]) < 1e-10


@pytest.mark.parametrize("options", [{"segments": 3}, {"segments": "auto"}])
def test_behind_a_nan_a_relu_passes_cotangents_on_as_in_autograd(options):
    rnn, x, h0 = nn.RNN(3, 4, nonlinearity="relu"), torch.randn(30, 1, 3), torch.zeros(1, 1, 4, requires_grad=True)
    x[20] = torch.nan
    wanted = [h0, rnn.bias_ih_l0, rnn.bias_hh_l0]
    expected = torch.autograd.grad(rnn(x, h0)[0].sum(), wanted)
    with shooting(**options).attach(rnn):
        assert off_by(torch.autograd.grad(rnn(x, h0)[0].sum(), wanted), expected) < 1e-10


@pytest.mark.parametrize("length", [160, 163])
@pytest.mark.parametrize("scale", [1.0, 1e-200])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("kind", ["relu", "tanh", "GRU"])
def test_growing_states_and_cotangents_are_exact(kind, batch_first, scale, length):
    """What a segment's end lacks is small beside the last numbers, and grows with them."""
    if kind == "GRU":
        rnn, growth = nn.GRU(3, 6, bias=False, batch_first=batch_first), 14.0
    else:
        rnn, growth = nn.RNN(3, 6, nonlinearity=kind, bias=False, batch_first=batch_first), 3.0
    with torch.no_grad():
        rnn.weight_hh_l0.copy_(growth * torch.eye(6).repeat(len(rnn.weight_hh_l0) // 6, 1))
    x = (scale * torch.randn(*((2, length) if batch_first else (length, 2)), 3)).requires_grad_()
    expected = everything(rnn, x)
    with shooting(segments=4).attach(rnn):
        assert off_by(everything(rnn, x), expected) < 1e-10


def test_the_burn_in_is_learnt_and_kept_in_checkpoints():
    """The burn-in grows until no sweep is needed; another handle can load it."""
    gru, x = nn.GRU(3, 8), torch.randn(2000, 1, 3)
    engine = shooting(segments=8, tolerance=1e-9)
    sweeps = []
    with engine.attach(gru) as handle:
        for _ in range(6):
            with gradfree.engine_figures() as figures:
                gru(x)[0].sum().backward()
            sweeps.append(figures["l0"]["forward sweeps"].item())
        kept = handle.state_dict()
    assert sweeps[0] > sweeps[-1] == 0
    with engine.attach(gru) as handle, gradfree.engine_figures() as figures:
        handle.load_state_dict(kept)
        gru(x)[0].sum().backward()
    assert figures["l0"]["forward sweeps"] == 0


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
def test_the_corrector_gate_needs_fewer_sweeps(kind):
    """If a state decays only by its gates, one sweep with the corrector propagates it across all borders."""
    layer, x = remembering(3.0, kind), torch.randn(320, 1, 3)
    with torch.no_grad():
        layer.weight_hh_l0 *= 0.1
    needed = {}
    for corrector in (None, "gate"):
        engine = shooting(segments=16, max_sweeps=15, burn=0, corrector=corrector)
        with engine.attach(layer), gradfree.engine_figures() as figures:
            layer(x)[0][-1].sum().backward()
        needed[corrector] = figures["l0"]
    for name in ("sweeps", "forward sweeps"):
        assert needed["gate"][name] < needed[None][name]


@pytest.mark.parametrize(("length", "batch_first"), [(1024, True), (1027, False)])
def test_a_gru_needs_little_more_memory_than_backprop(length, batch_first):
    """Peak memory is at most 5 % higher, for both memory layouts; gradients equal torch's."""
    gru = nn.GRU(32, 32, batch_first=batch_first)
    x = torch.randn(*((4, length) if batch_first else (length, 4)), 32, requires_grad=True)
    expected, peaks = everything(gru, x), []
    for engine in (gradfree.create_engine("backprop"), shooting(segments=8)):
        with engine.attach(gru):
            assert off_by(everything(gru, x), expected) < 1e-11
            peaks.append(peak_memory(lambda: gru(x)[0].sum().backward(inputs=[x, *gru.parameters()]), "cpu"))
    assert peaks[1] <= 1.05 * peaks[0]


def test_small_states_are_as_exact_as_large_ones():
    """The tolerance is relative: float32 states of 1e-5 have a much smaller absolute error than states of 1."""
    assert relative([torch.tensor([-1e-60])], [torch.tensor(2e-60)]) == 0.5
    gru = nn.GRU(16, 16, bias=False)
    x = (1e-4 * torch.randn(256, 2, 16)).requires_grad_()
    expected = everything(gru, x)
    single, x = copy.deepcopy(gru).float(), x.detach().float().requires_grad_()
    with shooting(segments=8).attach(single):
        assert off_by([tensor.double() for tensor in everything(single, x)], expected) < 2e-5
