"""``CellLayer`` with torch's single-step cells and users' cells, also if they change while an engine is attached."""

import pytest
import torch
from cell_tasks import Reading, Task, refusal
from oracles import off_by
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm

import gradfree
from gradfree import CellLayer
from gradfree.models.para_rnn import ParaGRUCell


def test_approximations_apply_to_the_state_and_not_to_a_separate_output():
    """Without weights from state to state, K has no effect."""
    layer, x = CellLayer(Reading()), torch.randn(20, 2, 3)
    with torch.no_grad():
        layer.cell.network.weight[:, 3:] = 0.0
    grads = []
    for feedback in (0.0, 0.9):
        with gradfree.create_engine("dsf", feedback=feedback).attach(layer):
            out, _ = layer(x)
            grads.append(torch.autograd.grad(out.sum(), layer.cell.network.weight)[0])
    assert torch.equal(*grads)


def test_complex_inputs_and_states_have_exact_gradients(monkeypatch):
    monkeypatch.setattr(torch.nn.Identity, "forward", lambda self, x, state: 0.9j * state + x)
    layer, x = CellLayer(torch.nn.Identity()), torch.randn(8, 2, 3, dtype=torch.complex128, requires_grad=True)
    expected = torch.autograd.grad(layer(x, x[0])[0].abs().sum(), x)
    with gradfree.create_engine("shooting", segments=3).attach(layer):
        assert off_by(torch.autograd.grad(layer(x, x[0])[0].abs().sum(), x), expected) < 1e-10


def test_hooks_and_the_own_forward_of_elementwise_cells_are_called():
    class Doubled(ParaGRUCell):
        def forward(self, x, state):
            return 2 * super().forward(x, state)

    layer, x, calls = CellLayer(ParaGRUCell(3, 4, None)), torch.randn(5, 2, 3), []
    expected = layer(x)[0]
    layer.cell.register_forward_hook(lambda *_: calls.append(1))
    assert off_by([layer(x)[0]], [expected]) < 1e-12
    assert len(calls) == 5
    doubled = CellLayer(Doubled(3, 4, None))
    doubled.load_state_dict(layer.state_dict())
    assert off_by([doubled(x[:1])[0]], [2 * expected[:1]]) < 1e-12
    expected = doubled(x)[0]
    with gradfree.create_engine("newton", max_sweeps=5).attach(doubled):
        assert off_by([doubled(x)[0]], [expected]) < 1e-12


class Normed(torch.nn.Module):
    """Its weight is computed once a sequence."""

    hidden_size = 4

    def __init__(self):
        super().__init__()
        self.read, self.recur = torch.nn.Linear(3, 4), weight_norm(torch.nn.Linear(4, 4))

    def forward(self, x, state):
        return torch.tanh(self.read(x) + self.recur(state))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fixed_point", {"iterations": 9}),
        ("dsf", {"feedback": 0.5, "iterations": 9}),
        ("truncated", {"window": 10}),
        ("deeppcr", {}),
        ("rtrl", {}),
        ("backprop", {}),
        ("newton", {}),
    ],
)
@pytest.mark.parametrize("within", [True, False])
def test_a_weight_that_is_computed_once_a_sequence_has_its_gradient(name, options, within):
    """Runs of the cell without a graph must not be the first to compute it; the backward pass may compute it anew."""
    layer, x = CellLayer(Normed()), torch.randn(10, 2, 3)

    def gradients():
        with parametrize.cached():
            loss = layer(x)[0].square().sum()
            if within:
                return torch.autograd.grad(loss, list(layer.parameters()))
        return torch.autograd.grad(loss, list(layer.parameters()))

    expected = gradients()
    with gradfree.create_engine(name, **options).attach(layer):
        for _ in range(2):
            assert off_by(gradients(), expected) < 1e-10


class Skipping(Normed):
    """Leaves out the product with a state of zeros."""

    def forward(self, x, state):
        return torch.tanh(self.read(x) + self.recur(state)) if state.any() else torch.tanh(self.read(x))


def test_a_step_may_leave_out_what_is_zero_at_first():
    layer, x = CellLayer(Skipping()), torch.randn(9, 2, 3)
    layer.cell.recur.bias.data.zero_()
    layer.cell.recur.bias.requires_grad_(False)
    trained = [p for p in layer.parameters() if p.requires_grad]
    expected = torch.autograd.grad(layer(x)[0].square().sum(), trained)
    with gradfree.create_engine("deeppcr").attach(layer):
        assert off_by(torch.autograd.grad(layer(x)[0].square().sum(), trained), expected) < 1e-10


def backprop(task):
    return gradfree.create_engine("backprop").attach(task.layer)


def fixed_point(task):
    return gradfree.create_engine("fixed_point").attach(task.layer)


def test_parameters_whose_data_is_replaced_between_the_passes_are_refused():
    task = Task("leaky", 6)
    with fixed_point(task):
        loss, leak = sum(out.sin().sum() for out in task.run()), task.layer.cell.leak
        leak.data = 2 * leak.data
        assert "cell has other parameters in the backward pass" in refusal(loss.backward)


def test_hooks_on_a_cell_registered_after_attach_are_refused():
    task = Task("leaky", 6)
    with fixed_point(task):
        for register, message in (
            (task.layer.cell.register_forward_hook, "cell has forward hooks"),
            (register_module_forward_hook, "a global hook on all modules"),
        ):
            hook = register(lambda *_: None)
            assert message in refusal(task.run)
            hook.remove()


@pytest.mark.parametrize("cell", ["gru cell", "two parts", "projecting"])
def test_gradients_observed_at_final_states_equal_those_without_an_engine(cell):
    """They lack what comes by the outputs, as those of torch's layers do."""
    task = Task(cell, 6)

    def gradients():
        out, *states = task.run()
        states[0].register_hook(lambda g: 3 * g)
        loss = out.sin().sum() + sum(2 * state.sin().sum() for state in states)
        return torch.autograd.grad(loss, [*states, task.x, *task.layer.parameters()])

    expected = gradients()
    with backprop(task):
        assert off_by(gradients(), expected) < 1e-10
