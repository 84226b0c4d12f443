"""Gradients through torch's own recurrent modules: BPTT's where theory says so, each engine's own rule elsewhere."""

import pytest
import torch
from oracles import assert_close
from pairwise import pairwise
from recurrent_tasks import CELLS, HIDDEN, INPUT, LAYOUTS, Task
from torch import nn

import gradfree
from gradfree.time.gru_forward import pays


def exact(cell, length):
    """Return engines that are exact on ``length`` steps."""
    yield gradfree.create_engine("backprop")
    yield gradfree.create_engine("deeppcr")
    yield gradfree.create_engine("fixed_point", iterations=length)
    yield gradfree.create_engine("truncated", window=length)
    for feedback in ("linspace", 0.7, torch.rand(HIDDEN)):
        yield gradfree.create_engine("dsf", iterations=length, feedback=feedback)
    if not cell.startswith("rnn"):
        yield gradfree.create_engine("dsf", iterations=length, feedback="gate")
        yield gradfree.create_engine("highway_bp", iterations=length)
        yield gradfree.create_engine("highway_bp", iterations=length, gamma=0.3)
        yield gradfree.create_engine("highway_bp", iterations=length, block=True)
        yield gradfree.create_engine("highway_bp", iterations=length, gamma=0.3, block=True)


