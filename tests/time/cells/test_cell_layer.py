"""``CellLayer`` with torch's single-step cells and users' cells, also if they change while an engine is attached."""

import pytest
import torch
from cell_tasks import HIDDEN, INPUT, Task, refusal
from oracles import assert_close, off_by
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import prune

import gradfree
from gradfree import CellLayer
from gradfree.models.para_rnn import ParaGRUCell


def test_a_cell_layer_from_zeros_equals_torchs_fused_layer():
    fused, layer, x = nn.LSTM(INPUT, HIDDEN), CellLayer(nn.LSTMCell(INPUT, HIDDEN)), torch.randn(7, 5, INPUT)
    layer.cell.load_state_dict({k.removesuffix("_l0"): v for k, v in fused.state_dict().items()})
    out, (h, c) = layer(x)
    expected, finals = fused(x)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close((h.unsqueeze(0), c.unsqueeze(0)), finals)


def pruned_gru():
    cell = nn.GRUCell(INPUT, HIDDEN, bias=False)
    prune.l1_unstructured(cell, "weight_hh", 0.5)
    return cell


def scaled_gru():
    cell = nn.GRUCell(INPUT, HIDDEN)
    nn.utils.parametrize.register_parametrization(cell, "weight_hh", nn.Softplus())
    return cell


def clamped_gru():
    cell = nn.GRUCell(INPUT, HIDDEN)
    cell.forward = lambda x, h: nn.GRUCell.forward(cell, x, h).clamp(-0.1, 0.1)
    return cell


@pytest.mark.parametrize("make", [pruned_gru, scaled_gru, clamped_gru])
def test_modified_torch_cells_do_not_use_the_closed_form(make):
    task = Task("gru cell", 7)
    task.layer.cell = make()
    expected = task.gradients()
    for engine in (gradfree.create_engine("backprop"), gradfree.create_engine("fixed_point", iterations=7)):
        with engine.attach(task.layer):
            assert_close(task.gradients(), expected)


def test_parameters_of_functional_call_get_gradients_or_are_refused():
    """Torch's cells get gradients. Other cells run again after the parameters are restored, so they are refused."""
    for cell in ("gru cell", "leaky"):
        task = Task(cell, 5)
        given = {name: (1.5 * p.detach()).requires_grad_() for name, p in task.layer.named_parameters()}

        def gradients(task=task, given=given):
            out = torch.func.functional_call(task.layer, given, (task.x, task.state))[0]
            return torch.autograd.grad(out.pow(2).sum(), list(given.values()))

        expected = gradients()
        with gradfree.create_engine("fixed_point", iterations=5).attach(task.layer):
            if cell == "gru cell":
                assert_close(gradients(), expected)
            else:
                assert "cell has other parameters in the backward pass" in refusal(gradients)


def test_a_pre_hook_registered_after_attach_is_part_of_a_torch_cell():
    task = Task("gru cell", 5)
    with gradfree.create_engine("fixed_point", iterations=5).attach(task.layer):
        hook = task.layer.cell.register_forward_pre_hook(lambda module, args: (0.5 * args[0], args[1]))
        actual = task.gradients()
    assert_close(actual, task.gradients())
    hook.remove()


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


def backprop(task):
    return gradfree.create_engine("backprop").attach(task.layer)


def rectified(cell):
    cell.nonlinearity = "relu"


def normed(cell):
    nn.utils.parametrizations.weight_norm(cell, "weight_hh")


@pytest.mark.parametrize(("cell", "change"), [("rnn_tanh cell", rectified), ("gru cell", normed)])
def test_changes_to_a_cell_after_attach_take_effect(cell, change):
    task = Task(cell, 6)
    with backprop(task):
        change(task.layer.cell)
        actual = task.gradients()
    assert_close(actual, task.gradients())


def test_gradients_use_the_forward_pass_parameters_if_their_data_is_replaced():
    def gradients(task, weight):
        loss, kept = sum(out.sin().sum() for out in task.run()), weight.data
        weight.data = 2 * kept
        found = torch.autograd.grad(loss, [task.x, *task.layer.parameters()])
        weight.data = kept
        return found

    task = Task("gru cell", 6)
    expected = gradients(task, task.layer.cell.weight_hh)
    with backprop(task):
        assert_close(gradients(task, task.layer.cell.weight_hh), expected)
    task = Task("leaky", 6)
    with backprop(task):
        message = refusal(lambda: gradients(task, task.layer.cell.leak))
    assert "cell has other parameters in the backward pass" in message


@pytest.mark.parametrize("cell", ["gru cell", "leaky"])
def test_hooks_on_a_cell_registered_after_attach_are_refused(cell):
    task = Task(cell, 6)
    with backprop(task):
        for register, message in (
            (task.layer.cell.register_forward_hook, "cell has forward hooks"),
            (register_module_forward_hook, "a global hook on all modules"),
        ):
            hook = register(lambda *_: None)
            assert message in refusal(task.run)
            hook.remove()


@pytest.mark.parametrize("cell", ["gru cell", "two parts"])
def test_observed_gradients_of_final_states_are_refused(cell):
    task = Task(cell, 6)
    with backprop(task):
        out, *states = task.run()
        loss = out.sin().sum() + sum(2 * state.sin().sum() for state in states)
        message = "the final state of the cell layer has a gradient hook"
        assert message in refusal(lambda: torch.autograd.grad(loss, [states[-1], task.x], retain_graph=True))
        states[-1].retain_grad()
        assert message in refusal(loss.backward)
