"""Any cell as a layer: torch's single-step cells and a user's own."""

import pytest
import torch
from cell_tasks import HIDDEN, INPUT, Task, refusal
from oracles import assert_close
from torch import nn
from torch.nn.utils import prune

import gradfree
from gradfree import CellLayer


@pytest.mark.parametrize("cell", ["leaky", "two parts"])
def test_window_1_trains_each_step_on_its_own_loss_alone(cell):
    task = Task(cell, 7)
    parts = task.state if isinstance(task.state, tuple) else (task.state,)
    weight, total = torch.randn(7, 5, HIDDEN), 0.0
    for t in range(7):
        after = task.layer.cell(task.x[t].detach(), parts if len(parts) > 1 else parts[0])
        parts = after if isinstance(after, tuple) else (after,)
        total = total + (parts[0] * weight[t]).sum()
        parts = tuple(part.detach() for part in parts)
    expected = torch.autograd.grad(total, list(task.layer.parameters()), allow_unused=True)
    with gradfree.create_engine("truncated").attach(task.layer):
        actual = torch.autograd.grad((task.run()[0] * weight).sum(), list(task.layer.parameters()))
    assert_close(actual, expected)


def test_it_equals_torchs_fused_layer_with_zeros_to_start_from():
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
def test_torchs_cells_are_taken_in_closed_form_only_as_torch_made_them(make):
    task = Task("gru cell", 7)
    task.layer.cell = make()
    expected = task.gradients()
    for engine in (gradfree.create_engine("backprop"), gradfree.create_engine("fixed_point", iterations=7)):
        with engine.attach(task.layer):
            assert_close(task.gradients(), expected)


def test_parameters_from_outside():
    """With closed forms their gradients; a cell of one's own runs again when they are gone, and is refused."""
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


def test_a_hook_before_a_known_cell_that_comes_later_is_part_of_it():
    task = Task("gru cell", 5)
    with gradfree.create_engine("fixed_point", iterations=5).attach(task.layer):
        hook = task.layer.cell.register_forward_pre_hook(lambda module, args: (0.5 * args[0], args[1]))
        actual = task.gradients()
    assert_close(actual, task.gradients())
    hook.remove()