@pairwise(cell=CELLS, layout=LAYOUTS, length=[1, 2, 7, 33])
def test_gradients_equal_bptt_and_outputs_are_bitwise_the_same(cell, layout, length):
    task = Task(cell, length, **LAYOUTS[layout])
    outputs, expected = task.run(), task.gradients()
    for engine in exact(cell, length):
        with engine.attach(task.module):
            assert all(map(torch.equal, task.run(), outputs))
            assert_close(task.gradients(), expected)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("batch", "length", "width"), [(32, 5, 128), (64, 3, 64), (9, 7, 256), (300, 1, 32)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_gru_that_keeps_its_gates_is_bitwise_torchs_own(dtype, batch, length, width, bias, device):
    """Large steps take another forward than small ones; exactness is that of float64 in both."""
    if device != "cpu":
        pytest.skip("on the CPU alone: oneDNN's bits")
    module = nn.GRU(width, width, bias=bias).to(dtype)
    x = torch.randn(length, batch, width, dtype=dtype, requires_grad=True)
    h0 = torch.randn(1, batch, width, dtype=dtype, requires_grad=True)
    assert pays(x, width)

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


@pytest.mark.parametrize("cell", CELLS)
def test_a_loss_on_some_steps_or_the_final_state_alone(cell):
    task = Task(cell, 7)
    outputs = task.run()
    for used in range(len(outputs)):
        weights = [torch.zeros_like(o) for o in outputs]
        weights[used][-1] = 1.0
        expected = task.gradients(weights)
        for engine in exact(cell, 7):
            with engine.attach(task.module):
                actual = torch.autograd.grad(task.run()[used][-1].sum(), [task.x, *task.module.parameters()])
            assert_close(actual, expected)


@pytest.mark.parametrize("window", [1, 2, 4])
@pytest.mark.parametrize("cell", ["gru", "lstm", "rnn_tanh"])
def test_truncated_equals_a_graph_cut_by_hand(cell, window):
    """The loss of step t reaches back over ``window`` steps; w = 1 is fully truncated BPTT."""
    task, length = Task(cell, 7), 7
    weight = torch.randn(length, 5, HIDDEN)
    parameters = list(task.module.parameters())
    with torch.no_grad():
        states = [None]
        for t in range(length):
            states.append(task.module(task.x[t : t + 1], states[-1])[1])
    total = 0.0
    for t in range(length):
        first = max(0, t + 1 - window)
        total = total + (task.module(task.x[first : t + 1], states[first])[0][-1] * weight[t]).sum()
    expected = torch.autograd.grad(total, [task.x, *parameters])
    with gradfree.create_engine("truncated", window=window).attach(task.module):
        actual = torch.autograd.grad((task.run()[0] * weight).sum(), [task.x, *parameters])
    assert_close(actual, expected)


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
    """At k = 0: δ_t = e_t + z_{t+1} δ_{t+1}, against a loop with the gate from torch's own cell equations."""
    task, length = Task("gru", 9), 9
    module, x = task.module, task.x.detach()
    with torch.no_grad():
        out = module(x)[0]
        before = torch.cat([torch.zeros(1, 5, HIDDEN), out[:-1]])
        part = slice(HIDDEN, 2 * HIDDEN)
        z = torch.sigmoid(
            (x @ module.weight_ih_l0.t() + module.bias_ih_l0 + before @ module.weight_hh_l0.t() + module.bias_hh_l0)[
                ..., part
            ]
        )
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
            actual = torch.autograd.grad((task.run()[0] * e).sum(), list(module.parameters()))
        assert_close(actual, expected)


def test_the_block_of_an_lstm_carries_memory_at_k_0():
    """Against a loop: δ of c gets δ of h times o(1 - tanh²c) f from the step behind, and f δ of c."""
    task = Task("lstm", 9)
    cell, x, e = nn.LSTMCell(INPUT, HIDDEN), task.x.detach(), torch.randn(9, 5, HIDDEN)
    cell.load_state_dict({k.removesuffix("_l0"): v for k, v in task.module.state_dict().items()})
    h, c, states = torch.zeros(5, HIDDEN), torch.zeros(5, HIDDEN), []
    for step in x:
        before = (h, c)
        h, c = cell(step, before)
        states.append((before, (h.detach(), c.detach())))
        h, c = h.detach(), c.detach()
    delta_c, total = torch.zeros(5, HIDDEN), [torch.zeros_like(p) for p in cell.parameters()]
    for t in reversed(range(9)):
        before = [part.detach().requires_grad_() for part in states[t][0]]
        h, c = cell(x[t], before)
        for n, g in enumerate(torch.autograd.grad((h, c), list(cell.parameters()), (e[t], delta_c), retain_graph=True)):
            total[n] += g
        # The gates depend on h before alone: what reaches c before is the elementwise path.
        delta_c = torch.autograd.grad((h, c), before[1], (e[t], delta_c))[0]
    with gradfree.create_engine("highway_bp", iterations=0, block=True).attach(task.module):
        actual = torch.autograd.grad((task.run()[0] * e).sum(), list(task.module.parameters()))
    assert_close(actual, total)


def test_frozen_weights_get_no_gradient_and_the_rest_is_exact():
    task = Task("gru", 7)
    task.module.weight_hh_l0.requires_grad_(False)
    names = ["weight_ih_l0", "bias_ih_l0", "bias_hh_l0"]
    parameters = [getattr(task.module, name) for name in names]
    expected = torch.autograd.grad(task.run()[0].pow(2).sum(), parameters)
    with gradfree.create_engine("backprop").attach(task.module):
        loss = task.run()[0].pow(2).sum()
        assert_close(torch.autograd.grad(loss, parameters, retain_graph=True), expected)
        loss.backward()
    assert task.module.weight_hh_l0.grad is None


@pytest.mark.parametrize("cell", ["gru", "lstm"])
@pytest.mark.parametrize("dtype", [torch.bfloat16])
def test_autocast(cell, dtype):
    for width, batch in ((HIDDEN, 4), (128, 32)):
        module = CELLS[cell](width, width, num_layers=2).float()
        x = torch.randn(9, batch, width, dtype=torch.float32)

        def gradients(module=module, x=x):
            with torch.autocast("cpu", dtype):
                out = module(x)[0]
            return torch.autograd.grad(out.float().pow(2).sum(), list(module.parameters()))

        expected = gradients()
        with gradfree.create_engine("backprop").attach(module):
            for a, e in zip(gradients(), expected, strict=True):
                torch.testing.assert_close(a, e, rtol=0.05, atol=0.03 * e.abs().max().item())
