"""Gradients through torch's recurrent modules: exact (BPTT) where theory says so, else by each engine's rule."""

import pytest
import torch
from oracles import assert_close, assert_unchanged, snapshot
from recurrent_tasks import HIDDEN, INPUT
from torch import nn

import gradfree
from gradfree.devices.costs import kept_gates_pay


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("batch", "length", "width", "both"),
    [(32, 5, 128, False), (64, 3, 64, False), (9, 7, 256, False), (300, 1, 32, False), (33, 3, 128, True)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_gru_that_keeps_its_gates_is_bitwise_torchs_own(dtype, batch, length, width, both, bias, device):
    """Wide layers run another forward than narrow ones; gradients are exact in float64."""
    if device != "cpu":
        pytest.skip("only on a CPU: bitwise equal to oneDNN")
    module = nn.GRU(width, width, bias=bias, bidirectional=both).to(dtype)
    x = torch.randn(length, batch, width, dtype=dtype, requires_grad=True)
    h0 = torch.randn(1 + both, batch, width, dtype=dtype, requires_grad=True)
    assert kept_gates_pay(x, width)

    def gradients():
        out, final = module(x, h0)
        loss = (out.sin() * out).sum() + final.pow(2).sum()
        return out, final, torch.autograd.grad(loss, [x, h0, *module.parameters()])

    expected = gradients()
    with gradfree.create_engine("backprop").attach(module):
        actual = gradients()
    assert torch.equal(actual[0], expected[0])
    assert torch.equal(actual[1], expected[1])
    if dtype == torch.float64:
        assert_close(actual[2], expected[2])


@pytest.mark.parametrize("make", [nn.RNN, nn.GRU, nn.LSTM])
@pytest.mark.parametrize(("layers", "both"), [(1, False), (2, True)])
def test_outputs_in_single_precision_are_bitwise_torchs(make, layers, both):
    """With gradients off, torch's kernel for an LSTM rounds differently."""
    module, x = make(8, 16, layers, bidirectional=both).float(), torch.randn(50, 1, 8, dtype=torch.float32)
    expected = module(x)[0]
    with gradfree.create_engine("fixed_point").attach(module):
        assert torch.equal(module(x)[0], expected)


def test_dsf_is_exact_where_the_jacobian_is_its_diagonal():
    """A ReLU RNN with diagonal, positive weights and inputs is linear with Jacobian diag(W_hh)."""
    module, a = nn.RNN(INPUT, HIDDEN, nonlinearity="relu"), torch.linspace(0, 1, HIDDEN)
    with torch.no_grad():
        module.weight_hh_l0.copy_(torch.diag(a))
        for parameter in (module.weight_ih_l0, module.bias_ih_l0, module.bias_hh_l0):
            parameter.abs_()
    x, weight = torch.rand(33, 5, INPUT, requires_grad=True), torch.randn(33, 5, HIDDEN)

    def gradients():
        return torch.autograd.grad((module(x)[0] * weight).sum(), [x, *module.parameters()])

    expected = gradients()
    for feedback in ("linspace", a):
        with gradfree.create_engine("dsf", feedback=feedback).attach(module):
            assert_close(gradients(), expected)
    with gradfree.create_engine("dsf", feedback=0.5).attach(module), pytest.raises(AssertionError):
        assert_close(gradients(), expected)


def test_highway_bp_uses_the_update_gate_and_dsf_gate_its_mean():
    """At k = 0: δ_t = e_t + z_{t+1} δ_{t+1}, compared with a loop that uses the gate of torch's cell equations."""
    module, x, length = nn.GRU(INPUT, HIDDEN), torch.randn(9, 5, INPUT), 9
    with torch.no_grad():
        out = module(x)[0]
        before = torch.cat([torch.zeros(1, 5, HIDDEN), out[:-1]])
        sums = x @ module.weight_ih_l0.t() + module.bias_ih_l0 + before @ module.weight_hh_l0.t() + module.bias_hh_l0
        z = torch.sigmoid(sums[..., HIDDEN : 2 * HIDDEN])
    e = torch.randn(length, 5, HIDDEN)
    for engine, carry in (
        (gradfree.create_engine("highway_bp", iterations=0), z),
        (gradfree.create_engine("highway_bp", iterations=0, gamma=0.25), 0.75 * z),
        (gradfree.create_engine("dsf", feedback="gate"), z.mean((0, 1)).expand_as(z)),
    ):
        delta = e.clone()
        for t in reversed(range(length - 1)):
            delta[t] += carry[t + 1] * delta[t + 1]
        cell = nn.GRUCell(INPUT, HIDDEN)
        cell.load_state_dict({k.removesuffix("_l0"): v for k, v in module.state_dict().items()})
        states = cell(x.flatten(0, 1), before.flatten(0, 1))
        expected = torch.autograd.grad((states * delta.flatten(0, 1)).sum(), list(cell.parameters()))
        with engine.attach(module):
            actual = torch.autograd.grad((module(x)[0] * e).sum(), list(module.parameters()))
        assert_close(actual, expected)


def test_dsf_refuses_a_feedback_of_another_width():
    module = nn.GRU(INPUT, HIDDEN)
    with (
        gradfree.create_engine("dsf", feedback=torch.rand(3)).attach(module),
        pytest.raises(gradfree.ChainError, match="feedback has 3 numbers, but the states have 4 units"),
    ):
        module(torch.randn(5, 2, INPUT))[0].sum().backward()


BAD = {
    "no steps": lambda: (torch.randn(0, 2, INPUT),),
    "too many dimensions": lambda: (torch.randn(2, 5, 2, INPUT),),
    "other dtype": lambda: (torch.randn(5, 2, INPUT, dtype=torch.float32),),
    "states of another batch": lambda: (torch.randn(5, 2, INPUT), torch.randn(1, 2 + 1, HIDDEN)),
}


@pytest.mark.parametrize("bad", BAD)
def test_bad_inputs_raise_torchs_own_error_and_change_nothing(bad):
    module, arguments = nn.GRU(INPUT, HIDDEN), BAD[bad]()
    before = snapshot(module)
    with pytest.raises((RuntimeError, ValueError)) as expected:
        module(*arguments)
    with gradfree.create_engine("dsf").attach(module):
        with pytest.raises(expected.type) as actual:
            module(*arguments)
        assert str(actual.value) == str(expected.value)
    assert_unchanged(module, before)


def plus_in_place(out, x, module):
    out += x


def stepped(out, x, module):
    with torch.no_grad():
        next(module.parameters()).mul_(2)


@pytest.mark.parametrize("change", [plus_in_place, stepped])
@pytest.mark.parametrize(
    "make", [lambda: nn.GRU(HIDDEN, HIDDEN), lambda: gradfree.CellLayer(nn.GRUCell(HIDDEN, HIDDEN))]
)
def test_saved_tensors_changed_in_place_raise_in_the_backward_pass(make, change):
    """Torch's layers raise only in part, depending on the device. The message names the layer and the remedy."""
    model, x = nn.ModuleDict({"rnn": make()}), torch.randn(5, 2, HIDDEN)
    with gradfree.create_engine("dsf").attach(model):
        out = model["rnn"](x)[0]
        loss = out.sum()
        change(out, x, model)
        with pytest.raises(gradfree.ChainError, match=r"output of rnn.* were changed in place .* \(out = out \+ x"):
            loss.backward()
    assert all(p.grad is None for p in model.parameters())
